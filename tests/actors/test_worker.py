"""The worker with events in a fixed order: a workflow that ends on command, a client that records."""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from actors import session as sessions
from actors.heldout import Heldout
from actors.reward_pool import NoReward, RewardError
from actors.session import Session
from actors.worker import RESAMPLES, Rollout, Worker
from areal_like.sampling import stream_key
from areal_like.types import Completion, Group, Lease, Limits, Prompt, Sample
from areal_like.wire import messages
from areal_like.wire.frames import SAY_HELLO, Received
from areal_like.wire.link import BusError
from tests.actors.looped import looped


class Client:
    """Records an actor's messages."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.failures: list[tuple] = []
        self.credits: list = []
        self.evaluations: list[tuple] = []
        self.left: list[tuple] = []
        self.push = self.groups.append
        self.hello = lambda: self.credits.append("hello")
        self.hand_back = lambda lengths, leaving: self.left.append((lengths, leaving))

    def send(self, message: messages.Message) -> None:
        match message:
            case messages.Credit(ended):
                self.credits.append(ended)
            case messages.Failed(group_id, reason, detail):
                self.failures.append((group_id, reason, detail))
            case messages.LeftOut(group_id, cut, redrawn):
                self.left.append((group_id, cut, redrawn, len(self.groups)))

    def evaluated(self, lease: int, version: int, answer: Group | None) -> None:
        sample = answer.samples[0] if answer else None
        self.evaluations.append((lease, version, sample and (sample.reward, sample.runs, answer.digests)))


class Task:
    stop_tokens = (9,)

    def prompt(self, split: str, row: int) -> Prompt:
        return Prompt(np.array([row], np.int32), None, 5)


class Engine:
    slots = 64
    version = 3

    def __init__(self) -> None:
        self.calls: dict[str, asyncio.Future] = {}
        self.stats = lambda: {"tokens": 1.0}

    async def generate(self, tokens, limits, request: str = "") -> Completion:
        self.calls[request] = asyncio.get_running_loop().create_future()
        return await self.calls[request]

    def abort(self, requests) -> None:
        for each in requests:
            if each in self.calls and not self.calls[each].done():
                self.calls[each].set_result(Completion(np.zeros(6, np.int32), np.zeros(6), [(3, 6)], "abort"))


def sample(reward: float, version: int = 3) -> Sample:
    return Sample(np.zeros(3, np.int32), 1, np.zeros(2, np.float32), np.ones(2, bool), [(version, 2)], reward, "stop")


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Play:
    """A workflow whose samples end at the test's signal."""

    def __init__(self) -> None:
        self.futures: dict[str, asyncio.Future] = {}
        self.limits: dict[str, Limits] = {}
        self.client = Client()
        heldout = Heldout(partial(Task().prompt, "heldout"), self.workflow, None)  # type: ignore[arg-type]
        rollout = Rollout(5, 0.7, None, self.workflow, {"heldout": heldout})
        self.worker = Worker(Task(), Engine(), None, self.client, rollout, {3: "abc", 4: "def"})

    async def workflow(self, engine, reward, prompt, limits, request) -> Sample | None:
        self.limits[request] = limits
        future = self.futures[request] = asyncio.get_running_loop().create_future()
        return await future

    async def lease(self, group_id: int = 1, launch: int = 3, need: int = 3, split: str = "train") -> None:
        self.worker.start([Lease(group_id, 0, split, launch, need, 0.0)])
        await settle()

    async def end(self, request: str, result: Sample | BaseException | None) -> None:
        future = self.futures[request]
        future.set_exception(result) if isinstance(result, BaseException) else future.set_result(result)
        await settle()


@pytest.fixture
def play() -> Play:
    return Play()


@looped
async def test_a_group_is_pushed_once_complete_in_the_order_of_its_samples(play: Play) -> None:
    await play.lease()
    for index, reward, version in [(2, 0.2, 3), (0, 0.0, 4)]:
        await play.end(f"1/{index}", sample(reward, version))
        assert play.client.groups == []
    await play.end("1/1", sample(0.1))
    (group,) = play.client.groups
    assert (group.id, [s.reward for s in group.samples]) == (1, [0.0, 0.1, 0.2])
    assert group.digests == {3: "abc", 4: "def"}
    assert play.limits == {f"1/{i}": Limits(5, 0.7, (9,), stream_key(5, 1, i)) for i in range(3)}


@looped
async def test_the_first_that_finish_make_the_group_and_lengths_of_the_others_are_reported(play: Play) -> None:
    ended = asyncio.get_running_loop().create_future()

    async def workflow(engine, reward, prompt, limits, request) -> Sample | None:
        if request == "1/1":
            return await ended
        await engine.generate(prompt.tokens, limits, request)
        return sample(9.0)

    play.worker.rollout = replace(play.worker.rollout, workflow=workflow)
    await play.lease(launch=3, need=1)
    ended.set_result(sample(0.5))
    await settle()
    assert play.client.left == [(1, [6, 6], [], 0)], "two, after six tokens each, before the push"
    assert [s.reward for s in play.client.groups[0].samples] == [0.5]


@looped
async def test_a_recall_reports_the_length_of_each_sample_and_whether_it_had_come_to_its_end(play: Play) -> None:
    thinks = asyncio.get_running_loop().create_future()

    async def workflow(engine, reward, prompt, limits, request) -> Sample | None:
        await engine.generate(prompt.tokens, limits, request)
        if request == "1/1":
            await asyncio.Event().wait()
        if request == "1/2":
            await thinks
            await engine.generate(prompt.tokens, limits, request)
        return sample(0.5)

    play.worker.rollout = replace(play.worker.rollout, workflow=workflow)
    await play.lease(launch=4, need=4)
    for request, count in {"1/0": 3, "1/1": 4, "1/2": 5}.items():  # the last one is in the engine
        done = Completion(np.zeros(count, np.int32), np.zeros(count), [(3, count)], "stop")
        play.worker.engine.calls[request].set_result(done)
    await settle()
    play.worker.cancel([1], hand_back=True)
    thinks.set_result(None)  # its next call comes after the recall
    await settle()
    assert play.client.left == [({1: [(3, False), (4, True), (5, True), (6, True)]}, False)]
    assert play.client.groups == play.client.failures == []


@pytest.mark.parametrize("crashes", [2, 3])
@looped
async def test_crashes_of_a_reward_are_reported_with_their_group_drawn_again_or_failed(crashes: int, play: Play):
    tried = []

    async def workflow(engine, reward, prompt, limits, request) -> Sample | None:
        await engine.generate(prompt.tokens, limits, request)
        tried.append(limits.key)
        if len(tried) <= crashes:
            raise RewardError("bo\nom")
        return sample(0.5)

    play.worker.rollout = replace(play.worker.rollout, workflow=workflow)
    await play.lease(launch=1, need=1)
    for count in range(1, 2 + RESAMPLES):  # each attempt has calls of its own
        answer = Completion(np.full(count, count), np.zeros(count), [(3, count)], "stop")
        play.worker.engine.calls["1/0"].set_result(answer)
        await settle()
    assert tried == [stream_key(5, 1, 0), stream_key(5, 1, 0, 1), stream_key(5, 1, 0, 2)], "not the same sample again"
    assert play.client.credits == [1], "its slot is freed once"
    if crashes == RESAMPLES:
        assert play.client.left == [(1, [], 2 * ["reward crashed: bo om"], 0)] and len(play.client.groups) == 1
        assert play.worker.failures.note == "", "two are no trouble, and then one has ended"
    else:
        assert play.client.failures[0][:2] == (1, "reward crashed") and not play.client.groups
        assert play.worker.failures.note == "no sample ends: reward crashed: bo om", "in printable words"


FINAL = RewardError("boom")
FINAL.redraw = False


@pytest.mark.parametrize(
    ("result", "reason"), [(None, "rejected"), (RuntimeError("boom"), "failed"), (FINAL, "reward crashed")]
)
@looped
async def test_a_group_that_cannot_be_completed_is_given_up_with_a_reason(result, reason: str, play: Play) -> None:
    await play.lease()
    await play.end("1/0", sample(0.0))
    await play.end("1/1", result)
    assert play.client.failures[0][:2] == (1, reason)
    assert play.client.groups == [] and play.futures["1/2"].cancelled()


@pytest.mark.parametrize(
    ("launch", "need", "without", "left"), [(3, 3, 1, 2), (4, 3, 1, 3), (3, 3, 2, 0), (1, 1, 1, 0)]
)
@looped
async def test_samples_without_a_reward_are_left_out_while_two_are_left(launch, need, without, left, play: Play):
    await play.lease(launch=launch, need=need)
    for index in range(launch):
        await play.end(f"1/{index}", NoReward("None") if index < without else sample(0.1 * index))
        if play.client.failures:
            break
    assert [reason for _, reason, _ in play.client.failures] == ["no reward"] * (not left)
    assert [(len(each.samples), each.unscored) for each in play.client.groups] == [(left, need - left)] * bool(left)
    assert play.client.credits[-1] == launch and not play.worker.failures.note


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": 1e300}, "float32"),
        ({"turn_rewards": [(0, float("nan"))]}, "float32"),
        ({"parts": {"form": 1e10}}, "float32"),
        ({"parts": {"a b": 1.0}}, "parts a b"),
        ({"parts": {f"turn{i}": 1.0 for i in range(33)}}, "at most 32"),
    ],
)
@looped
async def test_a_reward_that_the_learner_could_not_compute_with_is_one_that_crashed(changes, words, play: Play) -> None:
    await play.lease(launch=1, need=1)
    for _ in range(1 + RESAMPLES):
        await play.end("1/0", replace(sample(0.5), **changes))
    ((group_id, reason, detail),) = play.client.failures
    assert (group_id, reason) == (1, "reward crashed") and words in detail and play.client.groups == []


@looped
async def test_each_sequence_that_ends_frees_its_slot_before_its_group_is_complete(play: Play) -> None:
    await play.lease()
    await play.end("1/2", sample(0.2))
    assert play.client.credits == [], "one more place makes no room for another lease of three"
    play.worker.look()
    await settle()
    assert play.client.credits == [1]
    play.worker.credit.lease(1)  # there was a lease of one sequence
    await play.end("1/1", sample(0.2))
    assert play.client.credits == [1, 2]
    await play.lease(group_id=2)
    play.worker.cancel([2])
    await settle()
    assert play.client.credits == [1, 2, 5], "three slots free at once are one message"
    play.worker.hello_again()
    await settle()
    assert play.client.credits[3:] == ["hello", -1, 0], "one sequence still ran"
    assert play.futures["1/0"].cancelled(), "others have its group now"


@looped
async def test_a_lease_of_a_group_that_still_runs_here_takes_its_place(play: Play) -> None:
    await play.lease()
    before = dict(play.futures)
    await play.lease()
    assert all(future.cancelled() for future in before.values())
    for index in range(3):
        await play.end(f"1/{index}", sample(0.5))
    assert len(play.client.groups) == 1 and not play.client.failures


@looped
async def test_an_actor_that_leaves_reports_nothing_of_its_held_out_prompts(play: Play) -> None:
    """The buffer gives them to others, and would refuse its answer."""
    await play.lease(group_id=10, split="heldout", launch=1, need=1)
    await play.worker.hand_back(leaving=True)
    await settle()
    assert play.futures["e10"].cancelled() and play.client.left == [({}, True)]
    assert play.client.evaluations == []


@looped
async def test_a_held_out_prompt_that_fails_counts_as_zero(play: Play) -> None:
    answers = {10: sample(1.0), 11: RuntimeError("boom"), 12: asyncio.CancelledError()}  # the last from within
    for lease, answer in answers.items():
        await play.lease(group_id=lease, split="heldout", launch=1, need=1)
        await play.end(f"e{lease}", answer)
    assert play.client.evaluations == [(10, 3, (1.0, [(3, 2)], {3: "abc"})), (11, 3, None), (12, 3, None)]
    assert play.limits["e10"].temperature == 0.0


def begun() -> tuple[Session, list]:
    """A session, and all that its client and worker are called with."""
    calls: list = []
    client = SimpleNamespace(send=lambda message: calls.append((message.version, message.digest)))
    worker = SimpleNamespace(
        engine=SimpleNamespace(version=4, digest="d4"),
        hello_again=lambda: calls.append("hello"),
        start=lambda leases: calls.append([lease.group_id for lease in leases]),
    )
    return Session(client, worker, None), calls


def leased(number: int) -> Received:
    return Received(messages.Lease([Lease(number, 0, "train", 1, 1)]))


REFUSED = Received(messages.Refused(f"unknown actor: {SAY_HELLO}"))
WELCOME = Received(messages.Welcome())


def test_a_lease_of_the_session_before_is_not_begun() -> None:
    session, calls = begun()
    session.handle(WELCOME)
    session.handle(leased(1))
    session.renew()
    session.handle(leased(2))
    session.handle(WELCOME)
    session.handle(leased(3))
    assert calls == [[1], "hello", (4, "d4"), [3]]


def test_many_refusals_make_one_hello_until_it_has_been_unanswered_for_long(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    session, calls = begun()
    session.handle(WELCOME)
    for seconds, hellos in ((0, 1), (sessions.HELLO_SECONDS + 1, 2)):
        now[0] += seconds
        for _ in range(5):
            session.handle(REFUSED)
        assert calls.count("hello") == hellos
    session.handle(WELCOME)
    session.handle(REFUSED)
    assert calls.count("hello") == 3


def test_an_actor_whose_key_is_not_one_of_actors_ends() -> None:
    reason = "a key of role operator can't say hello as 'actor'"
    with pytest.raises(BusError, match=reason):
        begun()[0].handle(Received(messages.Refused(reason)))
