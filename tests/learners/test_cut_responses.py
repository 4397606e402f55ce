"""Weights of samples whose slower companions were cut: against chances counted over many groups."""

import math

import numpy as np
import pytest
import torch

from areal_like.config import load
from areal_like.normal_scores import scores
from learners.advantages import group
from learners.build import build_trainer
from learners.cut_responses import MOST, inverse_chances
from learners.losses.weighted import reinforce
from tests.learners.test_learner import batches, on_policy
from tests.learners.test_objective import learner_of

NEED, OVER = 8, 1.5
STARTED = math.ceil(NEED * OVER)


def kept(dice: np.random.Generator, groups: int, sigma: float = 0.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths that ended first, their groups, and lengths of all that were started."""
    started = np.sort(
        1000 * np.exp(dice.normal(0, 0.7, (groups, 1)) + dice.normal(0, sigma, (groups, STARTED))), axis=1
    )
    return started[:, :NEED].astype(int).ravel(), np.repeat(np.arange(groups), NEED), started


def test_a_weight_is_one_over_the_chance_to_be_among_the_first() -> None:
    """One group whose lengths lie at the normal scores, so that its fit is exact; chances by counting others' draws."""
    lengths = np.exp(10 + 0.6 * np.array(scores(STARTED)[:NEED]))
    others = np.sort(np.random.default_rng(0).normal(10, 0.6, (200_000, STARTED - 1)), axis=1)[:, NEED - 1]
    counted = 1 / np.mean(np.log(lengths)[:, None] < others, axis=1)
    weights = inverse_chances(lengths, np.zeros(NEED), OVER)
    assert weights == pytest.approx(counted / counted.mean(), rel=0.02)
    assert np.all(np.diff(weights) > 0) and weights.mean() == pytest.approx(1.0)


def test_they_remove_a_part_of_the_bias_of_lengths_and_no_more_than_is_there() -> None:
    lengths, groups, started = kept(np.random.default_rng(0), 2000)
    weights = inverse_chances(lengths, groups, OVER)
    dropped, weighed = lengths.mean() / started.mean() - 1, np.mean(weights * lengths) / started.mean() - 1
    assert dropped < -0.25 and dropped + 0.04 < weighed < 0
    assert weights.min() > 0 and weights.max() < MOST


def test_order_and_other_groups_ids_do_not_matter() -> None:
    dice = np.random.default_rng(1)
    lengths, groups, _ = kept(dice, 6)
    shuffled = dice.permutation(len(lengths))
    assert inverse_chances(lengths[shuffled], 7 * groups[shuffled] + 3, OVER) == pytest.approx(
        inverse_chances(lengths, groups, OVER)[shuffled]
    )


@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [0, 0, 1, 1], [7]])
def test_lengths_without_a_spread_are_weighed_finitely(lengths: list[int]) -> None:
    weights = inverse_chances(np.array(lengths), np.zeros(len(lengths), int), 1.25)
    assert np.isfinite(weights).all() and weights.mean() == pytest.approx(1.0)


def test_the_learner_multiplies_advantages_by_them() -> None:
    batch = on_policy(learner_of(), batches(1)[0])
    lengths = np.array([sample.response_length for sample in batch.samples])

    def weighed(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return group(rewards, groups) * inverse_chances(lengths, groups, OVER)

    knobs = {"num_minibatches": 1}
    ours, truth = learner_of(reinforce, started_per_trained=OVER, **knobs), learner_of(reinforce, weighed, **knobs)
    ours.train(batch)
    truth.train(batch)
    assert torch.equal(ours.optimizer.gradient, truth.optimizer.gradient) and truth.optimizer.gradient.any()
    plain = learner_of(reinforce, **knobs)
    plain.train(batch)
    assert not torch.allclose(ours.optimizer.gradient, plain.optimizer.gradient, rtol=1e-3)


def test_a_stream_has_no_whole_batch_to_fit() -> None:
    with pytest.raises(ValueError, match=r"stream: scheduler\.cut_responses=weigh fits lengths of a whole batch"):
        learner_of(stream=True, num_minibatches=1, started_per_trained=1.25)


def test_the_scheduler_says_it_and_the_learner_is_told() -> None:
    knobs = ["scheduler.oversample_responses=1.25", "scheduler.cut_responses=weigh"]
    assert build_trainer(load(["quickstart", *knobs])).objective.started_per_trained == 1.25
    assert build_trainer(load(["quickstart", knobs[0]])).objective.started_per_trained == 1.0
