"""A short run of the fuzzer, and proof that it would find what it looks for."""

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from areal_like.wire import frames as wire
from areal_like.wire import groups, messages
from areal_like.wire.frames import WireError, decode
from scripts.verify import fuzz

MOST_DEEP = 12
"""Types in types; each level of plain data is two."""


def test_a_few_thousand_inputs() -> None:
    result = fuzz.fuzz(4000, seed=1)
    assert result["accepted"] > 100 and result["refused"] > 1000
    for maker in fuzz.KINDS:
        assert result[f"made: {maker.__name__}"], "every kind of input is tried"


def test_a_few_thousand_deltas() -> None:
    result = fuzz.fuzz_deltas(3000, seed=1)
    assert result["accepted"] > 100 and result["refused"] > 500
    for kind in ("noise", "changed", "spliced", "planes"):
        assert result[f"made: {kind}"], "every kind of input is tried"


def test_a_delta_that_is_not_checked_is_found() -> None:
    """In its own process: an unchecked delta may end it."""
    code = (
        "from areal_like.weights import planes; planes._check_places = lambda rows, coded: None\n"
        "from scripts.verify import fuzz; fuzz.fuzz_deltas(3000)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200).returncode != 0


def test_an_input_is_known_by_its_number() -> None:
    assert [fuzz.make(3, number) for number in range(50)] == [fuzz.make(3, number) for number in range(50)]


@pytest.mark.parametrize(
    ("module", "name", "harmless"),
    [
        (fuzz, "check_partial", lambda head, payload: None),
        (groups, "_check_rows", lambda rows, runs: None),
        (groups, "_check_names", lambda names: None),
    ],
)
def test_a_check_that_is_left_out_is_found(
    module: object, name: str, harmless: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, harmless)
    with pytest.raises(fuzz.Finding):
        fuzz.fuzz(20_000, seed=1)


def test_lists_in_lists_that_claim_to_be_long_are_refused_before_memory_is_taken() -> None:
    start = wire.START + b"\xa9published" + b"\x81\xa8manifest\x81\xa1a"
    for bomb in (b"\xdd\x00\x00\xff\xff" * 1000 + b"\xc0" * 70_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(WireError):
            decode([start + bomb])


def unbounded(found: msgspec.inspect.Type, depth: int = 0) -> Iterator[msgspec.inspect.Type]:
    """The fields of a type whose length or depth the sender chooses without limit."""
    if isinstance(found, msgspec.inspect.AnyType) or depth > MOST_DEEP:
        yield found
    if isinstance(found, msgspec.inspect.CollectionType | msgspec.inspect.DictType) and found.max_length is None:
        yield found
    inner = [getattr(found, name, None) for name in ("item_type", "key_type", "value_type", "type")]
    inner += [*getattr(found, "types", ()), *getattr(found, "item_types", ())]
    inner += [field.type for field in getattr(found, "fields", ())]
    for each in inner:
        if isinstance(each, msgspec.inspect.Type):
            yield from unbounded(each, depth + 1)


def test_every_list_and_map_of_every_message_has_a_limit() -> None:
    for made in messages.KINDS.values():
        assert not [*unbounded(msgspec.inspect.type_info(made))], made


@pytest.mark.parametrize("kind", ["hello", "heartbeat", "credit"])
def test_small_messages_may_not_be_large(kind: str) -> None:
    name = bytes([0xA0 + len(kind)]) + kind.encode()
    with pytest.raises(WireError, match="larger than the limit"):
        decode([wire.START + name + b"\xc0" * wire.MAX_HEADER_BYTES])
