"""Frames with anything wrong in them are read as a message whose numbers agree, or refused with a `WireError`; reading
takes memory in proportion to the received bytes."""

import random
import tracemalloc
from collections.abc import Sequence

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.wire import frames as wire
from areal_like.wire.frames import WireError, decode, encode
from areal_like.wire.groups import check_partial, decode_group, decode_partial, unpack_heads, versions_of
from areal_like.wire.messages import KINDS, Batch, HandBack, Push
from tests.messages import examples

EXAMPLES = [encode(*each) for seed in range(4) for each in examples(random.Random(seed))]
FEW = settings(max_examples=300, deadline=None)


def take(frames: Sequence[bytes]) -> str:
    """ "refused", or the kind of the message."""
    try:
        message, payloads, _ = decode(frames)
        if isinstance(message, Push | Batch):
            for head, payload in zip(unpack_heads(message.table), payloads, strict=False):
                if head.size == len(payload):  # the buffer refuses the others
                    for sample in decode_group(head, payload).samples:
                        assert len(sample.tokens) == sample.prompt_length + len(sample.logprobs)
                        assert sum(n for _, n in sample.runs) == len(sample.logprobs) == len(sample.loss_mask)
        if isinstance(message, HandBack):
            for partial, payload in zip(message.partials, payloads, strict=False):
                check_partial(partial, payload)
                for left in decode_partial(partial, payload, versions_of(partial)).samples.values():
                    for call in left.calls.values():
                        assert sum(n for _, n in call.runs) == len(call.tokens) == len(call.logprobs)
    except WireError:
        return "refused"
    return message.kind()


def test_every_example_is_read() -> None:
    assert {take(frames) for frames in EXAMPLES} == set(KINDS)


@FEW
@given(st.sampled_from(EXAMPLES), st.data())
def test_changed_bytes(valid: list[bytes], data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in valid]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        at, count = data.draw(st.integers(0, len(frame))), data.draw(st.integers(0, 4))
        frame[at : at + count] = data.draw(st.binary(max_size=4) | st.just(bytes(frame[:100]) * 20))
    take([bytes(frame) for frame in frames])


@pytest.mark.parametrize("unit", [b"\xdd\x00\x00\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdc\x01\x00", b"\x81\xa1a"])
@pytest.mark.parametrize("kind", ["push", "published", "hello", "batch", "report"])
def test_lists_in_lists_that_claim_to_be_long_take_little_memory(kind: str, unit: bytes) -> None:
    for times in (1, 10, 600, 1500):
        bomb = wire.START + msgpack.packb(kind) + unit * times + b"\xc0" * 5000
        tracemalloc.start()
        assert take([bomb]) == "refused"
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert used < (4 << 20) + 100 * len(bomb)
