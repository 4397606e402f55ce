"""What counts as progress of a lease, and which silence is legitimate: a worker with an engine stepped by hand."""

import asyncio
from functools import partial

import numpy as np
import pytest

from actors.resumption import limited
from actors.worker import Heldout, Rollout, Worker
from actors.workflows import single_turn
from areal_like.types import Completion, Lease, Prompt
from tests.actors.test_worker import Client


class Engine:
    """Requests get tokens, and end, at the test's signal; those named in `running` have a slot."""

    version = 3
    slots = 8

    def __init__(self) -> None:
        self.calls: dict[str, asyncio.Future] = {}
        self.running: dict[str, int] = {}
        self.tokens = 0.0

    async def generate(self, tokens, limits, request: str = "") -> Completion:
        self.calls[request] = asyncio.get_running_loop().create_future()
        try:
            return await self.calls[request]
        finally:
            self.running.pop(request, None)

    def step(self, *names: str) -> None:
        for name in names:
            self.running[name] = self.running.get(name, 0) + 1
        self.tokens += len(names)

    def end(self, name: str) -> None:
        count = self.running.get(name, 1)
        done = Completion(np.zeros(count, np.int32), np.zeros(count, np.float32), [(3, count)], "stop")
        self.calls[name].set_result(done)

    def progress(self) -> dict[str, int]:
        return self.running

    def stats(self) -> dict[str, float]:
        return {"tokens": self.tokens}


class Blind(Engine):
    """An engine that can't report its requests' progress."""

    progress = None


class Task:
    stop_tokens = (9,)

    def prompt(self, split: str, row: int) -> Prompt:
        return Prompt(np.array([row], np.int32), None, 5)


class Play:
    """Groups 1 and 2 of one sample each, and held-out lease 7."""

    def __init__(self, workflow=single_turn, engine: type[Engine] = Engine):
        self.engine, self.scored = engine(), asyncio.Event()
        rollout = Rollout(
            5, 0.7, None, workflow, {"heldout": Heldout(partial(Task().prompt, "heldout"), single_turn, self.reward)}
        )
        self.worker = Worker(Task(), self.engine, self.reward, Client(), rollout, {3: "abc"})

    async def reward(self, prompt, tokens) -> float:
        await self.scored.wait()
        return 1.0

    async def start(self, heldout: bool = False) -> None:
        self.worker.start([Lease(each, each, "train", 1, 1, 0.0) for each in (1, 2)])
        if heldout:
            self.worker.start([Lease(7, 7, "heldout", 1, 1, 0.0)])
        await self.settle()
        self.worker.moved()

    @staticmethod
    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def moved(self) -> dict[int, int]:
        return self.worker.moved()[0]


def test_tokens_move_their_own_lease_and_a_place_without_tokens_is_a_standstill() -> None:
    async def scenario() -> None:
        play = Play()
        await play.start()
        play.engine.step("1/0", "2/0")
        assert play.moved() == {1: 1, 2: 1}
        assert play.moved() == {}, "the engine hangs"
        play.engine.step("2/0")
        assert play.moved() == {2: 2}, "one request hangs"

    asyncio.run(scenario())


def test_who_waits_for_a_place_moves_as_long_as_the_engine_does() -> None:
    async def scenario() -> None:
        play = Play()
        await play.start()
        play.engine.step("1/0")
        assert play.moved() == {1: 1, 2: 0}
        assert play.moved() == {}

    asyncio.run(scenario())


def test_a_verifier_at_work_is_progress_and_so_are_answers_and_scores() -> None:
    async def scenario() -> None:
        play = Play()
        await play.start()
        play.engine.step("1/0", "2/0")
        play.moved()
        play.engine.end("1/0")
        await play.settle()
        assert play.moved() == {1: 1} and play.moved() == {1: 1}, "its verifier has a time limit of its own"
        play.scored.set()
        await play.settle()
        assert play.moved() == {} and len(play.worker.client.groups) == 1

    asyncio.run(scenario())


def test_an_engine_that_cannot_tell_is_trusted_while_a_call_is_open() -> None:
    async def scenario() -> None:
        play = Play(engine=Blind)
        await play.start()
        assert play.moved() == {1: 0, 2: 0} == play.moved()

    asyncio.run(scenario())


@pytest.mark.parametrize("has_a_limit", [True, False])
def test_a_workflow_that_waits_for_something_else_stands_still_unless_it_has_a_limit(has_a_limit: bool) -> None:
    async def waiting(engine, reward, prompt, limits, request):
        if has_a_limit:
            with limited(engine):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def scenario() -> None:
        play = Play(waiting)
        await play.start()
        assert play.moved() == ({1: 0, 2: 0} if has_a_limit else {})

    asyncio.run(scenario())
