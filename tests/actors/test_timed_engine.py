"""The timed engine in virtual time: the event loop's clock jumps to the next timer, so seconds can be asserted."""

import asyncio
import math
from functools import wraps

import numpy as np
import pytest

from actors.engines.decode_clock import AnswerLengths, DecodeClock, DecodeCost, TimedRequest
from actors.engines.timed_engine import TimedEngine
from areal_like.types import Limits
from areal_like.weights.replica import Update
from areal_like.weights.state import State


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when the loop would sleep; every sleep takes `late` seconds longer."""

    def __init__(self, late=0.0):
        super().__init__()
        self._now, select = 0.0, self._selector.select

        def jump(timeout=None):
            if timeout:
                self._now += timeout + late
            return select(0)

        self._selector.select = jump

    def time(self):
        return self._now


def run(main, late=0.0):
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(late)) as runner:
        return runner.run(main)


def virtual(test):
    """Run an async test in virtual time."""
    return wraps(test)(lambda *args, **kwargs: run(test(*args, **kwargs)))


def now():
    return asyncio.get_running_loop().time()


def update(version):
    return Update(version, f"digest {version}", State([]))


def engine_of(median, **knobs):
    return TimedEngine(base=knobs.pop("base", 1.0), median=median, sigma=0.0, noise=0.0, **knobs)


PROMPT = np.arange(4, dtype=np.int32)


async def timed(engine, *, max_tokens, key=0, name="", delay=0.0):
    """(seconds from now to the end, completion)"""
    await asyncio.sleep(delay)
    completion = await engine.generate(PROMPT, Limits(max_tokens, key=key), name)
    return now(), completion


@virtual
async def test_a_step_costs_base_plus_a_share_per_sequence():
    engine = engine_of(3, per_sequence=0.5)
    alone, completion = await timed(engine, max_tokens=9)
    assert alone == pytest.approx(3 * 1.5)
    both = await asyncio.gather(timed(engine, max_tokens=2, key=1), timed(engine, max_tokens=3, key=2))
    # Two steps of two sequences, then one of one.
    assert [t - alone for t, _ in both] == pytest.approx([2 * 2.0, 2 * 2.0 + 1.5])
    assert [c.finish for _, c in both] == ["length", "stop"]
    assert completion.runs == [(0, 3)] and completion.logprobs.tolist() == [-1.0] * 3
    assert engine.stats()["tokens"] == 8 and engine.stats()["busy_seconds"] == pytest.approx(10.0)


@virtual
async def test_slots_are_given_first_in_first_out_after_the_step_in_progress():
    engine = engine_of(100, slots=2)
    ends = await asyncio.gather(
        *(timed(engine, max_tokens=n) for n in (5, 2, 4)), timed(engine, max_tokens=1, delay=1.5)
    )
    assert [t for t, _ in ends] == pytest.approx([5, 2, 6, 6])
    ends = await asyncio.gather(timed(engine, max_tokens=4), timed(engine, max_tokens=4, delay=1.5))
    assert [t for t, _ in ends] == pytest.approx([10, 12])


def test_late_wake_ups_do_not_slow_the_accelerator():
    async def main():
        engine = engine_of(1000, base=0.001, slots=4)
        await asyncio.gather(*(timed(engine, max_tokens=10 + i, key=i) for i in range(400)))
        return engine.stats()["busy_seconds"], now()

    (busy, prompt_end), (busy_late, late_end) = run(main()), run(main(), late=0.5)
    assert busy == pytest.approx(prompt_end)
    assert busy_late == pytest.approx(busy) and late_end < prompt_end + 1.0


def test_lengths_follow_prompt_and_key_and_a_second_call_goes_on_with_the_same_sample():
    engine = TimedEngine(median=200.0, sigma=0.8, noise=0.2, seed=3)
    prompts = [np.array([i, 1], np.int32) for i in range(300)]
    lengths = np.log(
        [[engine.length(p, Limits(10**6, key=8 * i + j)) for j in range(8)] for i, p in enumerate(prompts)]
    )
    assert np.median(lengths) == pytest.approx(np.log(200), abs=0.1)
    assert lengths.mean(axis=1).std() == pytest.approx(np.hypot(0.8, 0.2 / np.sqrt(8)), rel=0.1)
    assert lengths.std(axis=1, ddof=1).mean() == pytest.approx(0.2, rel=0.1)
    again, other = (TimedEngine(median=200.0, sigma=0.8, noise=0.2, seed=s) for s in (3, 4))
    limits = Limits(10**6, key=5)
    whole = engine.length(PROMPT, limits)
    assert whole == again.length(PROMPT, limits) != other.length(PROMPT, limits)
    longer = np.concatenate([PROMPT, np.zeros(6, np.int32)])
    assert engine.length(longer, Limits(10**6, key=5, offset=6)) == whole - 6


def test_lengths_of_a_trace_are_those_of_one_list_per_prompt():
    lengths = AnswerLengths(1.0, 0.0, 0.0, trace=[[5, 7], [50]])
    found = {frozenset(lengths.of(prompt, key) for key in range(50)) for prompt in range(40)}
    assert found == {frozenset({5, 7}), frozenset({50})}
    with pytest.raises(ValueError, match="trace"):
        AnswerLengths(1.0, 0.0, 0.0, trace=[[5], []])


@virtual
async def test_stop_tokens_end_responses_only():
    engine = engine_of(50)
    stopped = await engine.generate(PROMPT, Limits(60, stop=(2, 5)))
    cut = await engine.generate(PROMPT, Limits(40, stop=(2, 5)))
    assert (len(stopped.tokens), stopped.finish, len(cut.tokens), cut.finish) == (50, "stop", 40, "length")
    assert stopped.tokens[-1] == 2 and not np.isin(stopped.tokens[:-1], (2, 5)).any()
    np.testing.assert_array_equal(stopped.tokens[:40], cut.tokens)


@pytest.mark.parametrize(("policy", "end"), [("keep", 12.0), ("recompute", 13.0)])
@virtual
async def test_an_update_in_flight_takes_its_time_and_recomputing_one_step_more(policy, end):
    engine = engine_of(10, apply=2.0, kv_policy=policy)
    task = asyncio.create_task(timed(engine, max_tokens=10))
    await asyncio.sleep(3.5)
    await engine.load(update(4))
    # The fourth step ends under the old weights, then 2 s pass.
    assert now() == pytest.approx(6.0) and (engine.version, engine.digest) == (4, "digest 4")
    seconds, completion = await task
    assert seconds == pytest.approx(end) and completion.runs == [(0, 4), (4, 6)]
    stats = engine.stats()
    assert (stats["updates"], stats["apply_seconds"], stats["pause_seconds"]) == (1, 2.0, 2.0)


@virtual
async def test_an_uninterruptible_engine_finishes_first():
    engine = engine_of(100, apply=2.0, interruptible=False)
    running = [asyncio.create_task(timed(engine, max_tokens=n)) for n in (3, 6)]
    await asyncio.sleep(1.5)
    load = asyncio.create_task(engine.load(update(1)))
    await asyncio.sleep(0)
    late = asyncio.create_task(timed(engine, max_tokens=2))
    await load
    assert now() == pytest.approx(8.0)
    ends = [await task for task in [*running, late]]
    assert [t for t, _ in ends] == pytest.approx([3, 6, 10])
    assert [c.runs for _, c in ends] == [[(0, 3)], [(0, 6)], [(1, 2)]]
    assert engine.stats()["pause_seconds"] == 0


@virtual
async def test_abort_cancel_and_close():
    engine = engine_of(100, slots=2)
    tasks = [asyncio.create_task(timed(engine, max_tokens=50, name=name)) for name in "abcd"]
    await asyncio.sleep(7.5)
    engine.abort(["b", "d"])
    cut, unborn = (await tasks[1])[1], (await tasks[3])[1]
    assert (len(cut.tokens), cut.finish, cut.runs) == (7, "abort", [(0, 7)])
    assert (len(unborn.tokens), unborn.finish, unborn.runs) == (0, "abort", [])
    await asyncio.sleep(5)
    tasks[0].cancel()
    await asyncio.sleep(2)
    assert engine.stats()["running"] == 1
    await engine.close()
    assert (await tasks[2])[1].finish == "abort" and len((await tasks[2])[1].tokens) in (6, 7)


@pytest.mark.parametrize("per_token", [0.0, 0.003])
def test_steps_cost_as_much_together_as_one_by_one(per_token):
    cost = DecodeCost(base=0.02, per_sequence=0.001, per_token=per_token)
    for count in range(1, 200, 7):
        seconds = cost.steps(count, 5, 40)
        assert seconds == pytest.approx(sum(cost.steps(1, 5, 40 + 5 * step) for step in range(count)))
        assert cost.steps_within(seconds + 1e-9, 5, 40) == count
        assert cost.steps_within(seconds - 1e-9, 5, 40) == count - 1


def test_prompts_cost_their_prefill():
    clock, ends = DecodeClock(DecodeCost(base=1.0, prefill=0.5), slots=4), {}
    for name, prompt, length in (("a", 4, 2), ("b", 2, 3)):
        ended = lambda request, finish: ends.update({request.name: (clock.now, finish, request.made)})  # noqa: E731
        clock.waiting.append(TimedRequest(name, length, True, 0.0, ended, prompt))
    while (due := clock.due()) < math.inf:
        clock.advance(due)
    assert ends == {"a": (5.0, "stop", 2), "b": (6.0, "stop", 3)}  # 3 s of prefill, then the steps
    assert clock.totals["busy_seconds"] == pytest.approx(6.0) and clock.held == 0
