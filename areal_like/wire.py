"""What goes over the wire: `[msgpack header][payload]...`, never pickled, checked before it is used.

The header is `[SCHEMA, kind, body]`; `MESSAGES` names every kind and the type of each of its fields, and a message
that does not fit is refused with a `WireError` that says why. A payload is a frame of its own, so the buffer keeps and
forwards the frame as it came: it neither decodes nor copies payloads. How groups look is told in `areal_like.groups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from areal_like.nesting import check_nesting

SCHEMA = 7
MAX_FRAMES = 1 << 16
MAX_FRAME_BYTES = 256 << 20
MAX_HEADER_BYTES = 16 << 10
LARGE_HEADERS = {
    kind: 16 << 20
    for kind in (
        "push",
        "give_back",
        "published",
        "announce",
        "batch",
        "part",
        "lease",
        "pushed",
        "released",
        "cancel",
        "report",
        "failed",
    )
}
"""Kinds whose header may be longer than `MAX_HEADER_BYTES`, and how long, in bytes."""
MAX_LIST, MAX_MAP = 256, 1 << 12
"""Entries of any list, or map."""
MAX_LONG_LIST = 1 << 16
LONG_LISTS = LARGE_HEADERS.keys() - {"push", "failed"}
"""Kinds of which lists may have `MAX_LONG_LIST` entries; how they are nested is looked at before they are unpacked."""
SAY_HELLO = "say hello"
ONLY_THE_LEARNER = "only the learner may say this"
"""Part of a refusal's reason, if the sender can fix it by hello."""

_TABLE: dict[str, type | tuple[type, ...]] = {"groups": list, "rows": bytes, "runs": bytes, "digests": dict}
"""The numbers of several groups: see `areal_like.groups`."""

MESSAGES: dict[str, dict[str, type | tuple[type, ...]]] = {
    # everybody → buffer
    "hello": {"role": str, "name": str, "pid": int, "slots": int},
    "heartbeat": {"stats": dict, "progress": dict, "heldout": dict},
    # supervisor → buffer
    "status": {},
    "lost": {"name": str, "pid": int, "how": str, "for_good": bool},
    "stop": {"drain": bool},  # and buffer → learner
    # actor → buffer
    "push": _TABLE,
    "give_back": {"ids": list, "partials": list, "leaving": bool},
    "share": {"pid": int, "fd": int, "token": str},
    "relay": {"endpoint": str, "key": str},
    "credit": {"ended": int},
    "left_out": {"id": int, "cut": list, "redrawn": list},
    "failed": {"id": int, "reason": str, "detail": str},
    "evaluated": {"id": int, "reward": (int, float), "oldest": int, "newest": int, "length": int},
    "applied": {"version": int, "digest": str},
    # learner → buffer
    "model": {"vocab_size": int},
    "published": {"manifest": dict},
    "want": {"index": int, "version": int},
    "stream": {},
    "trained": {"index": int},
    "checkpointed": {"step": int},
    "untrainable": {"index": int, "reason": str},
    "finish": {"reason": str, "steps": int},
    # another rank of the learner → buffer
    "want_share": {"index": int, "rank": int},
    # buffer → actor
    "welcome": {},
    "lease": {"leases": list, "partials": list},
    "shared": {"readable": bool},
    "released": {"blocks": list},
    "pushed": {"ids": list},
    "announce": {"manifest": dict},
    "cancel": {"ids": list, "give_back": bool},
    "quit": {"reason": str},
    # buffer → learner (and its ranks), supervisor
    "batch": {"index": int, "version": int, "oldest_allowed": int, "info": dict, "actors": list, **_TABLE},
    "set_aside": {"index": int, "redo": int},
    "report": {"report": dict},
    "part": {"index": int, "version": int, "oldest_allowed": int, "begin": int, "actors": list, **_TABLE},
    # buffer → anybody
    "refused": {"reason": str},
    # subscriber → publisher or relay, and back
    "sync": {"part": int, "version": int, "held": int, "digest": str},
    "plan": {"part": int, "version": int, "legs": list},
    "fetch": {"part": int, "base": int, "version": int, "offset": int, "size": int},
    "later": {"part": int, "version": int, "progress": int},
    "chunk": {"part": int, "base": int, "version": int, "offset": int},
    "gone": {"part": int, "version": int},
}


MAY_SAY: dict[str, frozenset[str]] = {
    "learner": frozenset(
        {"hello", "model", "published", "want", "want_share", "stream", "trained", "untrainable", "checkpointed"}
        | {"finish"},
    ),
    "actor": frozenset(
        {"hello", "heartbeat", "push", "give_back", "share", "relay", "credit", "left_out", "failed", "evaluated"}
        | {"applied", "sync", "fetch", "status", "lost"},
    ),
    "operator": frozenset({"status", "stop", "lost"}),
    "observer": frozenset({"status"}),
}
"""What the holder of a key may say, by the key's role (`areal_like.keys`). A host of actors looks in and tells of their
deaths with its key, too."""
NOT_WITH_THIS_KEY = "a key of role"
"""Part of a refusal's reason, if the sender cannot fix it."""


class WireError(ValueError):
    """A message that was refused; the text says why."""


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
    """Frames (bytes, or what has their length and buffer protocol) → a checked message. Raises WireError.

    What this takes in memory is bounded by a few MB and a multiple of the header's length, whatever the bytes are.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"a message has 1 to {MAX_FRAMES} frames")
    header, *payloads = frames
    announced = _kind_of(header)
    if len(header) > LARGE_HEADERS.get(announced, MAX_HEADER_BYTES):
        raise WireError(f"a header of {len(header)} bytes is larger than the limit")
    if payloads and max(map(len, payloads)) > MAX_FRAME_BYTES:
        raise WireError(f"a payload is larger than {MAX_FRAME_BYTES} bytes")
    parts = _unpack(header, announced in LONG_LISTS)
    if not isinstance(parts, list) or len(parts) != 3 or not isinstance(parts[1], str):
        raise WireError("the header is not [schema, kind, body]")
    _, kind, body = parts
    check_body(kind, body)
    return Message(kind, body, payloads)


def _kind_of(header: Any) -> str:
    """The kind of message, read from the header's first bytes before anything is unpacked. Raises WireError."""
    start = bytes(memoryview(header)[:35])
    if len(start) < 3 or start[0] != 0x93 or start[1] > 0x7F:  # an array of 3 that begins with a small number
        raise WireError("the header is not [schema, kind, body]")
    if start[1] != SCHEMA:
        raise WireError(f"the peer speaks wire schema {start[1]}, this side {SCHEMA}: run the same version on both")
    return start[3 : 3 + (start[2] & 0x1F)].decode("ascii", "replace") if start[2] & 0xE0 == 0xA0 else ""


def _unpack(header: Any, long_lists: bool) -> Any:
    most = MAX_LONG_LIST if long_lists else MAX_LIST
    try:
        if long_lists:
            check_nesting(bytes(header))
        return msgpack.unpackb(header, strict_map_key=False, max_array_len=most, max_map_len=MAX_MAP, max_ext_len=0)
    except Exception as error:  # msgpack raises a dozen types, ValueError to RecursionError, on hostile bytes
        raise WireError(f"the header is no msgpack that is accepted here: {type(error).__name__}") from None


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


def check_role(role: str, message: Message) -> None:
    """Raises WireError unless the holder of a key of `role` may say this."""
    if message.kind not in MAY_SAY[role]:
        raise WireError(f"{NOT_WITH_THIS_KEY} {role} may not say {message.kind!r}")
    if message.kind == "hello" and message.body["role"] != role:
        raise WireError(f"{NOT_WITH_THIS_KEY} {role} can't say hello as {message.body['role'][:40]!r}")
