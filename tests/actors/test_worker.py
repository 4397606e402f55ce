"""The worker with events in a fixed order: a workflow that ends on command, a client that records."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from actors.reward_pool import RewardError
from actors.worker import RESAMPLES, Heldout, Rollout, Worker
from areal_like.sampling import stream_key
from areal_like.types import Completion, Group, Lease, Limits, Prompt, Sample
from areal_like.wire import messages
from areal_like.wire.frames import decode, encode


class Client:
    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.failures: list[tuple] = []
        self.credits: list = []
        self.evaluations: list[tuple] = []
        self.left: list[tuple] = []

    def left_out(self, *left) -> None:
        self.left.append((*left, len(self.groups)))

    def push(self, group: Group) -> None:
        self.groups.append(group)

    def failed(self, *failure) -> None:
        self.failures.append(failure)

    def hand_back(self, ids: list[int], partials: list, leaving: bool) -> None:
        self.left.append((ids, leaving))

    def send(self, message: messages.Credit) -> None:
        self.credits.append(decode(encode(message)).message.ended)

    def hello(self) -> None:
        self.credits.append("hello")

    def evaluated(self, lease: int, version: int, answer: Group | None) -> None:
        sample = answer.samples[0] if answer else None
        self.evaluations.append((lease, version, sample and (sample.reward, sample.runs, answer.digests)))


class Task:
    stop_tokens = (9,)

    def prompt(self, split: str, row: int) -> Prompt:
        if row == 666:
            raise ValueError("row 666 is too long")
        return Prompt(np.array([row], np.int32), None, 5)


class Engine:
    slots = 64
    version = 3

    def __init__(self) -> None:
        self.calls: dict[str, asyncio.Future] = {}

    async def generate(self, tokens, limits, request: str = "") -> Completion:
        self.calls[request] = asyncio.get_running_loop().create_future()
        return await self.calls[request]

    def abort(self, requests) -> None:
        for each in requests:
            if each in self.calls and not self.calls[each].done():
                self.calls[each].set_result(Completion(np.zeros(6, np.int32), np.zeros(6), [(3, 6)], "abort"))


def sample(reward: float, version: int = 3) -> Sample:
    return Sample(np.zeros(3, np.int32), 1, np.zeros(2, np.float32), np.ones(2, bool), [(version, 2)], reward, "stop")


class Play:
    """A workflow whose samples end at the test's signal."""

    def __init__(self) -> None:
        self.futures: dict[str, asyncio.Future] = {}
        self.limits: dict[str, Limits] = {}
        self.client = Client()
        knobs = {
            "workflow": partial(self.workflow),
            "heldout": {"heldout": Heldout(partial(Task().prompt, "heldout"), self.heldout, None)},
        }
        rollout = Rollout(seed=5, temperature=0.7, max_tokens=None, **knobs)
        self.worker = Worker(Task(), Engine(), None, self.client, rollout, {3: "abc", 4: "def"})

    async def workflow(self, engine, reward, prompt, limits, request) -> Sample | None:
        self.limits[request] = limits
        future = self.futures[request] = asyncio.get_running_loop().create_future()
        return await future

    async def heldout(self, engine, reward, prompt, limits, request) -> Sample | None:
        return await self.workflow(engine, reward, prompt, limits, f"heldout {request}")

    async def lease(
        self, group_id: int = 1, row: int = 0, launch: int = 3, need: int = 3, split: str = "train"
    ) -> None:
        self.worker.start([Lease(group_id, row, split, launch, need, 0.0)])
        await self.settle()

    @staticmethod
    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self, request: str, result: Sample | BaseException | None) -> None:
        future = self.futures[request]
        future.set_exception(result) if isinstance(result, BaseException) else future.set_result(result)
        await self.settle()


def test_a_group_is_pushed_once_complete_in_the_order_of_its_samples() -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease()
        for index, reward, version in [(2, 0.2, 3), (0, 0.0, 4)]:
            await play.end(f"1/{index}", sample(reward, version))
            assert play.client.groups == []
        await play.end("1/1", sample(0.1))
        (group,) = play.client.groups
        assert (group.id, [s.reward for s in group.samples]) == (1, [0.0, 0.1, 0.2])
        assert group.digests == {3: "abc", 4: "def"}

    asyncio.run(scenario())


def test_each_sample_has_its_own_stream_that_depends_on_nothing_else() -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease(group_id=7)
        assert {r: limits.key for r, limits in play.limits.items()} == {f"7/{i}": stream_key(5, 7, i) for i in range(3)}
        assert play.limits["7/0"] == Limits(5, 0.7, (9,), stream_key(5, 7, 0))

    asyncio.run(scenario())


def test_the_first_that_finish_make_the_group_and_the_rest_is_cut() -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease(launch=3, need=2)
        await play.end("1/2", sample(0.2))
        await play.end("1/1", sample(0.1))
        assert [s.reward for s in play.client.groups[0].samples] == [0.1, 0.2]
        assert play.futures["1/0"].cancelled()

    asyncio.run(scenario())


def test_the_lengths_of_what_was_cut_are_told_before_the_push() -> None:
    async def scenario() -> None:
        play = Play()
        ended = asyncio.get_running_loop().create_future()

        async def workflow(engine, reward, prompt, limits, request) -> Sample | None:
            if request == "1/0":
                return await ended
            await engine.generate(prompt.tokens, limits, request)
            return sample(9.0)

        play.worker.rollout = replace(play.worker.rollout, workflow=workflow)
        await play.lease(launch=3, need=1)
        ended.set_result(sample(0.5))
        await play.settle()
        assert play.client.left == [(1, [6, 6], [], 0)], "two, after six tokens each, while nothing was pushed"
        assert [s.reward for s in play.client.groups[0].samples] == [0.5]

    asyncio.run(scenario())


def test_what_a_reward_crashed_on_is_told_with_its_group_drawn_again_or_failed() -> None:
    async def scenario(crashes: int) -> Play:
        play, tried = Play(), []

        async def workflow(engine, reward, prompt, limits, request) -> Sample | None:
            await engine.generate(prompt.tokens, limits, request)
            tried.append(request)
            if len(tried) <= crashes:
                engine.record.scores[5] = float("nan")
                raise RewardError("bo\nom" if crashes == 4 else "boom")
            return sample(0.5)

        play.worker.rollout = replace(play.worker.rollout, workflow=workflow)
        await play.lease(launch=1, need=1)
        for count in range(1, 1 + min(crashes + 1, 1 + RESAMPLES)):
            play.worker.engine.calls["1/0"].set_result(
                Completion(np.full(count, count), np.zeros(count), [(3, count)], "stop")
            )
            await play.settle()
        return play

    play = asyncio.run(scenario(crashes=2))
    assert play.client.left == [(1, [], 2 * ["reward crashed: boom"], 0)] and len(play.client.groups) == 1
    assert play.worker.last_crash == "", "two are no trouble, and then one has ended"
    play = asyncio.run(scenario(crashes=4))
    assert play.worker.last_crash == "no sample ends: reward crashed: bo om", "the buffer takes printable words only"
    play = asyncio.run(scenario(crashes=3))
    assert play.client.failures == [(1, "reward crashed", "RewardError('boom')")]


@pytest.mark.parametrize(("result", "reason"), [(None, "rejected"), (RuntimeError("boom"), "failed")])
def test_a_group_that_cannot_be_completed_is_given_up_with_a_reason(result, reason: str) -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease()
        await play.end("1/0", sample(0.0))
        await play.end("1/1", result)
        assert play.client.failures[0][:2] == (1, reason)
        assert play.client.groups == [] and play.futures["1/2"].cancelled()

    asyncio.run(scenario())


def test_a_reward_that_crashes_costs_its_sample_which_is_drawn_anew_in_its_slot() -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease(launch=2, need=2)
        await play.end("1/0", RewardError("boom"))
        assert play.limits["1/0"].key == stream_key(5, 1, 0, 1), "not the same sample again"
        assert play.client.credits == [] and play.worker.resampled == 1
        await play.end("1/1", sample(0.1))
        await play.end("1/0", sample(0.2))
        assert [s.reward for s in play.client.groups[0].samples] == [0.2, 0.1]
        assert play.client.credits == [2], "each slot is freed once, both at the end"

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", [[], [(0, float("nan"))]])
def test_a_reward_that_the_learner_could_not_compute_with_is_one_that_crashed(turns: list) -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease(launch=1, need=1)
        for _ in range(1 + RESAMPLES):
            await play.end("1/0", replace(sample(0.5 if turns else 1e300), turn_rewards=turns))
        ((group_id, reason, detail),) = play.client.failures
        assert (group_id, reason) == (1, "reward crashed") and "float32" in detail and play.client.groups == []

    asyncio.run(scenario())


def test_each_sequence_that_ends_frees_its_slot_before_its_group_is_complete() -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease()
        play.worker._smallest = 1  # there was a lease of one sequence
        await play.end("1/2", sample(0.2))
        await play.end("1/1", sample(0.2))
        assert play.client.credits == [1, 2]
        await play.lease(group_id=2)
        play.worker.cancel([2])
        await play.settle()
        assert play.client.credits == [1, 2, 5], "three slots free at once are told once"
        play.worker.hello_again()
        await play.settle()
        assert play.client.credits[3:] == ["hello", -1, 0], "one sequence still ran"
        assert play.futures["1/0"].cancelled(), "others have its group now"

    asyncio.run(scenario())


def test_a_lease_of_a_group_that_still_runs_here_takes_its_place() -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease()
        before = dict(play.futures)
        await play.lease()
        assert all(future.cancelled() for future in before.values())
        for index in range(3):
            await play.end(f"1/{index}", sample(0.5))
        assert len(play.client.groups) == 1 and not play.client.failures

    asyncio.run(scenario())


def test_an_actor_that_leaves_says_nothing_of_its_held_out_prompts() -> None:
    """The buffer gives them to others, and would refuse its answer."""

    async def scenario() -> None:
        play = Play()
        await play.lease(group_id=10, split="heldout", launch=1, need=1)
        await play.worker.hand_back(leaving=True)
        await play.settle()
        assert play.futures["heldout e10"].cancelled() and play.client.left == [([], True)]
        assert play.client.evaluations == []

    asyncio.run(scenario())


def test_held_out_prompts_have_their_own_workflow_and_one_that_fails_counts_as_zero() -> None:
    async def scenario() -> None:
        play = Play()
        await play.lease(group_id=10, split="heldout", launch=1, need=1)
        await play.end("heldout e10", sample(1.0))
        await play.lease(group_id=11, split="heldout", launch=1, need=1)
        await play.end("heldout e11", RuntimeError("boom"))
        await play.lease(group_id=12, split="heldout", launch=1, need=1)
        await play.end("heldout e12", asyncio.CancelledError())  # from within
        assert play.client.evaluations == [(10, 3, (1.0, [(3, 2)], {3: "abc"})), (11, 3, None), (12, 3, None)]
        assert play.limits["heldout e10"].temperature == 0.0

    asyncio.run(scenario())
