"""Valid messages of every kind, for tests of what reads them."""

import random
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect

from areal_like.types import Group, Sample
from areal_like.wire import messages
from areal_like.wire.groups import encode_group, pack_heads
from areal_like.wire.messages import Batch, Message, Push


def value_of(kind: inspect.Type, chance: random.Random) -> Any:
    """A small valid value of a message's field."""
    match kind:
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.IntType(ge=least, gt=below, le=most):
            low = least or (0 if below is None else below + 1)
            return chance.randint(low, low + 7 if most is None else min(low + 7, most))
        case inspect.FloatType():
            return chance.random()
        case inspect.StrType(pattern=pattern):
            return "ipc://a" if pattern else chance.choice(["a", "digest", "actor-0"])
        case inspect.BytesType():
            return chance.randbytes(8)
        case inspect.ListType(item_type=item, min_length=least):
            return [value_of(item, chance) for _ in range(max(least or 0, chance.randrange(3)))]
        case inspect.DictType(key_type=key, value_type=value):
            return {value_of(key, chance): value_of(value, chance) for _ in range(chance.randrange(3))}
        case inspect.TupleType(item_types=items):
            return [value_of(item, chance) for item in items]
        case inspect.NamedTupleType(fields=fields):
            return [value_of(field.type, chance) for field in fields]
        case inspect.UnionType(types=types):
            return value_of(chance.choice(types), chance)
        case inspect.StructType(fields=fields) | inspect.TypedDictType(fields=fields):
            present = [field for field in fields if field.required or chance.random() < 0.5]
            return {field.encode_name: value_of(field.type, chance) for field in present}
    assert isinstance(kind, inspect.NoneType | inspect.LiteralType), f"no value of {kind}"
    return kind.values[0] if isinstance(kind, inspect.LiteralType) else None


def group_of(chance: random.Random) -> Group:
    samples: list[Sample] = []
    digests: dict[int, str] = {}
    for _ in range(chance.randint(1, 4)):
        prompt, runs = chance.randint(1, 5), [(chance.randrange(4), chance.randint(1, 5)) for _ in range(3)]
        n = sum(count for _, count in runs)
        tokens, logprobs = np.arange(prompt + n, dtype=np.int32), np.zeros(n, np.float32)
        samples.append(Sample(tokens, prompt, logprobs, np.ones(n, bool), runs, chance.random(), "stop", []))
        digests |= {version: f"digest {version}" for version, _ in runs}
    return Group(chance.randrange(1 << 40), samples, digests, 1.0)


def with_groups(chance: random.Random) -> list[tuple[Message, list[bytes]]]:
    """A message of each kind that holds groups, with its payloads."""
    groups = [encode_group(group_of(chance)) for _ in range(chance.randint(1, 3))]
    table, payloads = pack_heads([head for head, _ in groups]), [bytes(payload) for _, payload in groups]
    return [
        (Push(table), payloads),
        (Batch(0, 0, 0, [], table, {"reward": 0.5}, 1, [0]), payloads),
    ]


def examples(chance: random.Random) -> list[tuple[Message, list[bytes]]]:
    """A message of each kind, with its payloads."""
    found = with_groups(chance)
    plain = sorted(messages.KINDS.keys() - {message.kind() for message, _ in found})
    types = {kind: inspect.type_info(messages.KINDS[kind]) for kind in plain}
    made = {kind: msgspec.convert(value_of(types[kind], chance), messages.KINDS[kind]) for kind in plain}
    return [*found, *((message, []) for message in made.values())]
