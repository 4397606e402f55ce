"""What goes over the wire: `[msgpack header][payload]...`, never pickled, checked before it is used.

The header is `[SCHEMA, kind, body]`; `MESSAGES` names every kind and the type of each of its fields, and a message
that does not fit is refused with a `WireError` that says why. Groups travel as a table of numbers in the header
(`meta`: all that the buffer has to know) and one columnar payload each (all tokens | all logprobs | all loss masks),
a frame of its own, so the buffer keeps and forwards the frame as it came: it neither decodes nor copies payloads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from areal_like.types import Group, Sample

SCHEMA = 2
MAX_HEADER_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 1 << 30
MAX_FRAMES = 1 << 16
FINISHES = ("stop", "length", "abort")

MESSAGES: dict[str, dict[str, type | tuple[type, ...]]] = {
    # everybody → buffer
    "hello": {"role": str, "name": str, "pid": int, "slots": int},
    "heartbeat": {"stats": dict},
    # supervisor → buffer
    "status": {},
    "lost": {"name": str, "pid": int, "how": str},
    # actor → buffer
    "push": {"groups": list},
    "credit": {"ended": int},
    "failed": {"id": int, "reason": str, "detail": str},
    "evaluated": {"id": int, "reward": (int, float), "oldest": int, "newest": int, "length": int},
    "applied": {"version": int, "digest": str},
    # learner → buffer
    "published": {"manifest": dict},
    "want": {"index": int, "version": int},
    "trained": {"index": int},
    "checkpointed": {"step": int},
    "finish": {"reason": str},
    # buffer → actor
    "welcome": {},
    "lease": {"leases": list},
    "pushed": {"ids": list},
    "announce": {"manifest": dict},
    "cancel": {"ids": list},
    # buffer → learner, supervisor
    "batch": {"index": int, "version": int, "oldest_allowed": int, "groups": list, "info": dict},
    "report": {"report": dict},
    # buffer → anybody
    "refused": {"reason": str},
    # subscriber → publisher and back
    "fetch": {"version": int, "offset": int, "size": int},
    "chunk": {"version": int, "offset": int},
    "gone": {"version": int},
}


class WireError(ValueError):
    """A message that can't be accepted; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Message:
    """`payloads` have the buffer protocol and a length in bytes: bytes, or the socket's own frames."""

    kind: str
    body: dict[str, Any]
    payloads: Sequence[Any] = ()

    @property
    def payload(self) -> memoryview:
        """Of a message that has one, or none: an empty one."""
        return memoryview(self.payloads[0] if self.payloads else b"")


def encode(kind: str, body: dict[str, Any], payloads: Sequence[Any] = ()) -> list[Any]:
    """The frames of a message. Each payload is anything with the buffer protocol."""
    return [msgpack.packb([SCHEMA, kind, body]), *payloads]


def decode(frames: Sequence[Any]) -> Message:
    """Frames (bytes, or what has their length and buffer protocol) → a checked message. Raises WireError."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
    header, *payloads = frames
    if len(header) > MAX_HEADER_BYTES or sum(map(len, payloads)) > MAX_PAYLOAD_BYTES:
        raise WireError("the message is larger than the limit")
    try:
        parts = msgpack.unpackb(header, strict_map_key=False)
    except Exception as error:  # msgpack raises a dozen types, ValueError to RecursionError, on hostile bytes
        raise WireError(f"the header is no msgpack: {type(error).__name__}") from None
    if not isinstance(parts, list) or len(parts) != 3 or not isinstance(parts[1], str):
        raise WireError("the header is not [schema, kind, body]")
    schema, kind, body = parts
    if schema != SCHEMA:
        raise WireError(f"the peer speaks wire schema {schema!r}, this side {SCHEMA}: run the same version on both")
    check_body(kind, body)
    return Message(kind, body, payloads)


def check_body(kind: str, body: Any) -> None:
    """Raises WireError unless `body` has exactly the fields of `kind`, each of its type."""
    fields = MESSAGES.get(kind)
    if fields is None:
        raise WireError(f"unknown kind of message {kind[:40]!r}")
    if not isinstance(body, dict) or set(body) != set(fields):
        raise WireError(f"{kind}: expected the fields {sorted(fields)}")
    for name, types in fields.items():
        value = body[name]
        if not isinstance(value, types) or (isinstance(value, bool) and types is int):
            raise WireError(f"{kind}.{name}: {type(value).__name__} does not fit")


# ---- groups ---------------------------------------------------------------------------------------------------------


def encode_group(group: Group) -> tuple[dict[str, Any], bytearray]:
    """(meta, payload): the numbers for the header, and tokens int32 | logprobs float32 | loss masks uint8, flat."""
    samples = []
    for s in group.samples:
        runs = [number for run in s.runs for number in run]
        samples.append([s.prompt_length, s.response_length, float(s.reward), FINISHES.index(s.finish), runs])
    n_tokens = sum(len(s.tokens) for s in group.samples)
    n_responses = sum(s.response_length for s in group.samples)
    payload = bytearray(4 * n_tokens + 5 * n_responses)
    tokens, logprobs, masks = _columns(payload, n_tokens, n_responses)
    np.concatenate([s.tokens for s in group.samples], out=tokens)
    np.concatenate([s.logprobs for s in group.samples], out=logprobs)
    np.concatenate([s.loss_mask for s in group.samples], out=masks)
    meta = {
        "id": group.id,
        "oldest": group.oldest_version,
        "bytes": len(payload),
        "samples": samples,
        "digests": {str(version): digest for version, digest in group.digests.items()},
        "seconds": group.seconds,
    }
    return meta, payload


def _columns(payload: Any, n_tokens: int, n_responses: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A payload's tokens, logprobs and loss masks, as views."""
    return (
        np.frombuffer(payload, np.int32, n_tokens),
        np.frombuffer(payload, np.float32, n_responses, 4 * n_tokens),
        np.frombuffer(payload, np.bool_, n_responses, 4 * (n_tokens + n_responses)),
    )


def decode_group(meta: dict[str, Any], payload: Any) -> Group:
    """Inverse of `encode_group`. The arrays are read-only views into `payload`: nothing is copied."""
    responses = [row[1] for row in meta["samples"]]
    totals = [row[0] + row[1] for row in meta["samples"]]
    tokens, logprobs, masks = _columns(memoryview(payload).toreadonly(), sum(totals), sum(responses))
    samples, t, r = [], 0, 0
    for (prompt_length, response, reward, finish, runs), total in zip(meta["samples"], totals, strict=True):
        samples.append(
            Sample(
                tokens=tokens[t : t + total],
                prompt_length=prompt_length,
                logprobs=logprobs[r : r + response],
                loss_mask=masks[r : r + response],
                runs=list(zip(runs[::2], runs[1::2], strict=True)),
                reward=reward,
                finish=FINISHES[finish],  # type: ignore[arg-type]
            )
        )
        t, r = t + total, r + response
    digests = {int(version): digest for version, digest in meta["digests"].items()}
    return Group(meta["id"], samples, digests, meta["seconds"])


def _is_int(value: Any, low: int = 0) -> bool:
    return type(value) is int and value >= low


_NUMBERS, _INTEGERS = (int, float), {int}
_GROUP_FIELDS = {"id", "oldest", "bytes", "samples", "digests", "seconds"}


def check_group(meta: Any) -> None:
    """Raises WireError unless `meta` describes a group whose numbers agree with one another."""
    if not isinstance(meta, dict) or meta.keys() != _GROUP_FIELDS:
        raise WireError(f"group: expected the fields {sorted(_GROUP_FIELDS)}")
    if not (_is_int(meta["id"]) and _is_int(meta["oldest"]) and _is_int(meta["bytes"])):
        raise WireError("group: id, oldest and bytes must be integers >= 0")
    if not isinstance(meta["digests"], dict) or not isinstance(meta["seconds"], int | float):
        raise WireError("group: digests or seconds have the wrong type")
    if not all(isinstance(digest, str) for digest in meta["digests"].values()):
        raise WireError("group: a digest is not a text")
    if not isinstance(meta["samples"], list) or not meta["samples"]:
        raise WireError(f"group {meta['id']}: no samples")
    size, versions = 0, []
    for row in meta["samples"]:
        size += _check_sample(meta["id"], row)
        versions += row[4][::2]
    if size != meta["bytes"]:
        raise WireError(f"group {meta['id']}: {meta['bytes']} bytes announced, its samples need {size}")
    if meta["oldest"] != min(versions):
        raise WireError(f"group {meta['id']}: the oldest version is not that of its samples")
    if set(meta["digests"]) != {str(version) for version in set(versions)}:
        raise WireError(f"group {meta['id']}: needs the digest of each version that made it, and of no other")


def _check_sample(group: int, row: Any) -> int:
    """Bytes of a sample's payload."""
    if type(row) is not list or len(row) != 5:
        raise WireError(f"group {group}: a sample is [prompt, response, reward, finish, runs]")
    prompt, response, reward, finish, runs = row
    if not (type(prompt) is type(response) is type(finish) is int):
        raise WireError(f"group {group}: a sample's lengths or finish are no integers")
    if prompt < 1 or response < 1 or not 0 <= finish < len(FINISHES):
        raise WireError(f"group {group}: a sample's lengths or finish are out of range")
    if type(reward) not in _NUMBERS or not math.isfinite(reward):
        raise WireError(f"group {group}: a reward is not a finite number")
    if type(runs) is not list or len(runs) % 2 or set(map(type, runs)) != _INTEGERS or min(runs) < 0:
        raise WireError(f"group {group}: runs are not pairs of integers")
    if sum(runs[1::2]) != response:
        raise WireError(f"group {group}: runs do not cover the response")
    return 4 * (prompt + response) + 5 * response
