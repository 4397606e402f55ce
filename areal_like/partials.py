"""Partial groups: what an actor hands back of a group that it will not finish, and the next lease of it carries.

A workflow depends only on the answers of the engine and the verifier, so only the answers are kept: each call's tokens,
behaviour logprobs and runs (`areal_like.types.PartialSample`). The next actor starts the workflow again: it answers
finished calls from the record, and continues the interrupted one at its next token, in the same stream of random
numbers. The workflow makes prompts, loss masks and filler again, so they are not sent.

As with groups, the buffer reads the numbers (`PartialHead`, in columns) and forwards the payload (all tokens int32 |
all logprobs float32 | if the engine returns them, all experts): `calls` has one `CALL` per call, those of a sample in
their order; `runs` those of all calls; `scores` one `SCORE` per response that was verified; `digests` are those of the
versions that made a token; `positions` int32 counts those of each call that have experts, of the shape `experts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import xxhash

from areal_like.experts import NONE, Routing, block, is_shape, shape_of, width
from areal_like.groups import FINISHES, RUN, check_sampled, covered_by, fits_float32, view
from areal_like.messages import PartialHead
from areal_like.types import CarriedSamples, Completion, PartialSample
from areal_like.wire import Frame, WireError

CALL = np.dtype([("given", "<u8"), ("offset", "<i8"), ("sample", "<i4"), ("finish", "<i2"), ("runs", "<i4")])
"""One call: digest of the tokens given, its offset, index of the sample, index into FINISHES, number of runs."""
SCORE = np.dtype([("response", "<u8"), ("reward", "<f8"), ("sample", "<i4")])
"""One score: digest of the response, reward, index of the sample."""
_BYTES_PER_TOKEN = 8


def digest_of(tokens: np.ndarray) -> int:
    """A 64-bit hash of token ids, int [n]."""
    return xxhash.xxh3_64_intdigest(np.asarray(tokens, np.int32).tobytes())


def encode_partial(
    group_id: int, samples: Mapping[int, PartialSample], digests: Mapping[int, str]
) -> tuple[PartialHead, bytes] | None:
    """A partial group's head and its payload, or None if no token was sampled. `digests` has at least the versions that
    made the tokens."""
    calls, scores, kept = [], [], []
    for index, sample in samples.items():
        begun = [(key, call) for key, call in sample.calls.items() if len(call.tokens)]
        calls += [(*key, index, FINISHES.index(call.finish), len(call.runs)) for key, call in begun]
        kept += [call for _, call in begun]
        scores += [(digest, score, index) for digest, score in sample.scores.items() if begun]
    if not kept:
        return None
    runs = [run for call in kept for run in call.runs]
    found = {version: digests[version] for version in sorted({version for version, _ in runs})}
    columns = np.array(calls, CALL).tobytes(), np.array(runs, RUN).tobytes(), np.array(scores, SCORE).tobytes()
    parts = [np.asarray(call.tokens, np.int32) for call in kept] + [np.asarray(c.logprobs, np.float32) for c in kept]
    experts = [call.experts for call in kept]
    shape, positions = shape_of(experts), b""
    if shape != NONE:
        parts += [each for each in experts if each is not None]
        positions = np.array([len(each) for each in experts if each is not None], np.int32).tobytes()
    return PartialHead(group_id, *columns, found, positions, shape), b"".join(part.tobytes() for part in parts)


def decode_partial(head: PartialHead, payload: Frame, usable: Collection[int]) -> CarriedSamples:
    """The samples of `usable`. The arrays are views into `payload`."""
    runs = np.frombuffer(head.runs, RUN).tolist()
    total = sum(n for _, n in runs)
    tokens, logprobs = np.frombuffer(payload, np.int32, total), np.frombuffer(payload, np.float32, total, 4 * total)
    found: dict[int, PartialSample] = {}
    counts = np.frombuffer(head.positions, np.int32)
    places = np.concatenate([[0], np.cumsum(counts)]).tolist()
    experts = None if head.experts == NONE else block(payload, head.experts, places[-1], 8 * total)
    start = run = 0
    for number, (given, offset, index, finish, n_runs) in enumerate(np.frombuffer(head.calls, CALL).tolist()):
        mine = runs[run : run + n_runs]
        end, run = start + sum(n for _, n in mine), run + n_runs
        chosen = None if experts is None else experts[places[number] : places[number + 1]]
        call = Completion(tokens[start:end], logprobs[start:end], mine, FINISHES[finish], chosen)
        found.setdefault(index, PartialSample()).calls[given, offset] = call
        start = end
    for digest, score, index in np.frombuffer(head.scores, SCORE).tolist():
        found[index].scores[digest] = score
    return CarriedSamples({index: sample for index, sample in found.items() if index in usable}, dict(head.digests))


def samples_of(head: PartialHead) -> list[int]:
    """Index of the sample that each run of the head belongs to."""
    calls = np.frombuffer(head.calls, CALL)
    return np.repeat(calls["sample"], calls["runs"]).tolist()


def versions_of(head: PartialHead) -> dict[int, set[int]]:
    """Sample → the versions that made its tokens."""
    found: dict[int, set[int]] = {}
    for index, version in zip(samples_of(head), np.frombuffer(head.runs, RUN)["version"].tolist(), strict=True):
        found.setdefault(index, set()).add(version)
    return found


def check_partial(
    head: PartialHead, payload: Frame, vocab_size: int | None = None, routing: Routing | None = None
) -> None:
    """Raises WireError unless the head's numbers agree with one another and with the payload, and the samples are valid
    (`areal_like.groups.check_sampled`), their experts those of a model of that `routing` (None: not known)."""
    name = f"partial group {head.id}"
    calls, runs = view(head.calls, f"{name}: calls", CALL), view(head.runs, f"{name}: runs", RUN)
    scores = view(head.scores, f"{name}: scores", SCORE) if head.scores else np.empty(0, SCORE)
    if min(calls["sample"].min(), calls["offset"].min(), calls["finish"].min()) < 0 or calls["runs"].min() < 1:
        raise WireError(f"{name}: a call's sample, offset, finish or number of runs is out of range")
    if calls["finish"].max() >= len(FINISHES):
        raise WireError(f"{name}: a call's finish is out of range")
    tokens = int(covered_by(runs, calls["runs"], name).sum())
    positions = _positions(head, len(calls))
    if tokens * _BYTES_PER_TOKEN + positions * width(head.experts) != len(payload):
        raise WireError(f"{name}: the payload's size is not that of its samples")
    if len(scores) and (not fits_float32(scores["reward"]) or not np.isin(scores["sample"], calls["sample"]).all()):
        raise WireError(f"{name}: a score is no float32 number, or of a sample that has not begun")
    if head.digests.keys() != set(runs["version"].tolist()):
        raise WireError(f"{name}: needs the digest of each version that made it, and of no other")
    sampled = np.frombuffer(payload, np.int32, tokens), np.frombuffer(payload, np.float32, tokens, 4 * tokens)
    check_sampled(head.id, *sampled, vocab_size)
    if routing and head.experts != NONE:
        experts = block(payload, head.experts, positions, 8 * tokens)
        if problem := routing.problem(head.experts, experts):
            raise WireError(f"{name}: {problem}")


def _positions(head: PartialHead, calls: int) -> int:
    """Positions whose experts a head's payload has. Raises WireError."""
    if not is_shape(head.experts) or (head.experts == NONE) != (not head.positions):
        raise WireError(f"partial group {head.id}: experts of the shape {head.experts}")
    if head.experts == NONE:
        return 0
    counts = view(head.positions, f"partial group {head.id}: positions", np.dtype(np.int32))
    if len(counts) != calls or counts.min() < 0:
        raise WireError(f"partial group {head.id}: its positions are not those of its calls")
    return int(np.add.reduce(counts, dtype=np.int64))
