"""A group is broken off on one actor and resumed on another, with the real engine and real workflows."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest

from actors.engines.torch_engine import TorchEngine
from actors.worker import Rollout, Worker
from actors.workflows import single_turn
from areal_like.models.experts import NONE, Routing
from areal_like.types import CarriedSamples, Completion, Group, Lease, PartialSample, Prompt
from areal_like.wire.frames import WireError
from areal_like.wire.groups import RUN, decode_group, encode_group
from areal_like.wire.messages import Credit, PartialHead
from areal_like.wire.partials import CALL, SCORE, check_partial, decode_partial, encode_partial
from tests.actors.tiny_models import VOCAB, new_model, update_of

LAUNCH, ANSWER = 3, 24
FILLER = (0, 9, 0)


class Task:
    stop_tokens = (5,)

    def prompt(self, split: str, row: int) -> Prompt:
        return Prompt(np.arange(6, dtype=np.int32), None, ANSWER, FILLER)


class Client:
    """Records an actor's messages, decoded from their bytes."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.handed_back: list[tuple] = []
        self.failures: list[tuple] = []
        self.ended = 0

    def push(self, group: Group) -> None:
        head, payload = encode_group(group)
        self.groups.append(decode_group(head, bytes(payload)))

    def hand_back(self, ids, partials, leaving: bool) -> None:
        for head, payload in partials:
            check_partial(head, payload)
            self.handed_back.append((head, payload))
        self.left = (list(ids), leaving)

    def failed(self, *failure) -> None:
        self.failures.append(failure)

    def send(self, message: Credit) -> None:
        self.ended = message.ended


class Actor:
    def __init__(self, version: int = 0, weights: int = 0):
        self.client, self.scored = Client(), []
        self.engine = TorchEngine(new_model(seed=0), slots=4)
        if weights or version:
            self.engine._apply(update_of(new_model(seed=weights), version))
        knobs = {"workflow": partial(single_turn), "heldout": {}}
        rollout = Rollout(seed=3, temperature=1.0, max_tokens=None, **knobs)
        self.worker = Worker(Task(), self.engine, self.reward, self.client, rollout, {version: f"d{version}"})

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        self.scored.append(len(tokens))
        return float(tokens.sum())

    def lease(self, carried: CarriedSamples | None = None) -> None:
        self.worker.start([Lease(7, 0, "train", LAUNCH, LAUNCH)], {7: carried} if carried else {})

    async def decoded(self, tokens: int) -> None:
        async with asyncio.timeout(20):
            while self.engine.stats()["tokens"] < tokens:
                await asyncio.sleep(0)

    async def group(self) -> Group:
        async with asyncio.timeout(20):
            while not self.client.groups:
                await asyncio.sleep(0)
        await self.engine.close()
        return self.client.groups[0]


async def broken_off(after: int, *, leaving: bool = False) -> Actor:
    first = Actor()
    first.lease()
    await first.decoded(after)
    await first.worker.hand_back(leaving=leaving)
    await first.engine.close()
    return first


def left_by(actor: Actor, usable: tuple[int, ...] = (0, 1, 2)) -> CarriedSamples:
    ((head, payload),) = actor.client.handed_back
    return decode_partial(head, payload, usable)


async def undisturbed() -> Group:
    actor = Actor()
    actor.lease()
    return await actor.group()


@pytest.mark.parametrize("after", [1, 8, 20, 30])
def test_with_equal_weights_the_group_is_that_of_an_undisturbed_actor(after: int) -> None:
    async def scenario() -> tuple[Group, Group, Actor, Actor]:
        first, second = await broken_off(after), Actor()
        second.lease(left_by(first))
        return await undisturbed(), await second.group(), first, second

    expected, group, first, second = asyncio.run(scenario())
    lengths = [sample.response_length for sample in expected.samples]
    assert sum(lengths) > 30 >= after, "the group must not have been complete"
    for ours, theirs in zip(group.samples, expected.samples, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)
        assert (ours.reward, ours.finish, ours.runs) == (theirs.reward, theirs.finish, theirs.runs)
    decoded = first.engine.stats()["tokens"] + second.engine.stats()["tokens"]
    assert decoded == sum(lengths), "a token was sampled twice"
    assert len(first.scored) + len(second.scored) == LAUNCH, "a response was scored twice"
    assert not first.client.failures and first.client.groups == [] and first.client.ended == LAUNCH


def test_tokens_keep_their_version_and_logprobs_when_others_go_on_with_newer_weights() -> None:
    async def scenario() -> tuple[Actor, Group]:
        first, second = await broken_off(12), Actor(version=1, weights=1)
        second.lease(left_by(first))
        return first, await second.group()

    first, group = asyncio.run(scenario())
    assert group.digests == {0: "d0", 1: "d1"}
    spans = 0
    for index, left in left_by(first).samples.items():
        sample, tokens = group.samples[index], np.concatenate([call.tokens for call in left.calls.values()])
        old = sum(count for version, count in sample.runs if version == 0)
        assert old == len(tokens) > 0 and sample.runs[0] == (0, old)
        np.testing.assert_array_equal(sample.tokens[6 : 6 + old], tokens)
        before = np.concatenate([call.logprobs for call in left.calls.values()])
        np.testing.assert_array_equal(sample.logprobs[:old], before)
        assert np.abs(sample.logprobs[old:]).max(initial=0) < 50 and sample.tokens.max() < VOCAB
        spans += len(sample.runs) == 2
    assert spans >= 2


def changed(column: str, kind: np.dtype, field: str, value: object) -> Callable[[PartialHead], None]:
    """Change the value in the first row of a column."""

    def change(head: PartialHead) -> None:
        rows = np.frombuffer(getattr(head, column) or bytes(kind.itemsize), kind).copy()
        rows[field][0] = value
        setattr(head, column, rows.tobytes())

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda head: setattr(head, "calls", b""), "calls"),
        (lambda head: setattr(head, "runs", head.runs + b"1"), "runs is not a whole number"),
        (lambda head: setattr(head, "runs", head.runs * 2), "runs are named"),
        (changed("runs", RUN, "n", -1), "a run's version or length"),
        (changed("runs", RUN, "n", 10_000), "size"),
        (changed("calls", CALL, "runs", 0), "number of runs"),
        (changed("calls", CALL, "finish", 9), "finish"),
        (changed("calls", CALL, "sample", -1), "sample"),
        (changed("calls", CALL, "offset", -1), "offset"),
        (changed("scores", SCORE, "reward", np.nan), "score"),
        (changed("scores", SCORE, "sample", 99), "score"),
        (lambda head: head.digests.update({9: "d9"}), "digest"),
    ],
)
def test_a_partial_group_that_does_not_add_up_is_refused(change, words: str) -> None:
    ((head, payload),) = asyncio.run(broken_off(12)).client.handed_back
    change(head)
    with pytest.raises(WireError, match=words):
        check_partial(head, payload)


def test_experts_of_a_partial_group_survive_the_way_and_are_the_models() -> None:
    def call(tokens: int, positions: int, first: int) -> Completion:
        experts = np.arange(first, first + 4 * positions, dtype=np.uint8).reshape(positions, 2, 2)
        return Completion(
            np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), [(0, tokens)], "stop", experts
        )

    calls = {
        (1, 0): call(3, 7, 0),
        (2, 3): call(2, 4, 28),
        (3, 5): replace(call(1, 1, 0), tokens=np.zeros(0, np.int32)),
    }
    samples = {0: PartialSample(calls), 2: PartialSample({(4, 0): call(1, 0, 0)})}
    head, payload = encode_partial(7, samples, {0: "d0"})
    check_partial(head, payload, routing=Routing(2, 2, 44))
    assert len(payload) == 6 * 8 + 11 * 4
    carried = decode_partial(head, payload, (0, 2)).samples
    for key in ((1, 0), (2, 3)):
        np.testing.assert_array_equal(carried[0].calls[key].experts, calls[key].experts)
    assert carried[2].calls[4, 0].experts.shape == (0, 2, 2)
    for change, routing, words in (
        ({}, Routing(2, 2, 43), "expert 43 where"),
        ({}, Routing(1, 4, 99), "has .1, 4, 1."),
        ({"experts": NONE}, None, "experts of the shape"),
        ({"positions": b""}, None, "experts of the shape"),
        ({"positions": head.positions + bytes(4)}, None, "not those of its calls"),
        ({"positions": np.array([12, -1, 0], np.int32).tobytes()}, None, "not those of its calls"),
        ({"positions": np.array([7, 5, 0], np.int32).tobytes()}, None, "size"),
    ):
        with pytest.raises(WireError, match=words):
            check_partial(msgspec.structs.replace(head, **change), payload, routing=routing)
    without = PartialSample({(1, 0): replace(call(3, 7, 0), experts=None)})
    assert encode_partial(7, samples | {1: without}, {0: "d0"})[0].experts == NONE
