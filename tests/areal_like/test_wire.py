"""The wire: a message is decoded as it was sent, and any bytes that are no message are refused with a reason."""

from collections.abc import Iterator
from typing import Annotated

import msgpack
import msgspec
import pytest

from areal_like.wire import messages
from areal_like.wire.frames import SCHEMA, WireError, decode, schema_of
from areal_like.wire.messages import MAX_TEXT, SENDS, Message

APPLIED = {"version": 1, "digest": ""}
MANIFEST = {"version": 1, "digest": "d"}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "the header"),
        (b"\xc1", "the header"),
        (msgpack.packb(1), "the header"),
        (msgpack.packb([SCHEMA, "status"]), "the header"),
        (msgpack.packb([13, "status", {}]), "the header"),
        (msgpack.packb([SCHEMA + 1, "status", {}]), f"schema: got {SCHEMA + 1}, expected {SCHEMA}"),
        (msgpack.packb([SCHEMA, "nonsense", {}]), "unknown kind"),
        *(
            (msgpack.packb([SCHEMA, "applied", body]), f"applied: .*{field}")
            for body, field in [
                ({"digest": ""}, "version"),
                (APPLIED | {"version": "1"}, "version"),
                (APPLIED | {"version": True}, "version"),
                (APPLIED | {"version": -1}, "version"),
                (APPLIED | {"version": 2**31}, "version"),
                (APPLIED | {"digest": b""}, "digest"),
                (APPLIED | {"digest": "d" * (MAX_TEXT + 1)}, "digest"),
                (APPLIED | {"more": 1}, "more"),
            ]
        ),
        *(
            (msgpack.packb([SCHEMA, "published", {"manifest": MANIFEST | more}]), f"published: .*{field}")
            for more, field in [
                ({"tensors": [["weight", "float32"]]}, "tensors"),
                ({"tensors": [["weight", "float32", [-1]]]}, "tensors"),
                ({"relays": [["tcp://host:1"]]}, "relays"),
            ]
        ),
    ],
)
def test_what_is_no_message_is_refused_by_the_name_of_its_field(header: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode([header])


def test_any_change_of_a_message_is_another_schema() -> None:
    def schema(slots: object, **more: object) -> int:
        made = msgspec.defstruct("Hello", [("slots", slots), *more.items()], bases=(messages.Message,))
        return schema_of([made])

    small, large = (Annotated[int, msgspec.Meta(le=most)] for most in (8, 9))
    assert schema(small) == schema(small)
    assert len({schema(small), schema(large), schema(str), schema(small, name=str), schema(small, pid=str)}) == 5
    assert schema_of([messages.Hello]) != schema_of([messages.Hello, messages.Status]) != SCHEMA
    assert schema_of(messages.KINDS.values()) == SCHEMA


@pytest.mark.parametrize("kind", sorted(frozenset().union(*SENDS.values()), key=lambda kind: kind.__name__))
def test_types_limit_the_size_of_whatever_others_send_to_the_buffer(kind: type[Message]) -> None:
    assert not list(unlimited(msgspec.inspect.type_info(kind), kind.kind()))


def unlimited(info: msgspec.inspect.Type, at: str) -> Iterator[str]:
    """Places of a type where a text, a list or a map may have any size. (Bytes have the limit of a header.)"""
    sized = isinstance(info, msgspec.inspect.StrType | msgspec.inspect.ListType | msgspec.inspect.DictType)
    if (sized and info.max_length is None) or isinstance(info, msgspec.inspect.AnyType):
        yield at
    for name in ("item_type", "key_type", "value_type"):
        if hasattr(info, name):
            yield from unlimited(getattr(info, name), f"{at}.{name}")
    for each in (*getattr(info, "item_types", ()), *getattr(info, "types", ())):
        yield from unlimited(each, at)
    for field in getattr(info, "fields", ()):
        yield from unlimited(field.type, f"{at}.{field.name}")
