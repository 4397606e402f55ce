"""Encoding of groups: the numbers of many groups as one table, and one columnar payload each.

A push, a batch and a journal record carry the same table (`pack_heads`): `groups` names each group, `rows` has one
`ROW` per sample, `runs` the (version, n) pairs of all samples, both binary and in the order of the samples; `digests`
maps each version that made a token to the digest of its weights. Nothing is nested by sample, so checking a push of
many groups takes a few NumPy calls, and a group's part of the table is forwarded as the bytes that it came in.

A payload is flat, one column after the other: tokens int32 of prompts and responses | of response tokens logprobs
float32 and loss masks uint8 | places of turns int32 | rewards of turns float64 | experts (`models.experts`). A prompt
that several samples in a row share is sent once. The buffer looks only at the least and the greatest number of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from areal_like.models.experts import NONE, Shape, is_shape, shape_of, width
from areal_like.rewards import LARGEST_REWARD
from areal_like.types import Finish, Group, Runs, Sample
from areal_like.wire.frames import Frame, WireError
from areal_like.wire.messages import Model, Table

if TYPE_CHECKING:
    from typing_extensions import Buffer

FINISHES: tuple[Finish, ...] = get_args(Finish)
RUN = np.dtype([("version", "<i4"), ("n", "<i4")])
FORK = 2
"""In a loss mask (1: trained, 0: not): see `Sample.forks`."""
LEAST_LOGPROB, LOGPROB_ROUNDING = -80.0, 1e-6
"""No engine samples a token of so small a probability, and float32 could not hold its ratio to 1. The largest: an
engine that takes the log of a softmax may give a certain token this much above 0."""
_LEAST_LOGPROB_BITS = int(np.float32(LEAST_LOGPROB).view(np.uint32))  # smaller numbers and -inf have larger bits
least_of = np.minimum.reduce  # an array's own `min` takes twice as long: tables are small


class ColumnSizes(NamedTuple):
    """Entries of each column of a payload: all tokens, those of responses, rewards of turns. `positions`: those that
    have experts, of the shape `experts`."""

    tokens: int
    responses: int
    turns: int
    positions: int
    experts: Shape


Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""A payload's columns, as views: tokens, logprobs, masks, places, rewards, experts [positions, layers, k]."""
_INT32, _UINT32, _FLOAT32, _FLOAT64, _UINT8 = map(np.dtype, ("<i4", "<u4", "<f4", "<f8", "u1"))
_NO_TURNS = np.empty(0, np.int32), np.empty(0, np.float64)
_NO_EXPERTS = np.empty((0, 0, 0), np.uint8)


def columns(payload: Frame, sizes: ColumnSizes) -> Columns:
    """The columns of a payload of those sizes: nothing is copied. Those without entries may have any shape."""
    tokens, responses, turns, positions, shape = sizes
    start = 4 * tokens + 5 * responses
    places, rewards, experts = *_NO_TURNS, _NO_EXPERTS
    if turns:
        places = np.frombuffer(payload, _INT32, turns, start)
        rewards = np.frombuffer(payload, _FLOAT64, turns, start + 4 * turns)
    if shape != NONE:
        flat = np.frombuffer(payload, f"<u{shape[2]}", positions * shape[0] * shape[1], start + 12 * turns)
        experts = flat.reshape(positions, *shape[:2])
    return (
        np.frombuffer(payload, _INT32, tokens),
        np.frombuffer(payload, _FLOAT32, responses, 4 * tokens),
        np.frombuffer(payload, _UINT8, responses, 4 * (tokens + responses)),
        places,
        rewards,
        experts,
    )


def most_of(numbers: np.ndarray) -> Any:
    """The largest number; NaN if there is one. For few numbers `argmax` takes a third of the time of `max`."""
    return numbers.item(numbers.argmax())


def table(packed: bytes, name: str, kind: np.dtype) -> np.ndarray:
    """A table's entries, at least one. Raises WireError."""
    if not packed or len(packed) % kind.itemsize:
        raise WireError(f"{name} is not a whole number of entries of {kind.itemsize} bytes, or empty")
    return np.frombuffer(packed, kind)


def are_rewards(rewards: ArrayLike) -> bool:
    """Is each of them at most LARGEST_REWARD in size?"""
    return bool(most_of(np.abs(rewards)) <= LARGEST_REWARD)  # False for NaN


OR = " or "
"""Separates digests if a version has several."""
ROW = np.dtype(
    [("prompt", "<i4"), ("response", "<i4"), ("finish", "<i2"), ("turns", "<i2"), ("runs", "<i4"), ("reward", "<f8")]
)
"""One sample: lengths in tokens (prompt 0: that of the sample before), index into FINISHES, number of turns with a
reward of their own, of runs, reward."""


class Head(msgspec.Struct):
    """Facts about a group that the buffer uses without looking at its payload: see `Group`. `rows` and `runs` are its
    part of a table; `size`: bytes of the payload; `oldest`, `newest`: versions of its tokens; `tokens`: those of all
    responses; `prompts`: of all prompts that are sent; `prompt`, `response`: of the longest one; `parts`: of each
    sample's reward (empty: none has any)."""

    id: int
    samples: int
    seconds: float
    digests: dict[int, str]
    rows: bytes
    runs: bytes
    size: int
    oldest: int
    newest: int
    tokens: int
    prompts: int
    prompt: int
    response: int
    experts: Shape = NONE
    unscored: int = 0
    parts: list[dict[str, float]] = []

    @property
    def rewards(self) -> list[float]:
        return np.frombuffer(self.rows, ROW)["reward"].tolist()  # type: ignore[no-any-return]

    @property
    def lengths(self) -> list[int]:
        """Response tokens per sample."""
        return np.frombuffer(self.rows, ROW)["response"].tolist()  # type: ignore[no-any-return]

    @property
    def versions(self) -> list[int]:
        """The versions that made its tokens, ascending."""
        return sorted(self.digests)

    def oldest_tokens(self, allowed: int = 0) -> dict[int, int]:
        """Version → samples whose oldest token, among those of versions from `allowed` on, is of that version."""
        if self.oldest == self.newest:
            return {self.oldest: self.samples} if self.oldest >= allowed else {}
        made, per_sample = np.frombuffer(self.runs, RUN)["version"], np.frombuffer(self.rows, ROW)["runs"]
        starts = np.add.accumulate(per_sample, dtype=np.int64) - per_sample
        oldest = np.minimum.reduceat(np.where(made >= allowed, made, np.iinfo(np.int32).max), starts)
        return Counter(oldest[oldest < np.iinfo(np.int32).max].tolist())


def pack_heads(heads: Sequence[Head]) -> Table:
    """The table of several groups; inverse of `unpack_heads`. If groups disagree on a version's digest (other weights
    after a resume, or a false claim), the table has all their digests: see `OR`."""
    digests: dict[int, str] = {}
    for head in heads:
        if not head.digests.items() <= digests.items():
            for version, digest in head.digests.items():
                said = digests.setdefault(version, digest)
                digests[version] = said if digest in said.split(OR) else f"{said}{OR}{digest}"
    return Table(
        [(head.id, head.samples, head.seconds) for head in heads],
        b"".join([head.rows for head in heads]),
        b"".join([head.runs for head in heads]),
        digests,
        [head.experts for head in heads] if any(head.experts != NONE for head in heads) else [],
        [head.unscored for head in heads] if any(head.unscored for head in heads) else [],
        [head.parts for head in heads] if any(head.parts for head in heads) else [],
    )


def make_head(
    group_id: int,
    rows: Sequence[tuple[int, int, int, int, float]],
    runs: Runs,
    digests: dict[int, str],
    seconds: float = 0.0,
    turns: Sequence[int] | None = None,
    experts: Shape = NONE,
) -> Head:
    """The head of one group: `rows` are (prompt, response, finish, runs, reward), `turns` counts the turns' rewards of
    each sample (None: there are none). Raises WireError."""
    counts = turns or [0] * len(rows)
    numbers = [(*row[:3], count, *row[3:]) for row, count in zip(rows, counts, strict=True)]
    names = [(group_id, len(rows), seconds)]
    columns = np.array(numbers, ROW).tobytes(), np.array(runs, RUN).tobytes()
    return unpack_heads(Table(names, *columns, digests, [experts]))[0]


def unpack_heads(packed: Table) -> list[Head]:
    """The groups of a table, which may come from any sender. Raises WireError if its numbers don't agree."""
    names, digests = packed.groups, packed.digests
    shapes = packed.experts or [NONE] * len(names)
    if len(shapes) != len(names) or not all(map(is_shape, packed.experts)):
        raise WireError(f"groups: {len(names)} named, and experts of the shapes {shapes[:4]}")
    unscored, parts = packed.unscored or [0] * len(names), packed.parts or [[]] * len(names)
    sizes = zip(names, parts, strict=False) if packed.parts else ()
    fits = len(unscored) == len(parts) == len(names) and all(len(each) in (0, named[1]) for named, each in sizes)
    if not fits:
        raise WireError(f"groups: {len(names)} named, and not as many samples with parts of rewards, or without one")
    rows, runs = table(packed.rows, "groups: rows", ROW), table(packed.runs, "groups: runs", RUN)
    ends = list(accumulate(samples for _, samples, _ in names))
    if ends[-1] != len(rows):
        raise WireError(f"groups: {ends[-1]} samples named, {len(rows)} in the table")
    numbers, of_runs = _columns_of(rows), _columns_of(runs)  # a few operations on all columns: tables are small
    first, turns = [0, *ends[:-1]], [0] * len(names)
    _check_rows(rows, numbers, of_runs, first)
    prompts, responses, finishes_and_turns, n_runs, *_ = np.add.reduceat(numbers, first, axis=1).tolist()
    if max(finishes_and_turns) >> 16:
        turns = np.add.reduceat(rows["turns"], first, dtype=np.int64).tolist()
    run_ends = list(accumulate(n_runs))
    first_run = [0, *run_ends[:-1]]
    oldest = np.minimum.reduceat(of_runs[0], first_run).tolist()
    newest = np.maximum.reduceat(of_runs[0], first_run).tolist()
    contexts = prompts
    if packed.experts:  # they cover the prompts of all samples
        contexts = np.add.reduceat(_prompt_lengths(numbers[0]), first).tolist()
    longest = np.maximum.reduceat(numbers[:2], first, axis=1).tolist()
    made = set(of_runs[0].tolist())
    if not made <= digests.keys():
        raise WireError("groups: the digest of a version that made tokens is missing")
    if len(made) != len(digests):
        raise WireError("groups: a digest of a version that made no token of them")
    heads, row, run = list[Head](), 0, 0
    sums = zip(prompts, *longest, contexts, responses, turns, strict=True)
    columns_of = zip(names, ends, run_ends, sums, oldest, newest, shapes, unscored, parts, strict=True)
    for (group_id, samples, seconds), end, run_end, of_tokens, low, high, shape, without, of_parts in columns_of:
        sent, prompt, response, context, tokens, earned = of_tokens
        row_bytes = packed.rows[row * ROW.itemsize : end * ROW.itemsize]
        run_bytes = packed.runs[run * RUN.itemsize : run_end * RUN.itemsize]
        row, run = end, run_end
        mine = digests
        if len(digests) > 1:
            versions = {low} if low == high else set(np.frombuffer(run_bytes, RUN)["version"].tolist())
            mine = digests if len(versions) == len(digests) else {version: digests[version] for version in versions}
        size = 4 * sent + 9 * tokens + 12 * earned + (context + tokens - samples) * width(shape)
        facts = tokens, sent, prompt, response, shape, without, of_parts
        heads.append(Head(group_id, samples, seconds, mine, row_bytes, run_bytes, size, low, high, *facts))
    return heads


def _prompt_lengths(prompts: np.ndarray) -> np.ndarray:
    """The lengths of all prompts of a table's rows: 0 becomes that of the sample before."""
    return prompts[np.maximum.accumulate(np.where(prompts > 0, np.arange(len(prompts)), 0))]


def _columns_of(numbers: np.ndarray) -> np.ndarray:
    """The int32 columns of a table, int64, each contiguous: NumPy is slow across short rows."""
    return np.array(numbers.view("<i4").reshape(len(numbers), -1).T, np.int64, order="C")


def _check_rows(rows: np.ndarray, numbers: np.ndarray, of_runs: np.ndarray, first: list[int]) -> None:
    """`numbers`: the columns of `rows`; `of_runs`: those of the runs; `first`: the first row of each group."""
    prompt, response, finish_and_turns, per_sample, *_ = least_of(numbers, axis=1).tolist()
    if prompt < 0 or min(response, per_sample, least_of(numbers[0][first])) < 1:
        raise WireError("groups: a sample's lengths are out of range: prompt, response and runs are at least 1 each")
    if finish_and_turns < 0 or most_of(numbers[2]) >= len(FINISHES):  # else there are no turns
        if least_of(rows["turns"]) < 0:
            raise WireError("groups: a sample's number of turns is negative")
        if least_of(rows["finish"]) < 0 or most_of(rows["finish"]) >= len(FINISHES):
            raise WireError("groups: a sample's finish is out of range")
    if not are_rewards(rows["reward"]):
        raise WireError(f"groups: a reward is no number of at most {LARGEST_REWARD:g}")
    ends = np.add.accumulate(numbers[3])
    if ends[-1] != len(of_runs[0]):
        raise WireError(f"groups: {ends[-1]} runs are named, {len(of_runs[0])} in the table")
    version, n = least_of(of_runs, axis=1).tolist()
    if version < 0 or n < 1:
        raise WireError("groups: a run's version or length is out of range")
    covered = of_runs[1] if len(ends) == ends[-1] else np.add.reduceat(of_runs[1], ends - numbers[3])
    if covered.tobytes() != numbers[1].tobytes():
        raise WireError("groups: the runs of a sample do not cover its response")


def _sizes(head: Head) -> ColumnSizes:
    responses, positions = head.tokens, 0
    tokens = head.prompts + responses
    of_turns = head.size - 4 * tokens - 5 * responses
    if head.experts != NONE:
        prompts = np.frombuffer(head.rows, ROW)["prompt"]
        positions = int(_prompt_lengths(prompts).sum(dtype=np.int64)) + responses - head.samples
        of_turns -= positions * width(head.experts)
    return ColumnSizes(tokens, responses, of_turns // 12, positions, head.experts)


def check_payload(head: Head, payload: Frame, model: Model | None) -> None:
    """Raises WireError unless a learner can train on the group: token ids in the vocabulary of its `model` (None: not
    known), logprobs from LEAST_LOGPROB to 0, loss masks 0, 1 or FORK with a 1 among them, experts those of its routing,
    and rewards of turns in range."""
    sizes = _sizes(head)
    tokens, responses, *_, shape = sizes
    bits = np.frombuffer(payload, _UINT32, tokens + responses)
    ids, of_logprobs = bits[:tokens], bits[tokens:]
    if model and (most_token := most_of(ids)) >= model.vocab_size:  # negative numbers have the largest bits
        wrong = min(int(least_of(ids.view(_INT32))), 0) or most_token
        raise WireError(
            f"token {wrong} is not in the vocabulary of {model.vocab_size}: does its actor use the same task and model?"
        )
    most = most_of(logprobs := of_logprobs.view(_FLOAT32))
    if most_of(of_logprobs) > _LEAST_LOGPROB_BITS or not most <= LOGPROB_ROUNDING:  # also for NaN
        raise WireError(f"logprobs from {least_of(logprobs):g} to {most:g}: expected {LEAST_LOGPROB:g} to 0")
    masks = np.frombuffer(payload, _UINT8, responses, 4 * (tokens + responses))
    if (largest := most_of(masks)) != 1:
        if largest > FORK:
            raise WireError(f"its loss mask is not made of 0, 1 and {FORK}")
        if not (masks == 1).any():
            raise WireError("its loss mask leaves no token to train")
    if model and model.routing and (problem := model.routing.problem(shape, columns(payload, sizes)[-1])):
        raise WireError(problem)
    if sizes.turns:
        _turn_rewards(np.frombuffer(head.rows, ROW).tolist(), *columns(payload, sizes)[3:5])


def encode_group(group: Group) -> tuple[Head, bytearray]:
    """A group's head and its payload. Raises WireError if the group has no samples, or one without tokens. Experts
    travel only if all samples have them."""
    samples = group.samples
    for number, sample in enumerate(samples):
        if not sample.response_length:
            raise WireError(f"group {group.id}: sample {number} has an empty response: there is nothing to train")
    shared = [np.array_equal(_prompt(sample), _prompt(later)) for sample, later in pairwise(samples)]
    own = [0 if same else sample.prompt_length for sample, same in zip(samples, [False, *shared], strict=True)]
    rows = [
        (prompt, s.response_length, FINISHES.index(s.finish), len(s.runs), s.reward)
        for prompt, s in zip(own, samples, strict=True)
    ]
    turns = [len(s.turn_rewards) for s in samples]
    try:
        shape = shape_of([s.experts for s in samples])
    except ValueError as error:
        raise WireError(f"group {group.id}: {error}") from None
    runs = [run for s in samples for run in s.runs]
    head = make_head(group.id, rows, runs, group.digests, group.seconds, turns, shape)
    head.unscored, head.parts = group.unscored, [s.parts for s in samples] if any(s.parts for s in samples) else []
    payload = bytearray(head.size)
    tokens, logprobs, masks, places, rewards, experts = columns(payload, _sizes(head))
    sent = [s.tokens if prompt else s.tokens[s.prompt_length :] for prompt, s in zip(own, samples, strict=True)]
    np.concatenate(sent, out=tokens)
    np.concatenate([sample.logprobs for sample in samples], out=logprobs)
    np.concatenate([sample.loss_mask for sample in samples], out=masks.view(np.bool_))
    if any(sample.forks for sample in samples):
        _mark_forks(samples, masks)
    if any(turns):
        pairs = [pair for sample in samples for pair in sample.turn_rewards]
        places[:], rewards[:] = [place for place, _ in pairs], [reward for _, reward in pairs]
    if shape != NONE:
        np.concatenate([sample.experts for sample in samples if sample.experts is not None], out=experts)
    return head, payload


def _prompt(sample: Sample) -> np.ndarray:
    return sample.tokens[: sample.prompt_length]


def _mark_forks(samples: Sequence[Sample], masks: np.ndarray) -> None:
    """In the loss masks of all, uint8. Raises WireError."""
    start = 0
    for number, sample in enumerate(samples):
        places = np.array(sample.forks, np.int64)
        if len(places) and (places[0] < 0 or (np.diff(places) < 1).any() or not places[-1] < sample.response_length):
            raise WireError(f"sample {number}: its forks {sample.forks} are not ascending places in its response")
        if masks[start + places].any():
            raise WireError(f"sample {number}: the first token of a new context is trained, which nothing predicts")
        masks[start + places] = FORK
        start += sample.response_length


def decode_group(head: Head, payload: Buffer) -> Group:
    """Inverse of `encode_group`. The arrays are read-only views into `payload` (but tokens behind a shared prompt, and
    loss masks where contexts fork). Raises WireError where the rewards of turns are no numbers or have no place in
    the response."""
    rows, runs = np.frombuffer(head.rows, ROW).tolist(), np.frombuffer(head.runs, RUN).tolist()
    sizes = _sizes(head)
    tokens, logprobs, masks, places, rewards, experts = columns(memoryview(payload).toreadonly(), sizes)
    forks = np.flatnonzero(masks == FORK) if most_of(masks) == FORK else np.empty(0, np.int64)
    masks = masks == 1 if len(forks) else masks.view(np.bool_)
    turns = _turn_rewards(rows, places, rewards) if sizes.turns else [[] for _ in rows]
    samples, shared, t, r, run, at = list[Sample](), tokens[:0], 0, 0, 0, 0
    for (own, response, finish, _, n_runs, reward), earned in zip(rows, turns, strict=True):
        t_end, r_end, run_end = t + own + response, r + response, run + n_runs
        shared = tokens[t : t + own] if own else shared
        at_end = at + len(shared) + response - 1
        sample = Sample(
            tokens[t:t_end] if own else np.concatenate([shared, tokens[t:t_end]]),
            len(shared),
            logprobs[r:r_end],
            masks[r:r_end],
            runs[run:run_end],
            reward,
            FINISHES[finish],
            earned,
        )
        if head.experts != NONE:
            sample.experts = experts[at:at_end]
        if len(forks):
            sample.forks = (forks[(forks >= r) & (forks < r_end)] - r).tolist()
        if head.parts:
            sample.parts = head.parts[len(samples)]
        samples.append(sample)
        t, r, run, at = t_end, r_end, run_end, at_end
    return Group(head.id, samples, head.digests, head.seconds, unscored=head.unscored)


def _turn_rewards(
    rows: Sequence[Sequence[int]], places: np.ndarray, rewards: np.ndarray
) -> list[list[tuple[int, float]]]:
    """Per sample its pairs (place, reward)."""
    counts, responses = [row[3] for row in rows], np.array([row[1] for row in rows])
    if not are_rewards(rewards) or (places < 0).any() or (places >= np.repeat(responses, counts)).any():
        raise WireError(
            f"groups: the reward of a turn is no number of at most {LARGEST_REWARD:g}, or its place is not there"
        )
    pairs = list(zip(places.tolist(), rewards.tolist(), strict=True))
    ends = np.cumsum(counts).tolist()
    return [pairs[end - count : end] for end, count in zip(ends, counts, strict=True)]
