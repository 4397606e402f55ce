"""A short run of the fuzzer, and proof that it would see what it looks for."""

import subprocess
import sys

import pytest

from areal_like import groups, wire
from areal_like.nesting import MAX_DEPTH, check_nesting
from areal_like.wire import WireError, decode
from scripts.verify import fuzz


def test_a_few_thousand_inputs() -> None:
    result = fuzz.fuzz(4000, seed=1)
    assert result["accepted"] > 100 and result["refused"] > 1000
    for way in fuzz.KINDS:
        assert result[f"made: {way.__name__}"], "every way of making inputs is tried"


def test_a_few_thousand_deltas() -> None:
    result = fuzz.fuzz_deltas(3000, seed=1)
    assert result["accepted"] > 100 and result["refused"] > 500
    for way in ("noise", "changed", "spliced", "planes"):
        assert result[f"made: {way}"], "every way of making inputs is tried"


def test_a_delta_that_is_not_checked_is_found() -> None:
    """In a process of its own: what is not checked may end it."""
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
        (wire, "check_nesting", lambda packed: None),
        (wire, "check_body", lambda kind, body: None),
        (groups, "_check_rows", lambda rows, runs: None),
    ],
)
def test_a_check_that_is_left_out_is_found(
    module: object, name: str, harmless: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, harmless)
    with pytest.raises(fuzz.Finding):
        fuzz.fuzz(20_000, seed=1)


def test_lists_in_lists_that_claim_to_be_long_are_refused_before_memory_is_taken() -> None:
    start = b"\x93" + bytes([wire.SCHEMA]) + b"\xa9published"
    with pytest.raises(WireError):
        decode([start + b"\xdd\x00\x00\xff\xff" * 1000 + b"\xc0" * 70_000])
    check_nesting(b"\x91" * MAX_DEPTH + b"\xc0")
    for bad in (b"\x91" * (MAX_DEPTH + 2) + b"\xc0", b"\xdc\x00\x05\xc0", b"\x92\xc0", b"", b"\xc1", b"\xd4\x00\x00"):
        with pytest.raises(ValueError, match=r"nested|ends|not accepted"):
            check_nesting(bad)


@pytest.mark.parametrize("kind", ["hello", "heartbeat", "credit"])
def test_small_messages_may_not_be_large(kind: str) -> None:
    name = bytes([0xA0 + len(kind)]) + kind.encode()
    with pytest.raises(WireError, match="larger than the limit"):
        decode([b"\x93" + bytes([wire.SCHEMA]) + name + b"\xc0" * wire.MAX_HEADER_BYTES])
