"""Samples whose context forks: each context is computed as a sequence of its own; reward and advantage are one."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from areal_like.types import Batch, Group, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.bounded import gspo
from learners.losses.clipped import ppo
from learners.losses.corrections import tis
from learners.losses.weighted import reinforce
from learners.packing import Columns
from tests.learners.batches import make_sample, tiny_model
from tests.learners.exact import ADAMW_EPS, SUMMED, exact
from tests.seeds import seeded

CPU = torch.device("cpu")


def forked(contexts: list[Sample], reward: float) -> Sample:
    """One sample of these contexts."""
    first, *others = contexts
    shown = [np.zeros(each.prompt_length, np.float32) for each in others]
    tokens = np.concatenate([each.tokens for each in contexts])
    logprobs = [part for zeros, each in zip(shown, others, strict=True) for part in (zeros, each.logprobs)]
    masks = [part for zeros, each in zip(shown, others, strict=True) for part in (zeros > 0, each.loss_mask)]
    response = len(tokens) - first.prompt_length
    return replace(
        first,
        tokens=tokens,
        logprobs=np.concatenate([first.logprobs, *logprobs]),
        loss_mask=np.concatenate([first.loss_mask, *masks]),
        runs=[(2, response)],
        reward=reward,
        forks=(np.cumsum([len(each.tokens) for each in contexts])[:-1] - first.prompt_length).tolist(),
    )


def batches() -> tuple[Batch, Batch]:
    """Three groups of three samples, most of which fork; and their contexts as samples of their own."""
    rng, joint, apart = seeded(0), [], []
    for number in range(3):
        members, singles = [], []
        for place in range(3):
            contexts = [make_sample(rng, prompt=6, response=4 + place)]
            for _ in range((number + place) % 3):
                contexts.append(make_sample(rng, prompt=10, response=5))
                contexts[-1].tokens[:7] = contexts[-2].tokens[:7]
            members.append(forked(contexts, contexts[0].reward))
            singles += [replace(each, reward=contexts[0].reward, runs=[(2, each.response_length)]) for each in contexts]
        joint.append(Group(number, members, {2: "d2"}))
        apart.append(Group(number, singles, {2: "d2"}))
    return Batch(0, 3, joint), Batch(0, 3, apart)


def as_they_are(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.asarray(rewards, np.float64)


def learner_of(loss=ppo, advantage=as_they_are, **knobs) -> TorchLearner:
    knobs = {"publish_dtype": "float32", "num_minibatches": 1, "lr": 1e-3, "eps": ADAMW_EPS, **knobs}
    return TorchLearner(exact(tiny_model()), loss, partial(advantage), 0.7, 0, **knobs)


@pytest.mark.parametrize(
    "knobs",
    [{}, {"micro_batch_tokens": 20}, {"loss": tis(reinforce), "num_minibatches": 2}, {"kl_loss": 0.1}],
    ids=["plain", "small micro-batches", "tis", "reference"],
)
def test_a_train_step_is_that_of_the_contexts_as_sequences_of_their_own(knobs):
    joint, apart = batches()
    one, many = learner_of(**knobs), learner_of(**knobs)
    found, expected = one.train(joint), many.train(apart)
    torch.testing.assert_close(one.optimizer.gradient, many.optimizer.gradient, **SUMMED)
    assert found["tokens"] == expected["tokens"] and found["grad_norm"] > 0
    assert found["computed_tokens"] <= found["backward_tokens"] == expected["backward_tokens"]


def test_a_samples_contexts_share_its_advantage_and_it_counts_once_in_its_group():
    joint, _ = batches()
    learner = learner_of(advantage=group)
    learner.train(joint)
    for each in joint.groups:
        mean = np.mean([sample.reward for sample in each.samples])
        for sample, numbers in zip(each.samples, learner.numbers(each.id), strict=True):
            advantages = numbers["advantage"][sample.loss_mask]
            np.testing.assert_allclose(advantages, sample.reward - mean, atol=1e-6)
            assert len(advantages) == sample.loss_mask.sum()


def test_a_loss_of_whole_samples_sees_one():
    """The weight of GSPO is one for a sample, for any number of contexts: in one micro-batch, even if that is large."""
    joint, _ = batches()
    columns = Columns(joint)
    trained = np.arange(len(joint.samples))
    cuts = columns.cuts(trained, 12)
    assert sorted(np.concatenate(cuts).tolist()) == trained.tolist() and len(cuts) > 3
    whole = columns.microbatch(trained, CPU)
    assert whole.sequence.tolist() == columns.sample.tolist()
    small, large = learner_of(gspo, group, micro_batch_tokens=12), learner_of(gspo, group)
    small.train(joint)
    large.train(joint)
    torch.testing.assert_close(small.optimizer.gradient, large.optimizer.gradient, **SUMMED)
