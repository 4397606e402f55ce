"""Losses through a real train step: micro-batches, plans, and what Kondo's gate saves."""

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
from learners.losses.delightful import dg_kondo
from learners.packing import Columns
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.learners.losses.token_batches import THROUGH_A_LEARNER
from tests.learners.test_learner import batches
from tests.seeds import seeded

CHOICES = [f"loss={name}" for name in COMPONENTS["loss"]]
CHOICES += [f"algorithm={file.stem}" for file in (CONFIGS / "algorithm").glob("*.yaml")]


def learner_of(loss, **knobs) -> TorchLearner:
    knobs = {"num_minibatches": 1, "publish_dtype": "float32", "clip_grad": 0.0} | knobs
    return TorchLearner(tiny_model().double(), loss, partial(group), 1.0, 0, **knobs)


def logprobs(learner: TorchLearner, batch) -> np.ndarray:
    step = learner._begin(batch)
    found = np.empty(len(step.behaviour))
    for part, current in learner._passes.logprobs(step.columns, [np.arange(len(batch.samples))]):
        found[part.trained.numpy()] = current.numpy()
    return found


def stale_batch(learner: TorchLearner):
    batch, rng = make_batch(seeded(0), groups=4), seeded(1)
    current = np.split(logprobs(learner, batch), np.cumsum([s.loss_mask.sum() for s in batch.samples])[:-1])
    for sample, known in zip(batch.samples, current, strict=True):
        sample.logprobs[sample.loss_mask] = known - rng.normal(0, 0.2, len(known))
    return batch


@pytest.mark.parametrize("choice", CHOICES)
def test_a_train_step_of_each_choice(choice) -> None:
    trainer = build_trainer(load([str(CONFIGS / "quickstart.yaml"), choice, "model.initializer_range=0.3"]))
    before, batch = trainer.snapshot().digest(), make_batch(seeded(0), groups=8, version=0)
    for sample in batch.samples:
        sample.logprobs[:] = -np.log(VOCAB)
    metrics = trainer.train(batch)
    assert trainer.snapshot().digest() != before and metrics["skipped_steps"] == 0 and metrics["grad_norm"] > 0
    assert all(np.isfinite(v) for v in metrics.values() if not isinstance(v, dict))


@pytest.mark.parametrize("loss", THROUGH_A_LEARNER.values(), ids=THROUGH_A_LEARNER)
def test_the_cut_into_micro_batches_changes_neither_gradient_nor_metrics(loss) -> None:
    """Nor do later minibatches: the proximal policy of the second one is that before the first."""
    knobs = {"num_minibatches": 2, "lr": 1e-2, "normalise": "sequence_mean"}
    whole, pieces = learner_of(loss, **knobs), learner_of(loss, **knobs, micro_batch_tokens=25)
    batch = stale_batch(whole)
    expected, metrics = whole.train(batch), pieces.train(batch)
    torch.testing.assert_close(pieces.optimizer.gradient, whole.optimizer.gradient, rtol=1e-5, atol=5e-7)
    for name, value in expected.items():
        if name.startswith(("loss", "kl/", "ess")):
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-8), name


def test_tokens_that_kondo_drops_go_through_no_backward_pass() -> None:
    learner, batch, counts = learner_of(partial(dg_kondo, keep=0.05)), batches(1, groups=8)[0], []

    def count(module, args, kwargs):
        if torch.is_grad_enabled():
            counts.append(kwargs["input_ids"].numel())

    learner.model.register_forward_pre_hook(count, with_kwargs=True)
    metrics, inputs = learner.train(batch), Columns(batch).lengths.sum()
    assert metrics["backward_tokens"] == sum(counts) < 0.35 * inputs
    assert metrics["backward_share"] == pytest.approx(sum(counts) / inputs)
    assert metrics["loss/gate"] == pytest.approx(0.05, abs=0.02)
    assert learner_of(ppo).train(batch)["backward_share"] == 1.0
    for sample in batch.samples:
        sample.reward = 1.0
    metrics = learner.train(batch)
    assert metrics["backward_tokens"] == 0 and metrics["loss"] == 0.0
