"""Groups and messages on the wire: they are decoded bit for bit; numbers that disagree, and frames with anything wrong
in them, are refused with a reason, in little memory."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.models.experts import NONE, Routing
from areal_like.types import Group, Sample
from areal_like.wire import frames as wire
from areal_like.wire import messages
from areal_like.wire.frames import SCHEMA, WireError, decode, encode, schema_of
from areal_like.wire.groups import (
    OR,
    ROW,
    RUN,
    Head,
    check_payload,
    decode_group,
    encode_group,
    pack_heads,
    unpack_heads,
)
from areal_like.wire.messages import KINDS, MAX_TEXT, SENDS, Batch, Message, Model, Push
from tests.messages import examples


@st.composite
def samples(draw: st.DrawFn, experts: bool = False) -> Sample:
    prompt = draw(st.integers(1, 5))
    runs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4))
    response = sum(n for _, n in runs)
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = seed.random(response) < 0.5
    forks = sorted(draw(st.sets(st.sampled_from(np.flatnonzero(~mask).tolist() or [None]), max_size=2)) - {None})
    return Sample(
        tokens=seed.integers(0, 2**31 - 1, prompt + response).astype(np.int32),
        prompt_length=prompt,
        logprobs=seed.normal(size=response).astype(np.float32),
        loss_mask=mask,
        runs=runs,
        reward=draw(st.floats(-10, 10)),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
        turn_rewards=draw(st.lists(st.tuples(st.integers(0, response - 1), st.floats(-1, 1)), max_size=3)),
        experts=seed.integers(0, 300, (prompt + response - 1, 3, 2)).astype(np.uint16) if experts else None,
        forks=forks,
        parts=draw(st.dictionaries(st.sampled_from(["format", "right.1"]), st.floats(-1, 1))),
    )


def group_of(group_id: int, members: list[Sample]) -> Group:
    digests = {version: f"digest {version}" for member in members for version, _ in member.runs}
    return Group(group_id, members, digests, 1.5, unscored=group_id % 2)


@st.composite
def members(draw: st.DrawFn, experts: bool) -> list[Sample]:
    """Some of them share the prompt of the sample before."""
    found = draw(st.lists(samples(experts), min_size=1, max_size=4))
    for before, sample in pairwise(found):
        if not experts and draw(st.booleans()):
            prompt, response = before.tokens[: before.prompt_length], sample.tokens[sample.prompt_length :]
            sample.tokens, sample.prompt_length = np.concatenate([prompt, response]), len(prompt)
    return found


@given(st.lists(members(False) | members(True), min_size=1, max_size=4), st.integers(0, 2**60))
@pytest.mark.slow
def test_groups_survive_the_wire_bit_for_bit(several: list[list[Sample]], first_id: int) -> None:
    groups = [group_of(group_id, members) for group_id, members in enumerate(several, first_id)]
    heads, payloads = zip(*map(encode_group, groups), strict=True)
    push, frames, _ = decode(encode(Push(pack_heads(heads)), payloads))
    assert isinstance(push, Push)
    arrived = unpack_heads(push.table)
    assert arrived == list(heads)
    for group, head, payload in zip(groups, arrived, frames, strict=True):
        back = decode_group(head, payload)
        assert (back.id, back.digests, back.seconds) == (group.id, group.digests, 1.5)
        assert (head.oldest, head.newest) == (min(group.digests), max(group.digests))
        assert head.rewards == [member.reward for member in group.samples]
        assert head.lengths == [member.response_length for member in group.samples]
        assert head.tokens == sum(head.lengths)
        for before, after in zip(group.samples, back.samples, strict=True):
            assert before.tokens.tobytes() == after.tokens.tobytes()
            assert before.logprobs.tobytes() == after.logprobs.tobytes()
            assert np.array_equal(before.loss_mask, after.loss_mask)
            assert (before.runs, before.reward, before.finish) == (after.runs, after.reward, after.finish)
            assert before.parts == after.parts and back.unscored == group.id % 2
            assert before.prompt_length == after.prompt_length
            assert before.turn_rewards == after.turn_rewards and before.forks == after.forks
            assert after.loss_mask.dtype == bool
            assert (before.experts is None) == (after.experts is None)
            if before.experts is not None and after.experts is not None:
                np.testing.assert_array_equal(before.experts, after.experts)


@given(members(False), st.integers(0, 9))
def test_the_oldest_token_of_each_sample(found: list[Sample], allowed: int) -> None:
    head, _ = encode_group(group_of(1, found))
    young = [[version for version, _ in member.runs if version >= allowed] for member in found]
    assert head.oldest_tokens(allowed) == Counter(min(versions) for versions in young if versions)


def table(row: tuple = (2, 3, 0, 0, 2, 0.5), runs: tuple = ((1, 2), (2, 1)), **changes: object) -> dict:
    good = {"groups": [[1, 1, 1.5]], "digests": {1: "a", 2: "b"}}
    good |= {"rows": np.array([row], ROW).tobytes(), "runs": np.array(list(runs), RUN).tobytes()}
    return good | changes


def read(table: dict) -> list[Head]:
    """Read a push that any peer may have sent."""
    push, *_ = decode([msgpack.packb([SCHEMA, "push", {"table": table}])])
    assert isinstance(push, Push)
    return unpack_heads(push.table)


def test_claimed_sizes_are_exact_beyond_64_bits() -> None:
    rows = np.array([(2**31 - 1, 1, 0, 0, 1, 0.5)] * 1100, ROW).tobytes()
    named = {"groups": [[1, 1100, 1.5]], "digests": {1: "a"}, "experts": [[4095, 1023, 2]]}
    (head,) = read(table(runs=((1, 1),) * 1100, rows=rows, **named))
    each = 2**31 - 1
    assert head.size == 1100 * (4 * each + 9 + each * 4095 * 1023 * 2) > 1 << 63


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (table(groups=[]), r"table\.groups"),
        (table(groups=[[1, 1]]), r"length 3.*table\.groups"),
        (table(groups=[[-1, 1, 0.0]]), r"table\.groups"),
        (table(groups=[[True, 1, 0.0]]), r"`int`.*table\.groups"),
        (table(groups=[[1, 2, 0.0]]), "2 samples named, 1 in the table"),
        (table(groups=[[1, 0, 0.0], [2, 1, 0.0]]), r"table\.groups"),
        (table(groups=[[1, 2**40, 0.0]]), r"table\.groups"),
        *[(table(groups=[[1, 1, seconds]]), r"table\.groups") for seconds in (float("inf"), float("nan"))],
        *[(table(parts=parts), "parts of rewards") for parts in ([[], []], [[{}, {}]])],
        *[(table(parts=[[{name: part}]]), r"table\.parts") for name, part in (("a b", 1.0), ("a", 1e10))],
        (table(unscored=[0, 0]), "without one"),
        (table(experts=[[2, 2, 1], [2, 2, 1]]), "experts of the shapes"),
        (table(experts=[[2, 2, 0]]), "experts of the shapes"),
        (table(experts=[[2, 2, 4]]), r"<= 2.*table\.experts"),
        (table(rows=b""), "rows"),
        (table(rows=b"abc"), "rows"),
        (table(runs=b"abc"), "runs"),
        (table((2, 3, 0, 0, 2, float("nan"))), "reward"),
        (table((2, 3, 0, 0, 2, 3e38)), "reward"),
        (table((2, 4, 0, 0, 2, 0.5)), "cover"),
        (table((2, 3, 7, 0, 2, 0.5)), "finish"),
        (table((2, 3, 0, -1, 2, 0.5)), "turns"),
        (table((0, 3, 0, 0, 2, 0.5)), "lengths"),
        (table((-1, 3, 0, 0, 2, 0.5)), "lengths"),
        (table((2, -3, 0, 0, 2, 0.5)), "lengths"),
        (table((2, 3, 0, 0, 1, 0.5)), "1 runs are named, 2 in the table"),
        (table((2, 3, 0, 0, 2**31 - 1, 0.5)), "runs are named, 2 in the table"),
        (table(runs=((-1, 2), (2, 1))), "version"),
        (table(runs=((1, 4), (2, -1))), "length"),
        (table(digests={1: "a"}), "missing"),
        (table(digests={1: "a", 2: "b", 3: "c"}), "made no token of them"),
        (table(digests={1: "a", "2": "b"}), r"`int`.*table\.digests"),
        (table(digests={1: "a", 2: 3}), r"`str`.*table\.digests"),
    ],
)
def test_a_table_whose_numbers_disagree_is_refused(wrong: dict, reason: str) -> None:
    read(table())
    with pytest.raises(WireError, match=reason):
        read(wrong)


MASK = np.array([1, 0, 0, 1], bool)
SAMPLE = Sample(np.arange(6, dtype=np.int32), 2, np.zeros(4, np.float32), MASK, [(0, 4)], 0.5, "stop")
CHOSEN = replace(SAMPLE, experts=np.arange(20, dtype=np.uint8).reshape(5, 2, 2))
EMPTY = Sample(np.ones(2, np.int32), 2, np.zeros(0, np.float32), np.zeros(0, bool), [], 1.0, "stop")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([EMPTY], "sample 0 has an empty response"),
        ([replace(SAMPLE, forks=[4])], "ascending"),
        ([replace(SAMPLE, forks=[-1])], "ascending"),
        ([replace(SAMPLE, forks=[2, 1])], "ascending"),
        ([SAMPLE, replace(SAMPLE, forks=[3])], "is trained"),
        ([replace(SAMPLE, turn_rewards=[(4, 0.5)])], "reward of a turn"),
        ([replace(SAMPLE, turn_rewards=[(-1, 0.5)])], "reward of a turn"),
        ([replace(SAMPLE, turn_rewards=[(0, float("nan"))])], "reward of a turn"),
        ([CHOSEN, replace(CHOSEN, experts=np.zeros((5, 1, 2), np.uint8))], "different shapes"),
    ],
)
def test_samples_that_make_no_sense_are_refused(members: list[Sample], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_group(*encode_group(group_of(7, members)))


def test_a_prompt_that_samples_share_is_sent_once() -> None:
    other = replace(SAMPLE, tokens=SAMPLE.tokens + 1)
    for group, prompts in (([SAMPLE] * 3, 1), ([SAMPLE, SAMPLE, other], 2), ([SAMPLE, other, SAMPLE], 3)):
        head, payload = encode_group(group_of(1, group))
        assert (head.prompts, head.prompt, head.response) == (2 * prompts, 2, 4)
        assert len(payload) == head.size == 4 * 2 * prompts + 9 * 4 * 3


def test_experts_travel_only_if_all_samples_have_them_and_must_be_the_models() -> None:
    mixed, payload = encode_group(group_of(1, [CHOSEN, SAMPLE]))
    assert mixed.experts == NONE
    check_payload(mixed, payload, Model(99, Routing(2, 2, 16)))
    head, payload = encode_group(group_of(1, [CHOSEN, CHOSEN]))
    assert len(payload) == head.size == encode_group(group_of(1, [SAMPLE, SAMPLE]))[0].size + 2 * 20
    for routing in (None, Routing(2, 2, 20)):
        check_payload(head, payload, Model(99, routing))
    for routing, words in ((Routing(2, 2, 19), "expert 19 where .* has 19"), (Routing(1, 4, 20), r"has \(1, 4, 1\)")):
        with pytest.raises(WireError, match=words):
            check_payload(head, payload, Model(99, routing))


def test_groups_that_disagree_on_a_version_both_keep_their_digest() -> None:
    head = read(table())[0]
    version = head.versions[0]
    other = msgspec.structs.replace(head, id=head.id + 1, digests=head.digests | {version: "another"})
    for heads in ([head, other], [other, head], [head, other, head]):
        found = pack_heads(heads).digests[version].split(OR)
        assert sorted(found) == sorted([head.digests[version], "another"])


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
