"""Samples whose context forks: each context is computed as a sequence of its own; reward and advantage are one."""

from functools import partial

import numpy as np
import pytest
import torch

from areal_like.types import Batch, Group, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import gspo, ppo
from learners.losses.corrections import tis
from learners.losses.weighted import reinforce
from learners.objective import Objective
from learners.packing import Columns
from tests.learners.batches import VOCAB, tiny_model
from tests.learners.exact import ADAMW_EPS, SUMMED, exact
from tests.seeds import seeded

CPU = torch.device("cpu")


def context(rng: np.random.Generator, begin: np.ndarray, more: int, answer: int) -> Sample:
    """A sample of one context: `begin` and more tokens as the prompt."""
    tokens = np.concatenate([begin, rng.integers(0, VOCAB, more + answer)]).astype(np.int32)
    logprobs = (-rng.exponential(2.0, answer)).astype(np.float32)
    length = len(begin) + more
    return Sample(tokens, length, logprobs, np.ones(answer, bool), [(2, answer)], 0.0, "stop")


def forked(contexts: list[Sample], reward: float) -> Sample:
    """One sample of these contexts."""
    first, *others = contexts
    tokens, logprobs, masks = [first.tokens], [first.logprobs], [first.loss_mask]
    forks: list[int] = []
    for each in others:
        forks.append(sum(map(len, masks)))
        shown = each.prompt_length
        tokens.append(each.tokens)
        logprobs.append(np.concatenate([np.zeros(shown, np.float32), each.logprobs]))
        masks.append(np.concatenate([np.zeros(shown, bool), each.loss_mask]))
    flat = np.concatenate(tokens)
    response = len(flat) - first.prompt_length
    return Sample(
        flat, first.prompt_length, np.concatenate(logprobs), np.concatenate(masks), [(2, response)], reward, "stop",
        forks=forks,
    )  # fmt: skip


def batches() -> tuple[Batch, Batch]:
    """Three groups of three samples, most of which fork; and their contexts as samples of their own."""
    rng = seeded(0)
    joint, apart = [], []
    for number in range(3):
        prompt = rng.integers(0, VOCAB, 6)
        members, singles = [], []
        for place in range(3):
            contexts = [context(rng, prompt, 0, 4 + place)]
            for _ in range((number + place) % 3):
                contexts.append(context(rng, contexts[-1].tokens[:7], 3, 5))
            reward = float(rng.integers(0, 4))
            members.append(forked(contexts, reward))
            for each in contexts:
                each.reward = reward
            singles += contexts
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


def test_what_counts_as_long_is_the_longest_context():
    joint, _ = batches()
    longest = max(joint.samples, key=lambda sample: len(sample.forks))
    assert len(longest.forks) == 2 and longest.reach < longest.response_length
    assert longest.contexts[0] == (0, longest.prompt_length + longest.forks[0])
    assert sum(end - begin for begin, end in longest.contexts) == len(longest.tokens)
    limits = {"overlong_penalty": 1.0, "overlong_limit": longest.reach, "overlong_buffer": longest.reach}
    penalty = Objective(**limits).length_penalties(Batch(0, 0, [Group(0, [longest])]))
    assert penalty.tolist() == [1.0]


def test_the_first_token_of_a_context_cannot_be_trained():
    joint, _ = batches()
    wrong = max(joint.samples, key=lambda sample: len(sample.forks))
    wrong.loss_mask[wrong.forks[0]] = True
    with pytest.raises(ValueError, match="nothing predicts it"):
        Columns(joint)
