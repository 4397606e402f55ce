"""The wire: a message is decoded as it was sent, and any bytes that are no message are refused with a reason."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.wire import messages
from areal_like.wire.frames import SCHEMA, WireError, decode, schema_of
from areal_like.wire.messages import KINDS, MAX_TEXT, Message


def test_another_schema_is_refused_by_number() -> None:
    with pytest.raises(WireError, match=f"schema {SCHEMA + 1}.*{SCHEMA}"):
        decode([msgpack.packb([SCHEMA + 1, "status", {}])])


def test_a_schema_of_one_byte_is_refused_by_number_too() -> None:
    with pytest.raises(WireError, match=f"schema 13, this side {SCHEMA}"):
        decode([msgpack.packb([13, "status", {}])])


def test_any_change_of_a_message_is_another_schema() -> None:
    def schema(slots: object, **more: object) -> int:
        made = msgspec.defstruct("Hello", [("slots", slots), *more.items()], bases=(messages.Message,))
        return schema_of([made])

    small, large = (Annotated[int, msgspec.Meta(le=most)] for most in (8, 9))
    assert schema(small) == schema(small)
    assert len({schema(small), schema(large), schema(str), schema(small, name=str), schema(small, pid=str)}) == 5
    assert schema_of([messages.Hello]) != schema_of([messages.Hello, messages.Status]) != SCHEMA
    assert schema_of(messages.KINDS.values()) == SCHEMA


@pytest.mark.parametrize(
    "header",
    [b"", b"\xc1", msgpack.packb(1), msgpack.packb([SCHEMA, "status"]), msgpack.packb([SCHEMA, "nonsense", {}])],
)
def test_rubbish_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        decode([header])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"digest": ""}, "version"),
        ({"version": "1", "digest": ""}, "version"),
        ({"version": True, "digest": ""}, "version"),
        ({"version": -1, "digest": ""}, "version"),
        ({"version": 2**31, "digest": ""}, "version"),
        ({"version": 1, "digest": b""}, "digest"),
        ({"version": 1, "digest": "d" * (MAX_TEXT + 1)}, "digest"),
        ({"version": 1, "digest": "", "more": 1}, "more"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_by_the_name_of_its_field(body: dict, field: str) -> None:
    with pytest.raises(WireError, match=f"applied: .*{field}"):
        decode([msgpack.packb([SCHEMA, "applied", body])])


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.by])
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


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"digest": 1}, "digest"),
        ({"tensors": [["weight", "float32"]]}, "tensors"),
        ({"tensors": [["weight", "float32", [-1]]]}, "tensors"),
        ({"parts": ["ipc://0", 1]}, "parts"),
        ({"relays": [["tcp://host:1"]]}, "relays"),
    ],
)
def test_a_manifest_that_no_actor_could_use_is_refused(more: dict, field: str) -> None:
    manifest = {"version": 1, "digest": "d"} | more
    with pytest.raises(WireError, match=f"published: .*{field}"):
        decode([msgpack.packb([SCHEMA, "published", {"manifest": manifest}])])


@given(st.lists(st.binary(max_size=64), max_size=3))
def test_no_bytes_crash_the_decoder(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        decode(frames)
