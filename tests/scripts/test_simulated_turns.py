"""Simulated processes that work in turns of their loop, on cores that they share."""

import pytest

from areal_like.config.run_config import ConfigError
from areal_like.wire import messages
from areal_like.wire.frames import Payloads
from scripts.simulate import main
from scripts.simulation import costs
from scripts.simulation.cores import SUBMITTING, Cores, Process
from scripts.simulation.timeline import Timeline

from .test_simulate import BASE, LONG_TAIL, closes, simulate

SAID = messages.Credit(1)


class House:
    """Processes that handle samples that end, and say so: `told` is who said something, and when."""

    def __init__(self, sample: costs.Sample, processes: int = 2, seed: int = 0):
        self.timeline, self.told = Timeline(), list[tuple[int, float]]()
        self.cores = Cores(self.timeline, sample, seed)
        self.processes = [self._process(name) for name in range(processes)]

    def _process(self, name: int) -> Process:
        def say(message: messages.Message, payloads: Payloads) -> None:
            self.told.append((name, pytest.approx(self.timeline.now)))

        return Process(self.cores, lambda: None, lambda: None, say)

    def end(self, name: int, samples: int = 1) -> None:
        process = self.processes[name]
        for _ in range(samples):
            process.due(self._handle, process)

    def _handle(self, process: Process) -> None:
        process.ended()
        process.hold(SAID, ())

    def run(self) -> list[tuple[int, float]]:
        while self.timeline.run(1):
            pass
        return self.told


def test_two_processes_on_one_core_wait_for_each_other() -> None:
    for cores, second in ((1, 5.0), (2, 3.0), (None, 3.0)):
        house = House(costs.Sample(actor=1.0, cores=cores))
        house.end(0, 2)
        house.end(1, 3)
        assert house.run() == [(0, 2.0)] * 2 + [(1, second)] * 3, "each pushes at its turn's end, together"


def test_who_has_more_to_do_waits_behind_the_others() -> None:
    house = House(costs.Sample(actor=1.0, cores=1))
    house.end(0)
    house.timeline.at(0.5, house.end, 0)  # in the middle of its first turn
    house.timeline.at(0.75, house.end, 1)
    assert house.run() == [(0, 1.0), (1, 2.0), (0, 3.0)]


def test_what_is_due_while_a_process_waits_is_of_the_same_turn() -> None:
    house = House(costs.Sample(actor=1.0, cores=1))
    house.end(0, 2)
    house.timeline.at(0.5, house.end, 1)
    house.timeline.at(1.5, house.end, 1)
    assert house.run() == [(0, 2.0), (0, 2.0), (1, 4.0), (1, 4.0)]


def test_a_process_that_slept_wakes_first() -> None:
    house = House(costs.Sample(actor=1.0, cores=1, wake=0.5))
    house.end(0)
    house.timeline.at(1.0, house.end, 0)  # it is awake: it asks for the next turn at once
    house.timeline.at(1.2, house.end, 1)
    assert house.run() == [(0, 1.5), (0, 2.5), (1, 3.5)]


def test_another_process_interrupts_who_has_worked_longest() -> None:
    house = House(costs.Sample(actor=1.0, cores=2))
    house.end(0, 2)
    house.timeline.at(0.25, house.end, 1)
    house.timeline.at(0.5, house.cores.interrupt, 0.25)
    assert house.run() == [(1, 1.25), (0, 2.25), (0, 2.25)]


def test_another_process_takes_a_free_core_if_there_is_one() -> None:
    house = House(costs.Sample(actor=1.0, cores=2))
    house.cores.interrupt(3.0)
    house.end(0)
    house.end(1)
    assert house.run() == [(0, 1.0), (1, 2.0)]
    alone = House(costs.Sample(actor=1.0))
    alone.cores.interrupt(3.0)
    alone.end(0)
    assert alone.run() == [(0, 1.0)], "each has a core of its own"


def test_samples_reach_the_engine_spread_over_the_turn() -> None:
    house, arrivals = House(costs.Sample(begin=0.5, actor=1.0, cores=1), 1), list[float]()
    house.end(0)
    for _ in range(2):
        house.processes[0].due(lambda: arrivals.append(house.processes[0].begins()))
    assert house.run() == [(0, 2.0)], "one that ended, two that began"
    assert arrivals == [1.0 + SUBMITTING * 0.5, 1.0 + SUBMITTING * 1.0]


def test_nothing_is_heard_of_a_process_that_has_ended() -> None:
    house = House(costs.Sample(actor=1.0, cores=1))
    house.end(0)
    house.timeline.at(0.5, house.processes[0].stop)
    house.end(1)
    assert house.run() == [(1, 2.0)], "its core is free when its turn would have ended"


def test_turns_scatter_by_the_seed_around_what_they_take() -> None:
    paces = [Cores(Timeline(), costs.Sample(actor=1.0, jitter=0.5), seed) for seed in (1, 1, 2)]
    drawn = [[each.pace() for _ in range(4000)] for each in paces]
    assert drawn[0] == drawn[1] != drawn[2]
    mean = sum(drawn[0]) / 4000
    assert mean == pytest.approx(1.0, abs=0.03)
    assert (sum((pace - mean) ** 2 for pace in drawn[0]) / 4000) ** 0.5 == pytest.approx(0.5, rel=0.1)
    assert Cores(Timeline(), costs.Sample(actor=1.0)).pace() == 1.0


def test_the_buffers_samples_take_a_core_of_the_actors() -> None:
    """One core: what the buffer takes per sample, an actor cannot use."""
    shared, apart = (
        simulate("scheduler.max_staleness=4", *LONG_TAIL, sample=costs.Sample(actor=1e-3, buffer=1e-3, cores=cores))
        for cores in (1, 3)
    )
    assert shared.samples_per_second < 0.95 * apart.samples_per_second and closes(shared)


def test_histories_of_one_config_repeat_and_differ() -> None:
    words = ["scheduler.max_staleness=4", *LONG_TAIL]
    first, again, other = (simulate(*words, history=history) for history in (3, 3, 4))
    assert first == again and first.seconds != other.seconds
    assert other.samples_per_second == pytest.approx(first.samples_per_second, rel=0.1)


def test_without_costs_of_samples_histories_are_the_same() -> None:
    words, free = ["scheduler.max_staleness=4", *LONG_TAIL], costs.Sample(jitter=1.0, cores=2)
    plain = simulate(*words, sample=costs.Sample())
    assert simulate(*words, sample=free, history=5) == plain


def test_turns_that_take_next_to_nothing_change_next_to_nothing() -> None:
    """They go through the whole machinery, and come to what is simulated without it."""
    words = ["scheduler.max_staleness=4", *LONG_TAIL]
    plain, turns = simulate(*words, sample=costs.Sample()), simulate(*words, sample=costs.Sample(actor=1e-9))
    assert turns.seconds == pytest.approx(plain.seconds, rel=1e-3)
    assert turns.staleness_mean == pytest.approx(plain.staleness_mean, rel=0.02)


def test_failures_differ_by_history() -> None:
    words = ["scheduler.max_staleness=4", "run.steps=20", "actors.count=4"]
    failures = costs.Failures(mtbf=2.0, restart=0.5)
    first, second = (simulate(*words, sample=costs.Sample(), failures=failures, history=n) for n in (0, 1))
    seeded = costs.Failures(mtbf=2.0, restart=0.5, seed=1)
    assert simulate(*words, sample=costs.Sample(), failures=seeded) == second != first


@pytest.mark.parametrize("wrong", ["begin: -1.0", "jitter: -0.1", "cores: 0"])
def test_impossible_costs_are_refused(wrong: str, tmp_path) -> None:
    (tmp_path / "costs.yaml").write_text(f"sample: {{{wrong}}}\n")
    with pytest.raises(ConfigError, match=rf"sample.{wrong.partition(':')[0]}: must be at least"):
        costs.read(tmp_path / "costs.yaml")


def test_simulate_prints_mean_least_and_most_of_histories(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([BASE, "run.steps=6", "--histories", "3"]) == 0
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    mean, least, most = (float(each) for each in rows["samples_per_second"].split("│")[2:5])
    assert least < mean < most


def test_the_learner_takes_cores_and_leaves_one() -> None:
    for cores, second in ((2, 3.0), (1, 3.0), (9, 3.0), (0, 2.0)):
        house = House(costs.Sample(actor=1.0, cores=2))
        house.cores.hold(cores, 10.0)
        house.end(0)
        house.end(1, 2)
        assert house.run()[1:] == [(1, second)] * 2
    house = House(costs.Sample(actor=1.0, cores=2))
    house.cores.hold(1, 0.5)
    house.end(0)
    house.end(1)
    assert house.run() == [(0, 1.0), (1, 1.5)], "it is given back"
    alone = House(costs.Sample(actor=1.0, cores=1))
    alone.cores.hold(1, 10.0)
    alone.end(0)
    assert alone.run() == [(0, 1.0)]


def test_a_learner_is_at_work_until_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing too, where it publishes: with weights every two steps, at every second one."""
    held = list[tuple[int, float]]()
    monkeypatch.setattr(Cores, "hold", lambda self, cores, seconds: held.append((cores, round(seconds, 3))))
    learner = costs.LearnerCost(0.2, publish=0.03, after=0.01, cores=1)
    simulate("scheduler.max_staleness=4", "weight_sync_interval=2", "run.steps=4", learner=learner)
    assert held == [(1, 0.21), (1, 0.24), (1, 0.21), (1, 0.24)]
    held.clear()
    simulate(
        "mode=sync", "learner.stream=true", "run.steps=1", learner=costs.LearnerCost(0.2, per_sample=0.001, cores=1)
    )
    assert sum(seconds for _, seconds in held) == pytest.approx(0.2 + 0.128, abs=1e-6) and len(held) > 1


def test_a_learner_on_the_actors_cores_makes_them_slower() -> None:
    """Two actors end their sequences at once, .2 s after they began, while it trains: one of them has to wait."""
    sample, busy = costs.Sample(actor=2e-3, cores=2), costs.LearnerCost(0.32, cores=1)
    with_it, without = (
        simulate("scheduler.max_staleness=1", sample=sample, learner=learner)
        for learner in (busy, costs.LearnerCost(0.32))
    )
    assert with_it.samples_per_second < 0.95 * without.samples_per_second and closes(with_it)
