"""Every loss through a real train step: from its yaml, for every micro-batch size; what plans and Kondo's gate cost and
save."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from areal_like.config.layers import CONFIGS
from areal_like.config.registry import COMPONENTS
from areal_like.config.run_config import load
from learners.advantages import group
from learners.build import build_trainer
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from learners.losses.contract import MinibatchPlan
from learners.losses.delightful import dg, dg_kondo, kondo_gate
from learners.packing import Columns
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.learners.losses.token_batches import LOSSES
from tests.learners.test_learner import batches, on_policy
from tests.seeds import seeded

CHOICES = sorted({*COMPONENTS["loss"], *(file.stem for file in (CONFIGS / "loss").glob("*.yaml"))})
CHOICES = [name for name in CHOICES if not name.startswith("distill")]  # they need a teacher: test_distillation.py
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def learner_of(loss, **knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), loss, partial(group), 1.0, 0, **knobs)


def near_policy(learner, batch, spread: float = 0.2):
    """Behaviour logprobs near the learner's own, so that masks and clips pass a part of the tokens."""
    rng = seeded(7)
    for sample in on_policy(learner, batch).samples:
        sample.logprobs = (sample.logprobs + rng.normal(0, spread, len(sample.logprobs))).astype(np.float32)
    return batch


@pytest.mark.parametrize("name", CHOICES)
def test_a_train_step_of_each_choice(name):
    config = load([str(CONFIGS / "quickstart.yaml"), f"loss={name}", "model.initializer_range=0.3"])
    trainer = build_trainer(config)
    before = trainer.snapshot().digest()
    batch = make_batch(seeded(0), groups=8, version=0)
    for sample in batch.samples:
        sample.logprobs[:] = -np.log(VOCAB)
    metrics = trainer.train(batch)
    assert trainer.snapshot().digest() != before
    assert metrics["skipped_steps"] == 0 and metrics["grad_norm"] > 0
    assert all(np.isfinite(v) for v in metrics.values() if not isinstance(v, dict))


@every_loss
def test_the_cut_into_micro_batches_does_not_change_the_gradient(loss):
    knobs = {"num_minibatches": 2, "publish_dtype": "float32", "lr": 1e-4, "normalise": "sequence_mean"}
    whole, pieces = learner_of(loss, **knobs), learner_of(loss, **knobs, micro_batch_tokens=25)
    batch = near_policy(whole, batches(1)[0])
    expected, metrics = whole.train(batch), pieces.train(batch)
    torch.testing.assert_close(pieces.optimizer.gradient, whole.optimizer.gradient, rtol=1e-3, atol=2e-5)
    for name, value in expected.items():
        if name.startswith(("loss", "kl/", "ess")):
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@every_loss
def test_the_same_batch_gives_the_same_bits(loss):
    seen = set()
    for _ in range(2):
        learner = learner_of(loss)
        metrics = learner.train(near_policy(learner, batches(1)[0]))
        seen.add((learner.snapshot().digest(), str(metrics)))
    assert len(seen) == 1


def differentiated(learner) -> list[int]:
    """The number of input tokens of each later forward pass with gradient."""
    counts: list[int] = []

    def count(module, args, kwargs):
        if torch.is_grad_enabled():
            counts.append(kwargs["input_ids"].numel())

    learner.model.register_forward_pre_hook(count, with_kwargs=True)
    return counts


def test_tokens_that_kondo_drops_go_through_no_backward_pass():
    learner, batch = learner_of(partial(dg_kondo, keep=0.05)), batches(1, groups=8)[0]
    counts, inputs = differentiated(learner), Columns(batch).lengths.sum()
    metrics = learner.train(batch)
    assert metrics["backward_tokens"] == sum(counts) < 0.35 * inputs
    assert metrics["backward_share"] == pytest.approx(sum(counts) / inputs)
    assert metrics["loss/gate/mean"] == pytest.approx(0.05, abs=0.02)


def test_other_losses_differentiate_everything():
    learner, batch = learner_of(ppo), batches(1, groups=8)[0]
    metrics = learner.train(batch)
    assert metrics["backward_tokens"] == Columns(batch).lengths.sum() and metrics["backward_share"] == 1.0


def test_skipping_the_dropped_tokens_leaves_the_gradient_as_it_is():
    """Compared with the same plan without skipping, where dropped tokens have weight 0."""

    def masked(batch, denominator):
        return dg_kondo(batch, denominator, keep=0.2)

    masked.plan = MinibatchPlan(partial(kondo_gate, keep=0.2))
    knobs = {"num_minibatches": 1, "publish_dtype": "float32"}
    skipping, masking = learner_of(partial(dg_kondo, keep=0.2), **knobs), learner_of(masked, **knobs)
    batch = batches(1)[0]
    few, everything = skipping.train(batch), masking.train(batch)
    assert few["backward_share"] < 0.8 and everything["backward_share"] == 1.0
    torch.testing.assert_close(skipping.optimizer.gradient, masking.optimizer.gradient, rtol=1e-3, atol=1e-6)
    assert few["loss"] == pytest.approx(everything["loss"], rel=1e-4)
    assert few["kl/k3"] == pytest.approx(everything["kl/k3"], rel=1e-3)


def test_kondo_may_drop_a_whole_minibatch():
    learner, batch = learner_of(partial(dg_kondo, keep=0.5)), batches(1)[0]
    for sample in batch.samples:
        sample.reward = 1.0
    metrics = learner.train(batch)
    assert metrics["backward_tokens"] == 0 and metrics["loss"] == 0.0


def test_one_pass_losses_refuse_a_second_pass():
    for loss in (dg, partial(dg_kondo, keep=0.5)):
        with pytest.raises(ValueError, match="num_minibatch_epochs"):
            learner_of(loss, num_minibatch_epochs=2)


def test_drawn_gates_are_keyed_by_sample_not_by_place_in_the_batch():
    """The same groups in another order draw the same numbers for the same tokens."""
    loss = partial(dg, bernoulli=True)
    knobs = {"num_minibatches": 1, "publish_dtype": "float32"}
    batch = batches(1)[0]
    one, other = learner_of(loss, **knobs), learner_of(loss, **knobs)
    one.train(batch)
    other.train(replace(batch, groups=batch.groups[::-1]))
    torch.testing.assert_close(one.optimizer.gradient, other.optimizer.gradient, rtol=1e-3, atol=1e-6)
