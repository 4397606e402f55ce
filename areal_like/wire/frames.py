"""Format of messages: `[msgpack header][payload]...`, never pickled, checked before it is used.

The header is `[SCHEMA, kind, message]`; a message that does not fit is refused with a `WireError` that names its field.
Two processes whose messages differ have different schemas. A payload is a frame of its own, which the buffer keeps and
forwards as it came (`areal_like.wire.groups`)."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from areal_like.wire.messages import KINDS, LARGE, SENDS, Hello, Lost, Message

MEANING = 1
"""Raise it when a message changes its meaning, not its fields: e.g. the columns of `areal_like.wire.groups`."""


def schema_of(kinds: Iterable[type[Message]]) -> int:
    """Another number of 4 bytes (the highest bit is set) for any other kind, field, type, limit or default."""
    types = repr((MEANING, msgspec.inspect.multi_type_info([*kinds])))
    return 1 << 31 | xxh3_64_intdigest(types.encode()) & (1 << 31) - 1


SCHEMA = schema_of(KINDS.values())
MAX_FRAMES = 1 << 16
MAX_FRAME_BYTES = 256 << 20
MAX_HEADER_BYTES, MAX_LARGE_HEADER_BYTES = 16 << 10, 16 << 20
"""The second of messages that are `LARGE`, from any client; a batch for a client may be larger."""
SAY_HELLO = "say hello"
ONLY_THE_LEARNER = "only the learner may say this"
"""Part of a refusal's reason, if the sender can fix it by hello."""
NOT_WITH_THIS_KEY = "a key of role"
"""Part of a refusal's reason, if the sender cannot fix it."""

Frame = Any
"""Objects with the buffer protocol and a length in bytes: bytes, or the socket's own frames."""
Payloads = Sequence[Frame]
START = b"\x93" + msgspec.msgpack.encode(SCHEMA)
"""Begins every header: a list of three, and its first entry."""
_LONGEST_START = len(START) + 1 + 31
_STARTS = {made: START + msgspec.msgpack.encode(kind) for kind, made in KINDS.items()}
_DECODERS = {kind.encode(): (made, msgspec.msgpack.Decoder(made)) for kind, made in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode


class WireError(ValueError):
    """A message was refused; the text has the reason."""


class Received(NamedTuple):
    """A message, checked, and its payloads. `owner`: the key of its sender where that is an actor's ("": no keys)."""

    message: Message
    payloads: Payloads = ()
    owner: str = ""

    @property
    def payload(self) -> memoryview:
        """The first payload, or an empty view if there is none."""
        return memoryview(self.payloads[0] if self.payloads else b"")


def encode(message: Message, payloads: Payloads = ()) -> list[Frame]:
    return [_STARTS[type(message)] + _encode(message), *payloads]


def decode(frames: Payloads, large: int = MAX_LARGE_HEADER_BYTES) -> Received:
    """Frames → a checked message; the header of a `LARGE` one has at most `large` bytes. Raises WireError. Memory is
    limited to a few MB and a multiple of the header's length, for any bytes: the length of a list is checked first, and
    types limit the depth of nesting."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"a message has 1 to {MAX_FRAMES} frames")
    header, *payloads = frames
    kind = _kind_of(header)
    if kind not in _DECODERS:
        raise WireError(f"unknown kind of message {kind.decode('ascii', 'replace')!r}")
    made, decoder = _DECODERS[kind]
    if len(header) > (large if made in LARGE else MAX_HEADER_BYTES):
        raise WireError(f"a header of {len(header)} bytes is larger than the limit")
    if payloads and max(map(len, payloads)) > MAX_FRAME_BYTES:
        raise WireError(f"a payload is larger than {MAX_FRAME_BYTES} bytes")
    try:
        return Received(decoder.decode(memoryview(header)[len(START) + 1 + len(kind) :]), payloads)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{made.kind()}: {str(error)[:500]}") from None


def _kind_of(header: Frame) -> bytes:
    """The kind of message, read from the header's first bytes before anything is unpacked. Raises WireError."""
    start = bytes(memoryview(header)[:_LONGEST_START])
    kind = start[len(START) :]
    if start[:2] != START[:2] or not kind or kind[0] & 0xE0 != 0xA0:
        raise WireError("the header is not [schema, kind, message]")
    if not start.startswith(START):
        theirs = int.from_bytes(start[2 : len(START)])
        raise WireError(f"wire schema: got {theirs}, expected {SCHEMA}; run the same version (and msgspec) on both")
    return kind[1 : 1 + (kind[0] & 0x1F)]


def check_role(role: str, message: Message) -> None:
    """Raises WireError unless the holder of a key of `role` may send this."""
    if type(message) not in SENDS[role]:
        raise WireError(f"{NOT_WITH_THIS_KEY} {role} may not say {message.kind()!r}")
    if isinstance(message, Lost) and message.for_good and role == "actor":
        raise WireError(f"{NOT_WITH_THIS_KEY} {role} may not leave an actor out for good")
    if isinstance(message, Hello) and message.role != role:
        raise WireError(f"{NOT_WITH_THIS_KEY} {role} can't say hello as {message.role!r}")
