"""Algorithm 1's properties for any lengths, and packed rows against their samples."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_like.types import Batch, Group, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.bounded import gspo
from learners.losses.clipped import ppo
from learners.losses.corrections import tis
from learners.losses.weighted import reinforce
from learners.packing import Columns, balanced, pack
from tests.learners.batches import make_batch, make_sample, tiny_model
from tests.learners.exact import ADAMW_EPS, SUMMED, exact
from tests.seeds import seeded


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 100))
def test_every_sequence_once_none_over_the_limit_and_no_micro_batch_without_need(lengths, most):
    """Each micro-batch was opened by a sequence that fitted into none of the earlier ones."""
    cuts = pack(lengths, most)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for m, cut in enumerate(cuts):
        assert sum(lengths[i] for i in cut) <= most or len(cut) == 1
        before = order[: order.index(cut[0])]
        for earlier in cuts[:m]:
            assert sum(lengths[i] for i in earlier if i in before) + lengths[cut[0]] > most


def test_follows_algorithm_1():
    # Longest first: 9 | 6 fits none and opens the second | 5 fits the second alone | 3 and 1: fewest sequences first.
    assert pack([3, 9, 1, 6, 5], 12) == [[1, 0], [3, 4, 2]]


BALANCED = [
    ([8, 7, 6, 5, 4], 16, [14, 16]),
    ([100, 200, 300, 150, 250], 500, [500, 500]),
    ([13, 41, 59, 56, 53, 9, 21, 12], 100, [84, 86, 94]),
    ([6, 8, 8, 26, 13, 50, 45, 22, 19], 64, [47, 49, 50, 51]),
    ([80, 33, 95, 46, 89, 95, 84, 68, 4, 60, 32, 84], 128, [93, 95, 95, 116, 117, 126, 128]),
    ([30, 23, 7, 20, 29, 13, 6], 40, [30, 30, 33, 35]),
    ([763, 408, 908, 1433, 198, 248, 1197, 292, 848, 1293, 218], 2048, [1943, 1949, 1954, 1960]),
    ([24, 33, 34, 18, 22, 12, 15, 18, 25, 42, 23, 35], 90, [75, 75, 75, 76]),
    ([287, 363, 241, 186, 120, 145, 493, 396, 53], 999, [749, 755, 780]),
    ([43, 9, 34, 37, 43, 7, 20, 36, 38, 24], 77, [72, 72, 73, 74]),
    ([5], 9, [5]),
    ([3, 9, 1], 8, [4, 9]),  # one is too long: as `pack`
    ([6, 6, 6], 10, [6, 6, 6]),  # two micro-batches would be too long
]


@pytest.mark.parametrize(("lengths", "most", "tokens"), BALANCED)
def test_balanced_micro_batches_hold_as_many_tokens_as_areals(lengths, most, tokens):
    cuts = balanced(lengths, most)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    assert sorted(sum(lengths[i] for i in cut) for cut in cuts) == tokens


def test_a_learner_packs_as_its_knob_has_it():
    columns = Columns(make_batch(np.random.default_rng(0), groups=12, masked=0.0))  # of these lengths
    spread = []
    for packing in ("first_fit", "balanced"):
        passes = TorchLearner(tiny_model(), ppo, group, packing=packing, micro_batch_tokens=80)._passes
        rows = [row.input_ids.numel() for row in passes.microbatches(columns, np.flatnonzero(columns.lengths))]
        assert max(rows) <= 80
        spread.append(max(rows) - min(rows))
    assert spread[1] < 0.5 * spread[0], spread


def test_a_row_holds_each_sample_up_to_its_last_trained_token():
    batch = make_batch(seeded(0), groups=3, size=4, vocab=50, max_response=9)
    batch.samples[1].loss_mask[:] = False
    samples, columns = batch.samples, Columns(batch)
    chosen = np.array([7, 2, 9, 0])
    row = columns.microbatch(chosen, torch.device("cpu"))
    start, k = 0, 0
    for number, i in enumerate(chosen):
        sample = samples[i]
        places = sample.prompt_length + np.flatnonzero(sample.loss_mask)
        length = int(places[-1])
        assert columns.lengths[i] == length
        assert row.input_ids[0, start : start + length].tolist() == sample.tokens[:length].tolist()
        assert row.position_ids[0, start : start + length].tolist() == list(range(length))
        token_versions = np.repeat([v for v, _ in sample.runs], [n for _, n in sample.runs])
        for place in places:
            response, t = place - sample.prompt_length, row.trained[k]
            assert (row.outputs[k], row.targets[k]) == (start + place - 1, sample.tokens[place])
            assert (row.sequence[k], columns.sample[t]) == (number, i)
            assert columns.behaviour[t] == sample.logprobs[response]
            assert columns.version[t] == token_versions[response]
            k += 1
        start += length
    assert k == len(row.targets) == columns.trained_tokens(chosen) and start == row.input_ids.shape[1]
    assert columns.lengths[1] == 0 and 1 not in columns.sample


def test_a_part_of_the_tokens_is_what_a_batch_with_those_tokens_would_be():
    """Rows of `only` equal those of a batch with these masks, and still count places from the whole batch."""
    batch = make_batch(seeded(3), groups=3)
    columns = Columns(batch)
    kept = seeded(4).random(len(columns.sample)) < 0.3
    part = columns.only(kept)
    places = iter(kept)
    for sample in batch.samples:
        sample.loss_mask = np.array([bool(m and next(places)) for m in sample.loss_mask])
    alone = Columns(batch)
    np.testing.assert_array_equal(part.lengths, alone.lengths)
    np.testing.assert_array_equal(part.trained_counts, alone.trained_counts)
    samples = np.flatnonzero(part.lengths)
    row, expected = (c.microbatch(samples, torch.device("cpu")) for c in (part, alone))
    for name in ("input_ids", "position_ids", "outputs", "targets", "sequence"):
        assert torch.equal(getattr(row, name), getattr(expected, name)), name
    np.testing.assert_array_equal(row.trained.numpy(), np.flatnonzero(kept))
    np.testing.assert_array_equal(part.tokens_of(samples), np.flatnonzero(kept))


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


def forking_learner(loss=ppo, advantage=as_they_are, **knobs) -> TorchLearner:
    knobs = {"publish_dtype": "float32", "num_minibatches": 1, "lr": 1e-3, "eps": ADAMW_EPS, **knobs}
    return TorchLearner(exact(tiny_model()), loss, partial(advantage), 0.7, 0, **knobs)


@pytest.mark.parametrize(
    "knobs",
    [{}, {"micro_batch_tokens": 20}, {"loss": tis(reinforce), "num_minibatches": 2}, {"kl_loss": 0.1}],
    ids=["plain", "small micro-batches", "tis", "reference"],
)
def test_a_train_step_is_that_of_the_contexts_as_sequences_of_their_own(knobs):
    joint, apart = batches()
    one, many = forking_learner(**knobs), forking_learner(**knobs)
    found, expected = one.train(joint), many.train(apart)
    torch.testing.assert_close(one.optimizer.gradient, many.optimizer.gradient, **SUMMED)
    assert found["tokens"] == expected["tokens"] and found["grad_norm"] > 0
    assert found["computed_tokens"] <= found["backward_tokens"] == expected["backward_tokens"]


def test_a_samples_contexts_share_its_advantage_and_it_counts_once_in_its_group():
    joint, _ = batches()
    learner = forking_learner(advantage=group)
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
    small, large = forking_learner(gspo, group, micro_batch_tokens=12), forking_learner(gspo, group)
    small.train(joint)
    large.train(joint)
    torch.testing.assert_close(small.optimizer.gradient, large.optimizer.gradient, **SUMMED)
