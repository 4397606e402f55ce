"""Fuzz the readers of messages and weight updates:
`python -m scripts.verify.fuzz [--inputs 1000000] [--seed 0] [--deltas]`.

With `--deltas` it fuzzes the reader of weight updates (`scripts.verify.fuzz_deltas`), else the reader of messages:

Each input is the frames of one message: random bytes, valid messages with bytes changed, or msgpack that is well-formed
but hostile (wrong types, huge numbers, lists that claim to be long, tables whose numbers disagree). It is processed
like any message: decoded, checked, groups unpacked and turned into arrays. Any error but `WireError` is a finding; so
are memory beyond `ALLOWED_BYTES` + `ALLOWED_FACTOR` × the input's size, and an input that takes `ALLOWED_SECONDS`. Seed
and number identify an input, so you can repeat a finding: `--seed S --first N --inputs 1`.
"""

from __future__ import annotations

import functools
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import msgspec
import numpy as np
from msgspec import inspect

from areal_like.types import CarriedSamples, Completion, Group, Lease, PartialSample, Sample
from areal_like.wire import messages
from areal_like.wire.frames import SCHEMA, START, WireError, decode, encode
from areal_like.wire.groups import decode_group, encode_group, pack_heads, unpack_heads
from areal_like.wire.messages import Batch, HandBack, Message, Part, PartialHead, Push, Table
from areal_like.wire.partials import check_partial, decode_partial, encode_partial, versions_of

from ..console import output
from ..console.arguments import command, new_file
from . import fuzz_deltas as deltas
from .fuzzing import Finding, Frames, run

# ---- the path of a message ------------------------------------------------------------------------------------------


def take(frames: Sequence[bytes]) -> str:
    """The outcome of a message: "refused", or its kind."""
    try:
        message, payloads = decode(frames)
        if isinstance(message, Push | Batch | Part):
            for head, payload in zip(unpack_heads(message.table), payloads, strict=False):
                if head.size == len(payload):  # `check_push` refuses the others
                    _touch(decode_group(head, payload))
        if isinstance(message, HandBack):
            for partial, payload in zip(message.partials, payloads, strict=False):
                check_partial(partial, payload)
                _touch_partial(decode_partial(partial, payload, versions_of(partial)))
    except WireError:
        return "refused"
    return message.kind()


def _touch_partial(carried: CarriedSamples) -> None:
    for sample in carried.samples.values():
        for call in sample.calls.values():
            if not sum(n for _, n in call.runs) == len(call.tokens) == len(call.logprobs):
                raise Finding("a partial sample whose runs do not cover it")


def _touch(group: Group) -> None:
    for sample in group.samples:
        if len(sample.tokens) != sample.prompt_length + len(sample.logprobs):
            raise Finding("a sample whose arrays have other lengths than its numbers say")
        if not sum(n for _, n in sample.runs) == len(sample.logprobs) == len(sample.loss_mask):
            raise Finding("a sample whose runs do not cover it")
        sample.tokens.sum(), sample.logprobs.sum(), sample.loss_mask.sum(), sample.oldest_version


# ---- inputs ---------------------------------------------------------------------------------------------------------


def a_value(chance: random.Random, depth: int = 3) -> Any:
    """Plain data of any type, often with extreme values."""
    kind = chance.randrange(11 if depth else 8)
    if kind < 3:
        return chance.choice([0, 1, -1, 2**31, 2**31 - 1, 2**32, 2**63, 2**64 - 1, -(2**63), chance.randrange(100)])
    if kind == 3:
        return chance.choice([0.0, -1.5, float("nan"), float("inf"), -float("inf"), 1e308])
    if kind == 4:
        return chance.choice([None, True, False])
    if kind == 5:
        return chance.choice(["", "a", "learner", "actor-0", "x" * 300, "\0\n\x1b", "ü🙂", "0", "id"])
    if kind in (6, 7):
        return chance.randbytes(chance.choice([0, 1, 8, 23, 24, 25, 48, 1000]))
    size = chance.choice([0, 1, 2, 3, 16])
    if kind == 8:
        return [a_value(chance, depth - 1) for _ in range(size)]
    if kind == 9:
        return {chance.choice(["id", "version", "digest", str(n)]): a_value(chance, depth - 1) for n in range(size)}
    return {chance.choice([n, -n, float(n), None, chr(n)]): a_value(chance, depth - 1) for n in range(size)}


def a_group(chance: random.Random) -> Group:
    samples: list[Sample] = []
    digests: dict[int, str] = {}
    for _ in range(chance.randint(1, 4)):
        prompt, runs = chance.randint(1, 5), [(chance.randrange(4), chance.randint(1, 5)) for _ in range(3)]
        n = sum(count for _, count in runs)
        tokens, logprobs = np.arange(prompt + n, dtype=np.int32), np.zeros(n, np.float32)
        experts = chance.choice([None, np.ones((prompt + n - 1, 2, 2), np.uint8)])
        samples.append(Sample(tokens, prompt, logprobs, np.ones(n, bool), runs, chance.random(), "stop", [], experts))
        digests |= {version: f"digest {version}" for version, _ in runs}
    return Group(chance.randrange(1 << 40), samples, digests, 1.0)


@functools.cache
def _pool() -> list[tuple[Table, list[bytes]]]:
    """Tables of one to three groups, with their payloads: made once, as they are expensive."""
    chance = random.Random(0)
    made = []
    for _ in range(200):
        groups = [encode_group(a_group(chance)) for _ in range(chance.randint(1, 3))]
        made.append((pack_heads([head for head, _ in groups]), [bytes(payload) for _, payload in groups]))
    return made


@functools.cache
def _partials() -> list[tuple[PartialHead, bytes]]:
    """Partial groups of one to three samples."""
    chance = random.Random(1)
    made: list[tuple[PartialHead, bytes]] = []
    for _ in range(100):
        samples = {}
        for index in range(chance.randint(1, 3)):
            runs = [(chance.randrange(4), chance.randint(1, 5)) for _ in range(2)]
            n = sum(count for _, count in runs)
            experts = np.ones((n + 2, 2, 2), np.uint8) if len(made) % 2 else None
            call = Completion(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), runs, "abort", experts)
            samples[index] = PartialSample({(chance.randrange(1 << 60), 0): call}, {chance.randrange(1 << 60): 0.5})
        found = encode_partial(chance.randrange(1 << 40), samples, {version: "digest" for version in range(4)})
        made += [(found[0], bytes(found[1]))] if found else []
    return made


def of_type(kind: inspect.Type, chance: random.Random) -> Any:
    """A small valid value of a message's field."""
    match kind:
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.IntType(ge=least, gt=below, le=most):
            low = least or (0 if below is None else below + 1)
            return chance.randint(low, low + 7 if most is None else min(low + 7, most))
        case inspect.FloatType():
            return chance.random()
        case inspect.StrType():
            return chance.choice(["a", "digest", "actor-0"])
        case inspect.BytesType():
            return chance.randbytes(8)
        case inspect.ListType(item_type=item, min_length=least):
            return [of_type(item, chance) for _ in range(max(least or 0, chance.randrange(3)))]
        case inspect.DictType(key_type=key, value_type=value):
            return {of_type(key, chance): of_type(value, chance) for _ in range(chance.randrange(3))}
        case inspect.TupleType(item_types=items):
            return [of_type(item, chance) for item in items]
        case inspect.NamedTupleType(fields=fields):
            return [of_type(field.type, chance) for field in fields]
        case inspect.UnionType(types=types):
            return of_type(chance.choice(types), chance)
        case inspect.StructType(fields=fields) | inspect.TypedDictType(fields=fields):
            present = [field for field in fields if field.required or chance.random() < 0.5]
            return {field.encode_name: of_type(field.type, chance) for field in present}
    assert isinstance(kind, inspect.NoneType), f"messages have no values of {kind} so far: say here how to make one"
    return None


@functools.cache
def _type_of(kind: str) -> inspect.Type:
    return inspect.type_info(messages.KINDS[kind])


def a_message(kind: str, chance: random.Random) -> Message:
    """One of this kind without groups."""
    return msgspec.convert(of_type(_type_of(kind), chance), messages.KINDS[kind])


def with_groups(chance: random.Random) -> list[tuple[Message, list[bytes]]]:
    """One of each kind that holds groups, with its payloads."""
    table, payloads = chance.choice(_pool())
    partial, left = chance.choice(_partials())
    lease = Lease(partial.id, 0, "train", 8, 8)
    return [
        (Push(table), payloads),
        (Batch(0, 0, 0, [], table, {"reward": 0.5}, 1, [0]), payloads),
        (Part(0, 0, 0, [], table, 0), payloads),
        (HandBack([partial.id], [partial], False), [left]),
        (messages.Lease([lease], [(partial, [0])]), [left]),
    ]


PLAIN = sorted(messages.KINDS.keys() - {message.kind() for message, _ in with_groups(random.Random(0))})
"""The kinds whose messages need no groups."""


def examples(chance: random.Random) -> list[Message]:
    """One message of each kind."""
    return [a_message(kind, chance) for kind in PLAIN] + [message for message, _ in with_groups(chance)]


def valid(chance: random.Random) -> Frames:
    if chance.random() < 0.5:
        return encode(*chance.choice(with_groups(chance)))
    return encode(a_message(chance.choice(PLAIN), chance))


def noise(chance: random.Random) -> Frames:
    return [chance.randbytes(chance.choice([0, 1, 3, 40, 300])) for _ in range(chance.randint(0, 3))]


def changed(chance: random.Random) -> Frames:
    """A valid message with a few bytes changed, mostly in its header."""
    frames = valid(chance)
    for _ in range(chance.choice([1, 1, 2, 3, 8])):
        place = 0 if chance.random() < 0.8 else chance.randrange(len(frames))
        frames[place] = _change(bytearray(frames[place]), chance)
    return frames


SPECIAL = (0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xCB, 0xCF, 0xD3, 0xD8, 0xDB, 0xDD, 0xDF)
"""First bytes of msgpack's types."""


def _change(data: bytearray, chance: random.Random) -> bytes:
    at, change = chance.randrange(len(data) + 1), chance.randrange(6)
    special = chance.choice(SPECIAL).to_bytes()
    if change == 0 and at < len(data):
        data[at] ^= 1 << chance.randrange(8)
    elif change == 1:
        data[at : at + 1] = special
    elif change == 2:
        data[at:at] = special + b"\xff" * chance.randrange(5)
    elif change == 3:
        del data[at : at + chance.choice([1, 1, 4, len(data)])]
    elif change == 4:
        start = chance.randrange(len(data) + 1)
        data[at:at] = data[start : start + chance.choice([1, 8, 100])] * chance.choice([1, 2, 50])
    else:
        data[at : at + 4] = struct.pack(chance.choice(["<i", ">i"]), chance.choice([0, -1, 1, 1 << 20, (1 << 31) - 1]))
    return bytes(data)


def hostile(chance: random.Random) -> Frames:
    """A message of the right form with wrong values."""
    kind = chance.choice([*messages.KINDS, "push", "batch"])
    body: Any = {name: a_value(chance) for name in messages.KINDS[kind].__struct_fields__}
    if chance.random() < 0.2:
        body[a_value(chance, 0) or "more"] = a_value(chance)
    header = [chance.choice([SCHEMA, SCHEMA, SCHEMA, SCHEMA - 1, a_value(chance)]), kind, body]
    try:
        return [msgpack.packb(header), *noise(chance)]
    except (ValueError, OverflowError):  # what msgpack itself can't say
        return noise(chance)


def tables(chance: random.Random) -> Frames:
    """A push or batch whose table of groups has numbers that do not agree, or such a partial group."""
    if chance.random() < 0.2:
        return _wrong_partial(chance)
    pooled = chance.choice(_pool())
    table, payloads = msgspec.structs.asdict(pooled[0]), pooled[1].copy()
    for _ in range(chance.randint(1, 2)):
        name = chance.choice(["rows", "runs", "groups", "digests"])
        if name in ("rows", "runs") and isinstance(table[name], bytes):
            table[name] = _change(bytearray(table[name]), chance)
        elif name == "groups" and isinstance(table[name], list):
            rows = [list(row) for row in table[name]]
            rows[chance.randrange(len(rows))][chance.randrange(3)] = a_value(chance)
            table[name] = rows
        else:
            table[name] = a_value(chance, 2)
    if chance.random() < 0.3:
        payloads[0] = _change(bytearray(payloads[0]), chance)
    extra = {"index": 0, "version": 0, "oldest_allowed": 0, "info": {}, "actors": []}
    kind = chance.choice(["push", "push", "batch"])
    try:
        return _framed(kind, {"table": table} | (extra if kind == "batch" else {}), payloads)
    except (ValueError, OverflowError):
        return noise(chance)


def _wrong_partial(chance: random.Random) -> Frames:
    partial, payload = chance.choice(_partials())
    head = msgspec.structs.asdict(partial)
    for _ in range(chance.randint(1, 2)):
        name = chance.choice(list(head))
        known = isinstance(head[name], bytes) and chance.random() < 0.9
        head[name] = _change(bytearray(head[name]), chance) if known else a_value(chance, 2)
    try:
        return _framed("hand_back", {"ids": [partial.id], "partials": [head], "leaving": False}, [payload])
    except (ValueError, OverflowError, TypeError):
        return noise(chance)


def _framed(kind: str, body: dict[str, Any], payloads: list[bytes]) -> Frames:
    """Frames of a possibly invalid message."""
    return [msgpack.packb([SCHEMA, kind, body]), *payloads]


UNITS = [
    *(b"\xdd\x00\x00\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdc\x01\x00", b"\xdc\x00\xff", b"\xde\x10\x00"),
    *(b"\x91", b"\x81\xa1a", b"\xdf\x00\x00\x0f\xff", b"\xdb\x7f\xff\xff\xff", b"\xc6\x00\xff\xff\xff"),
    *(b"\x90", b"\x80", b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff" + b"\x80" * 100),
]
"""For bombs: headers of missing lists, maps, texts and binary data."""


def bombs(chance: random.Random) -> Frames:
    """Lists and maps that claim to be long, or are many in few bytes."""
    kind = chance.choice(["push", "published", "hello", "batch", "report", "lease", "failed"])
    start = START + msgpack.packb(kind)
    unit = chance.choice(UNITS)
    return [start + unit * chance.choice([1, 10, 600, 1500]) + b"\xc0" * chance.choice([0, 10, 5000])]


KINDS: dict[Callable[[random.Random], Frames], int] = {
    noise: 10,
    valid: 5,
    changed: 45,
    hostile: 20,
    tables: 19,
    bombs: 1,
}
"""Makers of inputs, and how many in a hundred."""
MAKERS, SHARES = list(KINDS), list(KINDS.values())


def make(seed: int, number: int) -> tuple[str, Frames]:
    """Input `number`, and the name of its maker."""
    chance = random.Random(seed << 40 | number)
    maker = chance.choices(MAKERS, SHARES)[0]
    return maker.__name__, maker(chance)


# ---- the run --------------------------------------------------------------------------------------------------------


def fuzz(inputs: int, seed: int = 0, first: int = 0, tell: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Process `inputs` messages; returns outcomes and the largest costs. Raises Finding with the input's number."""
    return run(inputs, seed, first, tell, make, take)


def fuzz_deltas(
    inputs: int, seed: int = 0, first: int = 0, tell: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """The same for weight updates."""
    deltas.compile_all()
    return run(inputs, seed, first, tell, deltas.make, deltas.take)


def main() -> int:
    parser = command("verify.fuzz", "Fuzz what reads from the wire.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--json", type=new_file, help="write the result here")
    parser.add_argument("--deltas", action="store_true", help="fuzz the reader of weight updates instead of messages")
    args = parser.parse_args()
    fuzz_these = fuzz_deltas if args.deltas else fuzz
    begin = time.monotonic()
    try:
        result = fuzz_these(args.inputs, args.seed, args.first, lambda done: print(f"\r{done:,}", end="", flush=True))
    except Finding as finding:
        print(f"\nfinding: {finding}", file=sys.stderr)
        return 1
    result["seconds"] = time.monotonic() - begin
    print()
    for name, value in sorted(result.items()):
        print(f"{name:20} {value:>12,.3f}" if isinstance(value, float) else f"{name:20} {value:>12,}")
    output.write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
