"""Weights of samples whose slower companions were cut: against chances counted over many groups."""

import math

import numpy as np
import pytest
import torch

from areal_like.config.run_config import load
from learners.advantages import group
from learners.build import build_trainer
from learners.cut_responses import MOST, inverse_chances, scores
from learners.losses.weighted import reinforce
from tests.learners.test_learner import batches, on_policy
from tests.learners.test_objective import learner_of

NEED, OVER = 8, 1.5
STARTED = math.ceil(NEED * OVER)


def kept(
    dice: np.random.Generator, groups: int, apart: float = 0.7, started: int = STARTED
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths that ended first, their groups, and the mean length of answers to each one's prompt."""
    prompts = dice.normal(0, apart, (groups, 1))
    lengths = np.sort(1000 * np.exp(prompts + dice.normal(0, 0.5, (groups, started))), axis=1)
    means = 1000 * np.exp(prompts[:, 0] + 0.5**2 / 2)
    return lengths[:, :NEED].astype(int).ravel(), np.repeat(np.arange(groups), NEED), np.repeat(means, NEED)


def test_a_weight_is_one_over_the_chance_to_be_among_the_first() -> None:
    """One group whose lengths lie at the normal scores, so that its fit is exact. Chances by counting others' draws,
    for each of the medians that such lengths may come from."""
    dice = np.random.default_rng(0)
    logs = 10 + 0.6 * np.array(scores(STARTED)[:NEED])
    error = np.sort(dice.normal(0, 0.6, (20_000, STARTED)), axis=1)[:, :NEED].mean(1).std()
    others = np.sort(dice.normal(0, 0.6, (100_000, STARTED - 1)), axis=1)[:, NEED - 1]
    medians = dice.normal(10, error, (2000, 1))
    chances = 1 - np.searchsorted(np.sort(others), logs - medians) / len(others)
    counted = np.minimum(MOST, 1 / np.maximum(chances, 1e-9)).mean(0)
    weights = inverse_chances(np.exp(logs), np.zeros(NEED), OVER)
    assert weights == pytest.approx(counted / counted.mean(), rel=0.03)
    assert np.all(np.diff(weights) > 0) and weights.mean() == pytest.approx(1.0)


@pytest.mark.parametrize(("over", "left"), [(1.25, 0.45), (OVER, 0.65)])
@pytest.mark.parametrize("apart", [0.0, 0.7, 3.0])
def test_they_remove_most_of_the_bias_of_lengths_and_no_more_than_is_there(
    apart: float, over: float, left: float
) -> None:
    """Relative to the prompt's mean, so that a few prompts of long answers don't count for all."""
    lengths, groups, means = kept(np.random.default_rng(0), 2000, apart, math.ceil(NEED * over))
    weights = inverse_chances(lengths, groups, over)
    dropped, weighed = np.mean(lengths / means) - 1, np.mean(weights * lengths / means) - 1
    assert dropped < -0.15 and left * dropped < weighed < 0
    assert weights.min() > 0 and weights.max() < MOST


def test_a_batch_of_like_prompts_tells_the_median_of_each() -> None:
    """Weights are those of the true median, though each group tells it by eight lengths only."""
    lengths, groups, _ = kept(np.random.default_rng(0), 1000, apart=0.0)
    scored = np.log(lengths / 1000) / 0.5
    others = np.sort(np.random.default_rng(1).standard_normal((200_000, STARTED - 1)), axis=1)[:, NEED - 1]
    chances = 1 - np.searchsorted(np.sort(others), scored) / len(others)
    truth = np.minimum(MOST, 1 / np.maximum(chances, 1e-9))
    apart = inverse_chances(lengths, groups, OVER) / (truth / truth.mean()) - 1
    assert np.quantile(abs(apart), 0.95) < 0.05


def test_prompts_of_long_answers_weigh_no_more_than_they_should() -> None:
    """Of all tokens, in batches of 32 groups: a group that happens to be long must not pass for such a prompt."""
    weighed = whole = 0.0
    for batch in range(60):
        lengths, groups, means = kept(np.random.default_rng(batch), 32, apart=0.8, started=10)
        weighed += float(np.sum(inverse_chances(lengths, groups, 1.25) * lengths))
        whole += float(means.sum())
    assert -0.05 < weighed / whole - 1 < 0


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
