"""Algorithm 1's properties for any lengths, and packed rows against their samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_like.types import Sample
from learners.packing import Columns, pack, ranges
from tests.learners.batches import make_batch, make_sample
from tests.seeds import seeded

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 6))
def test_every_sequence_once_and_none_over_the_limit(lengths, micro_batch_tokens, minimum):
    cuts = pack(lengths, micro_batch_tokens=micro_batch_tokens, min_microbatches=minimum)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    assert all(cut for cut in cuts)
    for cut in cuts:
        assert sum(lengths[i] for i in cut) <= micro_batch_tokens or len(cut) == 1
    assert len(cuts) >= min(minimum, len(lengths))


@given(LENGTHS, st.integers(60, 200), st.integers(1, 6))
def test_a_micro_batch_is_opened_only_when_it_must(lengths, micro_batch_tokens, minimum):
    """Each one beyond the minimum was opened by a sequence that fitted into none of the earlier ones."""
    cuts = pack(lengths, micro_batch_tokens=micro_batch_tokens, min_microbatches=minimum)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for m, cut in enumerate(cuts[minimum:], minimum):
        before = order[: order.index(cut[0])]
        for earlier in cuts[:m]:
            held = sum(lengths[i] for i in earlier if i in before)
            assert held + lengths[cut[0]] > micro_batch_tokens


def test_follows_algorithm_1():
    # Longest first: 9 | 6 opens the second of k_min | 5 fits the second alone | 3 and 1: fewest sequences first.
    assert pack([3, 9, 1, 6, 5], micro_batch_tokens=12, min_microbatches=2) == [[1, 0], [3, 4, 2]]


def test_a_sequence_above_the_limit_is_alone():
    assert pack([5, 30, 5], micro_batch_tokens=10) == [[1], [0, 2]]


@pytest.mark.parametrize("knobs", [{"micro_batch_tokens": 0}, {"micro_batch_tokens": 5, "min_microbatches": 0}])
def test_limits_must_be_positive(knobs):
    with pytest.raises(ValueError, match="positive"):
        pack([1], **knobs)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5))))
def test_ranges_is_the_concatenation_of_aranges(pairs):
    expected = [x for start, count in pairs for x in range(start, start + count)]
    starts, counts = (np.array([p[i] for p in pairs], np.int64) for i in (0, 1))
    assert ranges(starts, counts).tolist() == expected


def test_a_row_holds_each_sample_up_to_its_last_trained_token():
    rng = seeded(0)
    batch = make_batch(rng, groups=3, size=4, vocab=50, max_response=9)
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
            response = place - sample.prompt_length
            assert row.outputs[k] == start + place - 1
            assert row.targets[k] == sample.tokens[place]
            assert row.sequence[k] == number
            t = row.trained[k]
            assert columns.sample[t] == i
            assert columns.behaviour[t] == sample.logprobs[response]
            assert columns.version[t] == token_versions[response]
            k += 1
        start += length
    assert k == len(row.targets) == columns.trained_tokens(chosen) and start == row.input_ids.shape[1]


def test_a_sample_without_trained_tokens_has_no_length():
    rng = seeded(1)
    batch = make_batch(rng, groups=1, size=3)
    batch.samples[1].loss_mask[:] = False
    columns = Columns(batch)
    assert columns.lengths[1] == 0 and (columns.lengths[[0, 2]] > 0).all()
    assert 1 not in columns.sample


def test_samples_whose_arrays_disagree_are_refused():
    rng = seeded(2)
    batch = make_batch(rng, groups=1, size=2)
    batch.samples[1].runs = [(0, 99)]
    with pytest.raises(ValueError, match="runs over 99"):
        Columns(batch)
    batch.groups[0].samples[1] = make_sample(rng, prompt=0, response=3)
    with pytest.raises(ValueError, match="prompt token"):
        Columns(batch)
    empty = Sample(np.ones(2, np.int32), 2, np.zeros(0, np.float32), np.zeros(0, bool), [], 1.0, "stop")
    batch.groups[0].samples[1] = empty
    with pytest.raises(ValueError, match="sample 1 of the batch has an empty response"):
        Columns(batch)
    batch.groups[0].samples.clear()
    with pytest.raises(ValueError, match="at least one sample"):
        Columns(batch)


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
    np.testing.assert_array_equal(part.trained_counts(), alone.trained_counts())
    samples = np.flatnonzero(part.lengths)
    row, expected = (c.microbatch(samples, torch.device("cpu")) for c in (part, alone))
    for name in ("input_ids", "position_ids", "outputs", "targets", "sequence"):
        assert torch.equal(getattr(row, name), getattr(expected, name)), name
    np.testing.assert_array_equal(row.trained.numpy(), np.flatnonzero(kept))
    np.testing.assert_array_equal(part.tokens_of(samples), np.flatnonzero(kept))
