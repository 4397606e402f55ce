"""The wire: what goes in comes out, and what does not fit is refused with a reason, whatever the bytes."""

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.types import Group, Sample
from areal_like.wire import SCHEMA, WireError, check_group, decode, decode_group, encode, encode_group


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    prompt = draw(st.integers(1, 5))
    runs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4))
    response = sum(n for _, n in runs)
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Sample(
        tokens=seed.integers(0, 2**31 - 1, prompt + response).astype(np.int32),
        prompt_length=prompt,
        logprobs=seed.normal(size=response).astype(np.float32),
        loss_mask=seed.random(response) < 0.5,
        runs=runs,
        reward=draw(st.floats(-10, 10)),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
    )


@given(st.lists(samples(), min_size=1, max_size=4), st.integers(0, 2**60))
def test_groups_survive_the_wire_bit_for_bit(members: list[Sample], group_id: int) -> None:
    digests = {version: f"digest {version}" for member in members for version, _ in member.runs}
    group = Group(group_id, members, digests, 1.5)
    meta, payload = encode_group(group)
    message = decode(encode("push", {"groups": [meta]}, [payload]))
    check_group(message.body["groups"][0])
    back = decode_group(message.body["groups"][0], message.payload)
    assert (back.id, back.digests, back.seconds) == (group_id, digests, 1.5)
    for before, after in zip(members, back.samples, strict=True):
        assert before.tokens.tobytes() == after.tokens.tobytes()
        assert before.logprobs.tobytes() == after.logprobs.tobytes()
        assert np.array_equal(before.loss_mask, after.loss_mask)
        assert (before.runs, before.reward, before.finish) == (after.runs, after.reward, after.finish)
        assert before.prompt_length == after.prompt_length


def _meta() -> dict:
    sample = Sample(np.zeros(5, np.int32), 2, np.zeros(3, np.float32), np.ones(3, bool), [(1, 2), (2, 1)], 0.5, "stop")
    return encode_group(Group(1, [sample], {1: "a", 2: "b"}))[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bytes": 3}, "its samples need"),
        ({"id": -1}, "integers"),
        ({"oldest": 2}, "oldest version"),
        ({"samples": []}, "no samples"),
        ({"samples": [[2, 3, float("nan"), 0, [1, 3]]]}, "finite"),
        ({"samples": [[2, 3, 0.5, 0, [1, 2]]]}, "cover"),
        ({"samples": [[2, 3, 0.5, 7, [1, 3]]]}, "finish"),
        ({"samples": [[True, 3, 0.5, 0, [1, 3]]]}, "lengths"),
        ({"samples": [[0, 3, 0.5, 0, [1, 2, 2, 1]]]}, "lengths"),
        ({"digests": []}, "digests"),
        ({"digests": {"1": "a"}}, "digest of each version"),
        ({"digests": {"1": "a", "two": "b"}}, "digest of each version"),
        ({"digests": {"1": "a", "2": 3}}, "not a text"),
    ],
)
def test_a_group_whose_numbers_disagree_is_refused(change: dict, reason: str) -> None:
    check_group(_meta())
    with pytest.raises(WireError, match=reason):
        check_group(_meta() | change)


def test_another_schema_is_refused_by_number() -> None:
    with pytest.raises(WireError, match=f"schema {SCHEMA + 1}.*{SCHEMA}"):
        decode([msgpack.packb([SCHEMA + 1, "status", {}])])


@pytest.mark.parametrize(
    "header",
    [b"", b"\xc1", msgpack.packb(1), msgpack.packb([SCHEMA, "status"]), msgpack.packb([SCHEMA, "nonsense", {}])],
)
def test_rubbish_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        decode([header])


@pytest.mark.parametrize("body", [{}, {"version": "1", "digest": ""}, {"version": True, "digest": ""}, {"version": 1}])
def test_fields_are_checked(body: dict) -> None:
    with pytest.raises(WireError):
        decode([msgpack.packb([SCHEMA, "applied", body])])


@given(st.lists(st.binary(max_size=64), max_size=3))
def test_no_bytes_crash_the_decoder(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        decode(frames)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    )
)
def test_no_value_crashes_the_group_check(value: object) -> None:
    for meta in (
        value,
        _meta() | {"samples": value},
        _meta() | {"samples": [value]},
        _meta() | {"samples": [[0, 1, 0.0, 0, value]]},
    ):
        with contextlib.suppress(WireError):
            check_group(meta)
