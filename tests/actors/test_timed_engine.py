"""The timed engine in virtual time: the event loop's clock jumps to the next timer, so seconds can be asserted."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest

from actors.engines.lengths import AnswerLengths
from actors.engines.timed_engine import TimedEngine
from areal_like.types import Limits
from areal_like.weights.state import State
from areal_like.weights.update import Update
from tests.seeds import seeded


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


def now():
    return asyncio.get_running_loop().time()


def update(version):
    return Update(version, f"digest {version}", State([]))


PROMPT = np.arange(4, dtype=np.int32)
FIXED = {"sigma": 0.0, "noise": 0.0}


async def timed(engine, *, max_tokens, key=0, name="", delay=0.0):
    """(seconds from now to the end, completion)"""
    await asyncio.sleep(delay)
    completion = await engine.generate(PROMPT, Limits(max_tokens, key=key), name)
    return now(), completion


def test_imports_neither_torch_nor_transformers():
    code = "import sys, actors.engines.timed_engine; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_step_costs_base_plus_a_share_per_sequence():
    async def main():
        engine = TimedEngine(base=1.0, per_sequence=0.5, trace=[3, 3])
        alone, completion = await timed(engine, max_tokens=9)
        assert alone == pytest.approx(3 * 1.5)
        both = await asyncio.gather(timed(engine, max_tokens=2, key=1), timed(engine, max_tokens=3, key=2))
        # Two steps of two sequences, then one of one.
        assert [t - alone for t, _ in both] == pytest.approx([2 * 2.0, 2 * 2.0 + 1.5])
        assert [c.finish for _, c in both] == ["length", "stop"]
        assert completion.runs == [(0, 3)] and completion.logprobs.tolist() == [-1.0] * 3
        assert engine.stats()["tokens"] == 8 and engine.stats()["busy_seconds"] == pytest.approx(10.0)

    run(main())


def test_joiners_wait_for_the_step_in_progress():
    async def main():
        engine = TimedEngine(base=1.0, trace=[4])
        first, late = await asyncio.gather(timed(engine, max_tokens=9), timed(engine, max_tokens=9, delay=1.5))
        assert first[0] == pytest.approx(4.0) and late[0] == pytest.approx(6.0)

    run(main())


def test_slots_are_given_first_in_first_out():
    async def main():
        engine = TimedEngine(base=1.0, slots=2, trace=[100])
        ends = await asyncio.gather(*(timed(engine, max_tokens=n) for n in (5, 2, 4, 1)))
        assert [t for t, _ in ends] == pytest.approx([5, 2, 6, 6])
        assert engine.stats()["joins"] == 4 and engine.stats()["running"] == 0

    run(main())


def test_late_wake_ups_do_not_slow_the_accelerator():
    async def main():
        engine = TimedEngine(base=0.001, slots=4, trace=[1000])
        await asyncio.gather(*(timed(engine, max_tokens=10 + i, key=i) for i in range(400)))
        assert engine.stats()["tokens"] == sum(10 + i for i in range(400))
        return engine.stats()["busy_seconds"], now()

    (busy, prompt_end), (busy_late, late_end) = run(main()), run(main(), late=0.5)
    assert busy == pytest.approx(prompt_end)
    assert busy_late == pytest.approx(busy) and late_end < prompt_end + 1.0


def test_lengths_follow_prompt_and_key():
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
    assert engine.length(PROMPT, limits) == again.length(PROMPT, limits) != other.length(PROMPT, limits)


def test_a_second_call_goes_on_with_the_same_sample():
    engine = TimedEngine(median=500.0)
    whole = engine.length(PROMPT, Limits(10**6, key=9))
    longer = np.concatenate([PROMPT, np.zeros(60, np.int32)])
    assert engine.length(longer, Limits(10**6, key=9, offset=60)) == whole - 60


def test_traces_come_from_lists_and_files(tmp_path):
    (tmp_path / "lengths.json").write_text(json.dumps([5, 7]))
    (tmp_path / "lengths.txt").write_text("5\n7\n")
    (tmp_path / "lengths.csv").write_text("response length\n5\n7\n")
    (tmp_path / "row.csv").write_text("5,7\n", encoding="utf-8-sig")
    for trace in (
        [5, 7],
        *(str(tmp_path / f"{name}") for name in ("lengths.json", "lengths.txt", "lengths.csv", "row.csv")),
    ):
        engine = TimedEngine(trace=trace)
        lengths = [engine.length(PROMPT, Limits(100, key=key)) for key in range(200)]
        assert set(lengths) == {5, 7} and 60 < lengths.count(5) < 140


@pytest.mark.parametrize(
    "text", ["", "tokens\n", "5\nx\n", "-3\n5\n", "1.5\n5\n", "5.5", '["a"]', '{"5": 7}', "[null]"]
)
def test_a_file_without_lengths_is_refused(tmp_path, text):
    (tmp_path / "lengths.csv").write_text(text)
    with pytest.raises(ValueError, match="trace: "):
        AnswerLengths(1.0, 0.0, 0.0, trace=str(tmp_path / "lengths.csv"))


def test_a_prompt_has_one_of_several_traces(tmp_path):
    (tmp_path / "lengths.json").write_text(json.dumps([[5, 7], [50], [60, 70, 80]]))
    for trace in ([[5, 7], [50], [60, 70, 80]], str(tmp_path / "lengths.json")):
        lengths = AnswerLengths(1.0, 0.0, 0.0, trace=trace)
        of_prompts = [frozenset(lengths.of(prompt, key) for key in range(50)) for prompt in range(90)]
        kinds = [frozenset({5, 7}), frozenset({50}), frozenset({60, 70, 80})]
        assert set(of_prompts) == set(kinds)
        assert all(15 < of_prompts.count(kind) < 45 for kind in kinds)
        groups = [lengths.drawn(prompt, [0.5, 0.9, 0.1]) for prompt in range(90)]
        assert {tuple(sorted(group)) for group in groups} == {(5, 7, 7), (50, 50, 50), (60, 70, 80)}


def test_a_group_has_each_length_of_its_prompt_once():
    """Or its longest answer would be shorter than it was; whoever asks for fewer of its samples gets the same ones."""
    lengths, draws = AnswerLengths(1.0, 0.0, 0.0, trace=[list(range(1, 9)), [100]]), seeded(0).random((400, 8)).tolist()
    prompt = next(number for number in range(99) if lengths.of(number, 0) < 100)
    assert all(sorted(lengths.drawn(prompt, each)) == list(range(1, 9)) for each in draws)
    assert all(lengths.drawn(prompt, each[:3]) == lengths.drawn(prompt, each)[:3] for each in draws)
    assert np.mean([lengths.drawn(prompt, each[:3]) for each in draws]) == pytest.approx(4.5, abs=0.4)


@pytest.mark.parametrize("trace", [[[5], 7], [[5], []], [[5, 0]]])
def test_lengths_that_no_answer_can_have_are_refused(trace):
    with pytest.raises(ValueError, match="trace: "):
        AnswerLengths(1.0, 0.0, 0.0, trace=trace)


def test_stop_tokens_end_responses_only():
    async def main():
        engine = TimedEngine(trace=[50])
        stopped = await engine.generate(PROMPT, Limits(60, stop=(2, 5)))
        cut = await engine.generate(PROMPT, Limits(40, stop=(2, 5)))
        assert (len(stopped.tokens), stopped.finish, len(cut.tokens), cut.finish) == (50, "stop", 40, "length")
        assert stopped.tokens[-1] == 2 and not np.isin(stopped.tokens[:-1], (2, 5)).any()
        assert not np.isin(cut.tokens, (2, 5)).any()
        np.testing.assert_array_equal(stopped.tokens[:40], cut.tokens)

    run(main())


def test_update_in_flight():
    async def main():
        engine = TimedEngine(base=1.0, apply=2.0, kv_policy="keep", trace=[10])
        task = asyncio.create_task(timed(engine, max_tokens=10))
        await asyncio.sleep(3.5)
        await engine.load(update(4))
        # The fourth step ends under the old weights, then 2 s pass.
        assert now() == pytest.approx(6.0) and (engine.version, engine.digest) == (4, "digest 4")
        end, completion = await task
        assert end == pytest.approx(12.0) and completion.runs == [(0, 4), (4, 6)]
        stats = engine.stats()
        assert (stats["updates"], stats["apply_seconds"], stats["pause_seconds"]) == (1, 2.0, 2.0)

    run(main())


def test_recomputing_costs_one_more_step():
    async def main():
        engine = TimedEngine(base=1.0, apply=2.0, trace=[10])
        task = asyncio.create_task(timed(engine, max_tokens=10))
        await asyncio.sleep(3.5)
        await engine.load(update(1))
        assert (await task)[0] == pytest.approx(13.0) and engine.stats()["recompute_seconds"] == 1.0

    run(main())


def test_an_idle_engine_updates_at_once():
    async def main():
        engine = TimedEngine(base=1.0, apply=2.0, trace=[3])
        await asyncio.sleep(10)
        load = asyncio.create_task(engine.load(update(1)))
        await asyncio.sleep(0)
        end, completion = await timed(engine, max_tokens=9)
        await load
        assert end == pytest.approx(15.0) and completion.runs == [(1, 3)]
        assert engine.stats()["pause_seconds"] == 0

    run(main())


def test_an_uninterruptible_engine_finishes_first():
    async def main():
        engine = TimedEngine(base=1.0, apply=2.0, interruptible=False, trace=[100])
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

    run(main())


def test_abort_cancel_and_close():
    async def main():
        engine = TimedEngine(base=1.0, slots=2, trace=[100])
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
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(PROMPT, Limits(1))

    run(main())


def test_knobs_are_checked():
    for knobs in ({"base": 0.0}, {"slots": 0}, {"noise": -1.0}, {"kv_policy": "forget"}, {"trace": [0]}):
        with pytest.raises(ValueError):
            TimedEngine(**knobs)
