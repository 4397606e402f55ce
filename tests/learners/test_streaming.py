"""Gradients computed group by group, while other groups run, give the step of the whole batch; the order of arrival
changes no bit."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from areal_like.types import Batch
from learners.advantages import batch as batch_advantage
from learners.advantages import gae, group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo, ppo
from learners.losses.corrections import capped, tis
from learners.losses.delightful import dg
from learners.losses.targets import tpo
from learners.losses.weighted import reinforce
from tests.learners.batches import assert_metrics_close, make_batch, make_sample, tiny_model
from tests.learners.exact import ADAMW_EPS, STEPPED, SUMMED, exact
from tests.rounding import assert_rounds_alike
from tests.seeds import seeded

DECOUPLED = capped(decoupled_ppo)


def learner_of(loss=DECOUPLED, advantage=group, model=None, **knobs) -> TorchLearner:
    return TorchLearner(model or tiny_model(), loss, partial(advantage), 1.0, 0, num_minibatches=1, **knobs)


def uneven(index: int = 0) -> Batch:
    """A batch as tail batching and group sizing make it: groups of their own sizes, with very different lengths."""
    rng = seeded(index)
    made = make_batch(rng, index=index, version=index, groups=6, size=(2, 4, 8)[index % 3], max_response=30)
    made.groups[2].samples[0].loss_mask[:] = False
    made.groups[3].samples = [
        make_sample(rng, prompt=3, response=1 + i % 2, version=index) for i in range(len(made.groups[3].samples))
    ]
    return made


def parts(batch: Batch, *cuts: int) -> list[Batch]:
    edges = [0, *cuts]
    return [replace(batch, groups=batch.groups[a:b]) for a, b in pairwise(edges)]


KNOBS = [
    {},
    {"normalise": "sequence_mean", "entropy_bonus": 0.05},
    {"normalise": 16.0, "kl_loss": 0.1, "kl_reward": 0.1},
    {"loss": dg, "overlong_penalty": 0.5, "overlong_limit": 20, "overlong_buffer": 10},
    {"loss": tis(reinforce), "micro_batch_tokens": 20},
    {"advantage": gae, "critic_lr": 1e-2, "critic_trunk": 0.1},
    {"stream_groups": 4, "normalise": "sequence_mean"},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(knobs) or "plain")
def test_the_streamed_update_is_the_one_shot_update(knobs):
    """In float64: the gradient, the critic's, the weights after several steps, and the metrics."""
    knobs = {"publish_dtype": "float32", "clip_grad": 0.5, "eps": ADAMW_EPS, **knobs}
    streamed, whole = (learner_of(model=exact(tiny_model()), stream=stream, **knobs) for stream in (True, False))
    for batch in [uneven(0), uneven(1), uneven(2)]:
        for part in parts(batch, 1, 4):
            streamed.take(part)
        found, expected = streamed.train(batch), whole.train(batch)
        tolerance = STEPPED if batch.index else SUMMED
        torch.testing.assert_close(streamed.optimizer.gradient, whole.optimizer.gradient, **tolerance)
        assert_metrics_close(found, expected, **tolerance)
        if whole._critic:
            head, other = streamed._critic.state_dict()["head"], whole._critic.state_dict()["head"]
            torch.testing.assert_close(head["weight"], other["weight"], **STEPPED)
        torch.testing.assert_close(streamed.optimizer._master, whole.optimizer._master, **STEPPED)


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(knobs) or "plain")
def test_float32_loses_no_more_in_a_streamed_gradient_than_in_a_one_shot_one(knobs):
    streamed, whole, truth = (
        learner_of(model=model, stream=stream, publish_dtype="float32", **knobs)
        for model, stream in ((tiny_model(), True), (tiny_model(), False), (exact(tiny_model()), False))
    )
    for learner in (streamed, whole, truth):
        learner.train(uneven(0))
    assert streamed.optimizer.gradient.dtype == torch.float32 and truth.optimizer.gradient.dtype == torch.float64
    assert_rounds_alike(streamed.optimizer.gradient, whole.optimizer.gradient, truth.optimizer.gradient)


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("cuts", [(), (6,), (1, 2, 3, 4, 5, 6), (5,)])
def test_when_groups_came_changes_no_bit(cuts, at_once):
    """A batch that is trained again as a whole, after a crash or in a replay, gives the same weights."""
    early, late = (learner_of(stream=True, stream_groups=at_once) for _ in range(2))
    for batch in [uneven(0), uneven(1)]:
        for part in parts(batch, *cuts):
            early.take(part)
        assert early.train(batch) == late.train(batch)
    assert early.snapshot().digest() == late.snapshot().digest()


def test_nothing_is_applied_before_the_batch_is_there():
    learner, batch = learner_of(stream=True), uneven()
    before = learner.snapshot().digest()
    for part in parts(batch, 2, 6):
        learner.take(part)
        assert learner.snapshot().digest() == before and learner.optimizer.steps == 0
    learner.train(batch)
    assert learner.snapshot().digest() != before and learner.optimizer.steps == 1


def test_gradients_of_groups_that_are_not_in_the_batch_are_forgotten():
    learner, plain = (learner_of(stream=True, stream_groups=2) for _ in range(2))
    batch, other = uneven(0), uneven(3)
    learner.take(parts(other, 3)[0])
    learner.take(parts(batch, 1)[0])
    assert learner.train(batch) == plain.train(batch)
    assert learner.snapshot().digest() == plain.snapshot().digest()


def test_a_batch_with_nothing_to_train_changes_nothing():
    learner, batch = learner_of(stream=True), uneven()
    for sample in batch.samples:
        sample.loss_mask[:] = False
    before = learner.snapshot().digest()
    assert learner.train(batch)["loss"] == 0.0 and learner.snapshot().digest() == before


@pytest.mark.parametrize(
    "wrong, why",
    [
        ({"num_minibatches": 2}, "num_minibatches"),
        ({"num_minibatch_epochs": 2}, "num_minibatch"),
        ({"loss": tpo}, "weighs all tokens"),
        ({"advantage": batch_advantage}, "whole batch"),
        ({"grad_norm_by_staleness": True}, "grad_norm_by_staleness"),
        ({"stream_groups": 0}, "stream_groups must be at least 1"),
    ],
)
def test_what_needs_the_whole_batch_is_refused(wrong, why):
    knobs = {"loss": ppo, "advantage": group, "num_minibatches": 1, **wrong}
    with pytest.raises(ValueError, match=why):
        TorchLearner(tiny_model(), knobs.pop("loss"), partial(knobs.pop("advantage")), stream=True, **knobs)
