"""A group is broken off on one actor and resumed on another, with the real engine and real workflows."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from actors.engines.torch_engine import TorchEngine
from actors.reward_pool import PartedReward
from actors.worker import Rollout, Worker
from actors.workflows import single_turn
from areal_like.models.experts import NONE, Routing
from areal_like.partial import CarriedSamples, PartialSample
from areal_like.stops import NO_STOPS
from areal_like.types import Completion, Group, Lease, Prompt
from areal_like.wire.frames import WireError
from areal_like.wire.groups import check_partial, decode_group, decode_partial, encode_group, encode_partial
from areal_like.wire.messages import Model, PartialHead
from tests.actors.looped import looped
from tests.actors.test_worker import Client as Recording
from tests.actors.tiny_models import new_model, update_of

LAUNCH, ANSWER = 3, 24
FILLER = (0, 9, 0)


class Task:
    stop_tokens = (5,)

    def prompt(self, split: str, row: int) -> Prompt:
        return Prompt(np.arange(6, dtype=np.int32), None, ANSWER, FILLER)


class Client(Recording):
    """Takes groups and partial groups from their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.push, self.hand_back = self.take, lambda ids, partials, leaving: self.left.extend(partials)

    def take(self, group: Group) -> None:
        head, payload = encode_group(group)
        self.groups.append(decode_group(head, bytes(payload)))


class Actor:
    def __init__(self, version: int = 0, *, task=None, workflow=single_turn, engine=None, stops=NO_STOPS):
        self.client, self.scored = Client(), []
        self.engine = engine or TorchEngine(new_model(seed=0), slots=4)
        if version:
            self.engine._apply(update_of(new_model(seed=version), version))
        rollout, digests = Rollout(3, 1.0, None, workflow, {}, stops), {version: f"d{version}"}
        self.worker = Worker(task or Task(), self.engine, self.reward, self.client, rollout, digests)

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        self.scored.append(len(tokens))
        score = PartedReward(tokens.sum())
        score.parts = {"length": len(tokens)}
        return score

    def lease(self, carried: CarriedSamples | None = None) -> None:
        self.worker.start([Lease(7, 0, "train", LAUNCH, LAUNCH)], {7: carried} if carried else {})

    async def broken_off(self, after: int) -> CarriedSamples:
        """What it hands back after so many tokens."""
        self.lease()
        while self.engine.stats()["tokens"] < after:
            await asyncio.sleep(0)
        await self.worker.hand_back()
        await self.engine.close()
        ((head, payload),) = self.client.left
        check_partial(head, payload)
        return decode_partial(head, payload, (0, 1, 2))

    async def group(self, carried: CarriedSamples | None = None) -> Group:
        self.lease(carried)
        while not self.client.groups and not self.client.failures:
            await asyncio.sleep(0)
        await self.engine.close()
        return self.client.groups[0] if self.client.groups else None


async def resumed(make: Callable[[], Actor], after: int) -> tuple[Group, Group, Actor, Actor]:
    """A group that was broken off and resumed, the same undisturbed, and the first two actors."""
    first, second = make(), make()
    group, expected = await second.group(await first.broken_off(after)), await make().group()
    for ours, theirs in zip(group.samples, expected.samples, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)
        assert (ours.reward, ours.finish, ours.runs) == (theirs.reward, theirs.finish, theirs.runs)
        assert ours.parts == theirs.parts and ours.parts.get("length", 1) > 0
    assert not first.client.failures and first.client.groups == []
    return group, expected, first, second


@pytest.mark.parametrize("after", [1, 20])
@looped
async def test_with_equal_weights_the_group_is_that_of_an_undisturbed_actor(after: int) -> None:
    _, expected, first, second = await resumed(Actor, after)
    lengths = [sample.response_length for sample in expected.samples]
    assert sum(lengths) > 30 >= after, "the group must not have been complete"
    decoded = first.engine.stats()["tokens"] + second.engine.stats()["tokens"]
    assert decoded == sum(lengths), "a token was sampled twice"
    assert len(first.scored) + len(second.scored) == LAUNCH, "a response was scored twice"
    assert first.client.credits[-1] == LAUNCH


@looped
async def test_tokens_keep_their_version_and_logprobs_when_others_go_on_with_newer_weights() -> None:
    first, spans = Actor(), 0
    group = await Actor(version=1).group(await first.broken_off(12))
    assert group.digests == {0: "d0", 1: "d1"}
    for index, left in decode_partial(*first.client.left[0], (0, 1, 2)).samples.items():
        sample, calls = group.samples[index], [*left.calls.values()]
        old = sum(count for version, count in sample.runs if version == 0)
        assert old > 0 and sample.runs[0] == (0, old)
        np.testing.assert_array_equal(sample.tokens[6 : 6 + old], np.concatenate([call.tokens for call in calls]))
        np.testing.assert_array_equal(sample.logprobs[:old], np.concatenate([call.logprobs for call in calls]))
        spans += len(sample.runs) == 2
    assert spans >= 2


def changed(field: str, value: object) -> Callable[[PartialHead], None]:
    """Change the first call."""
    return lambda head: setattr(head.calls[0], field, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda head: head.calls.clear(), "calls"),
        (changed("runs", []), "calls"),
        (changed("runs", [(0, -1)]), "calls"),
        (changed("runs", [(0, 10_000)]), "size"),
        (changed("finish", "gone"), "calls"),
        (changed("sample", -1), "calls"),
        (changed("offset", -1), "calls"),
        (lambda head: head.scores.append((0, 1, np.nan)), "score"),
        (lambda head: head.scores.append((99, 1, 0.0)), "score"),
        (lambda head: head.parts.append((99, 1, {})), "score"),
        (lambda head: head.digests.update({9: "d9"}), "digest"),
    ],
)
def test_a_partial_group_that_does_not_add_up_is_refused(change, words: str) -> None:
    actor = Actor()
    asyncio.run(actor.broken_off(12))
    ((head, payload),) = actor.client.left
    change(head)
    with pytest.raises((WireError, msgspec.ValidationError), match=words):
        check_partial(msgspec.msgpack.decode(msgspec.msgpack.encode(head), type=PartialHead), payload)


def test_experts_of_a_partial_group_survive_the_way_and_are_the_models() -> None:
    def call(tokens: int, positions: int, first: int) -> Completion:
        experts = np.arange(first, first + 4 * positions, dtype=np.uint8).reshape(positions, 2, 2)
        ids, logprobs = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
        return Completion(ids, logprobs, [(0, tokens)], "stop", experts)

    calls = {(1, 0): call(3, 7, 0), (2, 3): call(2, 4, 28)}
    head, payload = encode_partial(7, {0: PartialSample(calls)}, {0: "d0"})
    check_partial(head, payload, Model(1 << 20, Routing(2, 2, 44)))
    carried = decode_partial(head, payload, (0,)).samples
    for key, each in calls.items():
        np.testing.assert_array_equal(carried[0].calls[key].experts, each.experts)
    first, second = head.calls
    fewer, more = (msgspec.structs.replace(second, positions=n) for n in (0, 5))
    for change, routing in (
        ({}, Routing(2, 2, 43)),
        ({}, Routing(1, 4, 99)),
        ({"experts": NONE}, None),
        ({"calls": [first, fewer]}, None),
        ({"calls": [first, more]}, None),
    ):
        with pytest.raises(WireError):
            check_partial(msgspec.structs.replace(head, **change), payload, Model(1 << 20, routing))
    without = {1: PartialSample({(1, 0): replace(call(3, 7, 0), experts=None)})}
    assert encode_partial(7, {0: PartialSample(calls)} | without, {0: "d0"})[0].experts == NONE
