"""Partial groups: the unfinished part of a group that an actor hands back, and that the next lease of it carries.

A workflow depends only on the answers of the engine and the verifier, so only the answers are kept: each call's tokens,
behaviour logprobs and runs (`areal_like.types.PartialSample`). The next actor starts the workflow again: it answers
finished calls from the record, and continues the interrupted one at its next token, in the same stream of random
numbers. The workflow makes prompts, loss masks and filler again, so they are not sent.

As with groups, the buffer reads the numbers (`PartialHead`) and forwards the payload (`wire.groups`; its columns
are tokens, logprobs and, if the engine returns them, experts): `calls` has one `CALL` per call, those of a sample in
their order; `runs` those of all calls; `scores` one `SCORE` per response that was verified; `digests` are those of the
versions that made a token; `positions` int32 counts those of each call that have experts, of the shape `experts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import xxhash

from areal_like.models.experts import NONE, Routing, is_shape, shape_of
from areal_like.types import CarriedSamples, Completion, PartialSample
from areal_like.wire.frames import Frame, WireError
from areal_like.wire.groups import FINISHES, RUN, ColumnSizes, check_columns, columns, covered_by, fits_float32, table
from areal_like.wire.messages import PartialHead

CALL = np.dtype([("given", "<u8"), ("offset", "<i8"), ("sample", "<i4"), ("finish", "<i2"), ("runs", "<i4")])
"""One call: digest of the tokens given, its offset, index of the sample, index into FINISHES, number of runs."""
SCORE = np.dtype([("response", "<u8"), ("reward", "<f8"), ("sample", "<i4")])
"""One score: digest of the response, reward, index of the sample."""


def digest_of(tokens: np.ndarray) -> int:
    """A 64-bit hash of token ids, int [n]."""
    return xxhash.xxh3_64_intdigest(np.asarray(tokens, np.int32).tobytes())


def encode_partial(
    group_id: int, samples: Mapping[int, PartialSample], digests: Mapping[int, str]
) -> tuple[PartialHead, bytearray] | None:
    """A partial group's head and its payload, or None if no token was sampled. `digests` has at least the versions that
    made the tokens. A call whose tokens, logprobs and runs do not fit together (a faulty engine) is left out."""
    calls, scores, kept = [], [], []
    for index, sample in samples.items():
        begun = [(key, call) for key, call in sample.calls.items() if _is_whole(call)]
        calls += [(*key, index, FINISHES.index(call.finish), len(call.runs)) for key, call in begun]
        kept += [call for _, call in begun]
        scores += [(digest, score, index) for digest, score in sample.scores.items() if begun]
    if not kept:
        return None
    runs = [run for call in kept for run in call.runs]
    found = {version: digests[version] for version in sorted({version for version, _ in runs})}
    tables = np.array(calls, CALL).tobytes(), np.array(runs, RUN).tobytes(), np.array(scores, SCORE).tobytes()
    shape, positions = shape_of([call.experts for call in kept]), b""
    if shape != NONE:
        positions = np.array([len(call.experts) for call in kept if call.experts is not None], np.int32).tobytes()
    head = PartialHead(group_id, *tables, found, positions, shape)
    sizes = _sizes(head)
    payload = bytearray(sizes.bytes)
    tokens, logprobs, *_, experts = columns(payload, sizes)
    np.concatenate([np.ravel(call.tokens) for call in kept], out=tokens, casting="unsafe")
    np.concatenate([np.ravel(call.logprobs) for call in kept], out=logprobs, casting="unsafe")
    if shape != NONE:
        np.concatenate([call.experts for call in kept if call.experts is not None], out=experts)
    return head, payload


def _is_whole(call: Completion) -> bool:
    return 0 < np.size(call.tokens) == np.size(call.logprobs) == sum(n for _, n in call.runs)


def _sizes(head: PartialHead) -> ColumnSizes:
    tokens = int(np.add.reduce(np.frombuffer(head.runs, RUN)["n"], dtype=np.int64))
    positions = int(np.add.reduce(np.frombuffer(head.positions, np.int32), dtype=np.int64))
    return ColumnSizes(tokens, tokens, positions=positions, experts=head.experts)


def decode_partial(head: PartialHead, payload: Frame, usable: Collection[int]) -> CarriedSamples:
    """The samples of `usable`. The arrays are views into `payload`."""
    runs = np.frombuffer(head.runs, RUN).tolist()
    tokens, logprobs, *_, experts = columns(payload, _sizes(head))
    places = np.concatenate([[0], np.cumsum(np.frombuffer(head.positions, np.int32))]).tolist()
    found: dict[int, PartialSample] = {}
    start = run = 0
    for number, (given, offset, index, finish, n_runs) in enumerate(np.frombuffer(head.calls, CALL).tolist()):
        mine = runs[run : run + n_runs]
        end, run = start + sum(n for _, n in mine), run + n_runs
        chosen = None if head.experts == NONE else experts[places[number] : places[number + 1]]
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
    """Raises WireError unless the head's numbers agree with one another and with the payload, and its columns
    pass `check_columns`."""
    name = f"partial group {head.id}"
    calls, runs = table(head.calls, f"{name}: calls", CALL), table(head.runs, f"{name}: runs", RUN)
    scores = table(head.scores, f"{name}: scores", SCORE) if head.scores else np.empty(0, SCORE)
    if min(calls["sample"].min(), calls["offset"].min(), calls["finish"].min()) < 0 or calls["runs"].min() < 1:
        raise WireError(f"{name}: a call's sample, offset, finish or number of runs is out of range")
    if calls["finish"].max() >= len(FINISHES):
        raise WireError(f"{name}: a call's finish is out of range")
    covered_by(runs, calls["runs"], name)
    if not is_shape(head.experts) or (head.experts == NONE) != (not head.positions):
        raise WireError(f"{name}: experts of the shape {head.experts}")
    if head.experts != NONE:
        counts = table(head.positions, f"{name}: positions", np.dtype(np.int32))
        if len(counts) != len(calls) or counts.min() < 0:
            raise WireError(f"{name}: its positions are not those of its calls")
    if (sizes := _sizes(head)).bytes != len(payload):
        raise WireError(f"{name}: the payload's size is not that of its samples")
    if len(scores) and (not fits_float32(scores["reward"]) or not np.isin(scores["sample"], calls["sample"]).all()):
        raise WireError(f"{name}: a score is no float32 number, or of a sample that has not begun")
    if head.digests.keys() != set(runs["version"].tolist()):
        raise WireError(f"{name}: needs the digest of each version that made it, and of no other")
    check_columns(head.id, columns(payload, sizes), vocab_size, routing, head.experts)
