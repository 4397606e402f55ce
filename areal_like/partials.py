"""Partial groups: what an actor hands back of a group that it will not finish, and the next lease of it carries.

A workflow depends only on the answers of the engine and the verifier, so the answers are all that is kept: each call's
tokens, behaviour logprobs and runs (`areal_like.types.SoFar`). The next actor starts the workflow again: it answers
finished calls from the record, and continues the interrupted one at its next token, in the same stream of random
numbers. Prompts, loss masks and filler follow from the workflow again, and need not travel.

As with groups, the buffer reads the table of numbers (`meta`) and forwards the payload (all tokens | all logprobs):

    meta = {id, bytes, samples: [[index, calls, scores]], digests: {version: digest of the weights}}
    call = [digest of the tokens given, offset, finish, runs flat]        score = [digest of the response, reward]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import xxhash

from areal_like.groups import FINISHES, LARGEST_REWARD, check_sampled
from areal_like.types import Carried, Completion, SoFar
from areal_like.wire import WireError

_FIELDS = {"id", "bytes", "samples", "digests"}
_BYTES_PER_TOKEN = 8


def digest_of(tokens: np.ndarray) -> int:
    """64 bits that stand for token ids, int [n]."""
    return xxhash.xxh3_64_intdigest(np.asarray(tokens, np.int32).tobytes())


def encode_partial(
    group_id: int, samples: Mapping[int, SoFar], digests: Mapping[int, str]
) -> tuple[dict[str, Any], bytes] | None:
    """(meta, payload), or None if no token was sampled. `digests` has at least the versions that made the tokens."""
    rows, kept = [], []
    for index, sample in samples.items():
        calls = [(key, call) for key, call in sample.calls.items() if len(call.tokens)]
        kept += [call for _, call in calls]
        table = [
            [*key, FINISHES.index(call.finish), [number for run in call.runs for number in run]] for key, call in calls
        ]
        if table:
            rows.append([index, table, [[digest, float(score)] for digest, score in sample.scores.items()]])
    if not rows:
        return None
    parts = [np.asarray(call.tokens, np.int32) for call in kept] + [np.asarray(c.logprobs, np.float32) for c in kept]
    payload = b"".join(part.tobytes() for part in parts)
    versions = {version for call in kept for version, _ in call.runs}
    found = {version: digests[version] for version in sorted(versions)}
    return {"id": group_id, "bytes": len(payload), "samples": rows, "digests": found}, payload


def decode_partial(meta: Mapping[str, Any], payload: Any, usable: Collection[int]) -> Carried:
    """The samples of `usable`. The arrays are views into `payload`."""
    total = meta["bytes"] // _BYTES_PER_TOKEN
    tokens, logprobs = np.frombuffer(payload, np.int32, total), np.frombuffer(payload, np.float32, total, 4 * total)
    samples, start = {}, 0
    for index, calls, scores in meta["samples"]:
        sample = SoFar(scores=dict(scores))
        for digest, offset, finish, flat in calls:
            end = start + sum(flat[1::2])
            runs = list(zip(flat[::2], flat[1::2], strict=True))
            sample.calls[digest, offset] = Completion(
                tokens[start:end],
                logprobs[start:end],
                runs,
                FINISHES[finish],  # type: ignore[arg-type]
            )
            start = end
        if index in usable:
            samples[index] = sample
    return Carried(samples, dict(meta["digests"]))


def versions_of(row: list[Any]) -> set[int]:
    """The versions that made a sample's tokens; `row` is one of `meta["samples"]`."""
    return {version for call in row[1] for version in call[3][::2]}


def check_partial(meta: Any, payload: Any, vocab_size: int | None = None) -> None:
    """Raises WireError unless `meta` describes a partial group whose numbers agree with one another and with the
    payload, and what was sampled is in order (`areal_like.groups.check_sampled`)."""
    if not isinstance(meta, dict) or meta.keys() != _FIELDS or not _is_count(meta["id"]):
        raise WireError(f"partial group: expected the fields {sorted(_FIELDS)}")
    rows, digests = meta["samples"], meta["digests"]
    if not isinstance(rows, list) or not rows or not isinstance(digests, dict):
        raise WireError(f"partial group {meta['id']}: samples or digests have the wrong type")
    tokens = sum(_check_sample(meta["id"], row) for row in rows)
    if not tokens * _BYTES_PER_TOKEN == meta["bytes"] == len(payload):
        raise WireError(f"partial group {meta['id']}: the payload's size is not that of its samples")
    if len({row[0] for row in rows}) != len(rows):
        raise WireError(f"partial group {meta['id']}: a sample comes twice")
    if not all(type(digest) is str for digest in digests.values()):
        raise WireError(f"partial group {meta['id']}: digests map versions to texts")
    if set(digests) != {version for row in rows for version in versions_of(row)}:
        raise WireError(f"partial group {meta['id']}: needs the digest of each version that made it, and of no other")
    sampled = np.frombuffer(payload, np.int32, tokens), np.frombuffer(payload, np.float32, tokens, 4 * tokens)
    check_sampled(meta["id"], *sampled, vocab_size)


def _check_sample(group: int, row: Any) -> int:
    """Tokens of a sample."""
    if type(row) is not list or len(row) != 3 or not _is_count(row[0]) or type(row[1]) is not list or not row[1]:
        raise WireError(f"partial group {group}: a sample is [index, calls, scores]")
    if type(row[2]) is not list or not all(map(_is_score, row[2])):
        raise WireError(f"partial group {group}: a score is [digest, float32 number]")
    return sum(_check_call(group, call) for call in row[1])


def _check_call(group: int, call: Any) -> int:
    """Tokens of a call."""
    if type(call) is not list or len(call) != 4 or not all(map(_is_count, call[:3])) or call[2] >= len(FINISHES):
        raise WireError(f"partial group {group}: a call is [digest, offset, finish, runs]")
    runs = call[3]
    if type(runs) is not list or not runs or len(runs) % 2 or not all(map(_is_count, runs)) or min(runs[1::2]) < 1:
        raise WireError(f"partial group {group}: runs are not pairs of integers")
    return sum(runs[1::2])


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_score(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) == 2
        and _is_count(value[0])
        and type(value[1]) in (int, float)
        and abs(value[1]) <= LARGEST_REWARD
    )
