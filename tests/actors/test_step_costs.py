"""Steps of the sizes that a run did not have, measured at its end."""

import asyncio
import json
from pathlib import Path
from time import sleep, thread_time

import numpy as np
import pytest

from actors.engines.step_costs import FEW_STEPS, MISSING_SECONDS, StepCosts, class_of, measure_missing
from actors.engines.torch_engine import TorchEngine
from areal_like.types import Completion, Limits

from .tiny_models import new_model


class Charged:
    """An engine whose steps cost 1 ms, and .1 ms per sequence. `asked`: sequences and their length."""

    def __init__(self, slots: int, factor: float = 1.0):
        self.slots, self.step_costs, self.factor = slots, StepCosts(), factor
        self.asked: list[tuple[int, int]] = []
        self.busy = 0.0  # processor time of each call
        self._waiting: list[asyncio.Future[None]] = []

    def steps(self, count: int, sequences: int, tokens: int) -> None:
        for place in range(count):
            self.step_costs.begin(0.0, sequences, tokens + place * sequences)
            self.step_costs.end(self.factor * (0.001 + 0.0001 * sequences))

    async def generate(self, tokens: np.ndarray, limits: Limits) -> Completion:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._run, len(tokens), limits.max_tokens)
        await done
        return Completion(tokens, tokens, [], "length")

    def _run(self, prompt: int, steps: int) -> None:
        end = thread_time() + self.busy
        while thread_time() < end:
            pass
        waiting, self._waiting = self._waiting, []
        self.asked.append((len(waiting), steps))
        self.steps(steps, len(waiting), prompt * len(waiting))
        for each in waiting:
            each.set_result(None)


def test_missing_sizes_are_measured_beside_the_one_that_the_run_had() -> None:
    engine = Charged(64)
    for _ in range(10 * FEW_STEPS):
        engine.steps(1, 60, 600)
    engine.steps(FEW_STEPS - 1, 1, 10)
    engine.steps(FEW_STEPS, 16, 160)
    counted = engine.step_costs
    before = {size: sums.copy() for size, sums in counted.decode.items()}
    asyncio.run(measure_missing(engine))
    assert engine.step_costs is counted
    assert all((counted.decode[size] == sums).all() for size, sums in before.items()), "the run's own are as they were"
    assert sorted({size for size, _ in engine.asked}) == [1, 4, 60], "16 was there often enough"
    for size, sequences in ((0, 1), (2, 4), (6, 60)):
        steps, all_sequences, tokens, seconds = counted.alone[size][0]
        assert (all_sequences / steps, seconds / steps) == pytest.approx((sequences, 0.001 + 0.0001 * sequences))
        assert tokens / all_sequences == pytest.approx(10, rel=0.8), "as many tokens each as in the run"


def test_the_fastest_try_counts() -> None:
    engine = Charged(4, 5.0)
    engine.steps(100, 4, 40)
    whole, run = engine._run, 0

    def quieter(prompt: int, steps: int) -> None:
        nonlocal run
        run += 1
        engine.factor = 1.0 if run > 4 else 5.0  # of two sizes, warm-up and steps: the first try is disturbed
        whole(prompt, steps)

    engine._run = quieter  # type: ignore[method-assign]
    asyncio.run(measure_missing(engine))
    steps, _, _, seconds = engine.step_costs.alone[0][0]
    assert seconds / steps == pytest.approx(0.0011)


def test_nothing_is_measured_of_slow_steps_full_runs_and_engines_that_did_nothing() -> None:
    idle, full, slow = Charged(4), Charged(4), Charged(64, 1e3 * MISSING_SECONDS)
    for sequences in (1, 2, 4):
        full.steps(FEW_STEPS, sequences, 10)
    slow.steps(100, 64, 640)
    for engine in (idle, full, slow):
        asyncio.run(measure_missing(engine))
        assert not engine.asked and not engine.step_costs.alone


@pytest.mark.slow
def test_measuring_ends_in_time_and_is_no_work_of_the_samples(tmp_path: Path) -> None:
    """Prefill is not in the steps' seconds, and may take much longer."""
    engine = Charged(4)
    engine.steps(100, 4, 40)
    engine.busy = MISSING_SECONDS / 3
    asyncio.run(measure_missing(engine))
    assert len(engine.asked) <= 3, "of 16 calls"
    assert 0 not in engine.step_costs.alone, "there was no time for a single sequence"
    engine.step_costs.write(tmp_path, "actor-0", 10)
    assert json.loads((tmp_path / "costs" / "actor-0.json").read_text())["handled"][1] < MISSING_SECONDS / 3


def test_the_size_to_compare_with_is_that_of_most_seconds() -> None:
    engine = Charged(64)
    engine.steps(1000, 2, 20)
    engine.steps(400, 64, 640)
    asyncio.run(measure_missing(engine))
    assert engine.step_costs.largest == 6 and 6 in engine.step_costs.alone


def test_what_the_engine_does_before_a_step_is_the_steps() -> None:
    class Slow(TorchEngine):
        def _relieve(self) -> None:
            sleep(0.003)
            super()._relieve()

    engine = Slow(new_model(), slots=2)

    async def run() -> None:
        await engine.generate(np.ones(3, np.int32), Limits(20))
        await engine.close()

    asyncio.run(run())
    steps, _, _, seconds = engine.step_costs.decode[0][0]
    assert seconds / steps > 0.003


def test_an_engine_that_breaks_is_left_alone() -> None:
    engine = Charged(4)
    engine.steps(100, 4, 40)
    counted = engine.step_costs

    async def broken(tokens: np.ndarray, limits: Limits) -> Completion:
        raise KeyError("whatever a model raises")

    engine.generate = broken  # type: ignore[method-assign]
    asyncio.run(measure_missing(engine))
    assert engine.step_costs is counted and not counted.alone


def test_the_embedded_engine_measures_what_its_run_lacked() -> None:
    engine = TorchEngine(new_model(), slots=8)

    async def run() -> None:
        prompts = [np.full(3, n, np.int32) for n in range(8)]
        await asyncio.gather(*(engine.generate(prompt, Limits(40, key=n)) for n, prompt in enumerate(prompts)))
        before = engine.step_costs.begun, list(engine.step_costs.prefill), set(engine.step_costs.decode)
        await measure_missing(engine)
        assert before == (engine.step_costs.begun, list(engine.step_costs.prefill), set(engine.step_costs.decode))
        await engine.close()

    asyncio.run(run())
    assert set(engine.step_costs.decode) == {3} and set(engine.step_costs.alone) == {0, 2, 3}
    assert all(sums[0, 3] > 0 for sums in engine.step_costs.alone.values())


def test_steps_that_follow_one_another_are_a_block() -> None:
    counted, now, step = StepCosts(), 1000.0, 2.0**-10  # steps of .98 ms, exactly, whatever has gone before
    for _ in range(25):
        counted.begin(now, 2, 20)
        now += step
        counted.end(now)
    assert [round(block[2]) for block in counted.blocks] == [11, 11, 3], "each of at least 10 ms"
    first, second = list(counted.blocks)[:2]
    assert first[1] == second[0] and second[1] - second[0] == 11 * step
    assert second[3:] == pytest.approx([22, 220, 11 * step])


@pytest.mark.parametrize(("sequences", "size"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_classes(sequences: int, size: int) -> None:
    assert class_of(sequences) == size
