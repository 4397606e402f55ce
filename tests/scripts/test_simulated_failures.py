"""What goes wrong in simulated runs: the production code decides what is lost, and no prompt is."""

import math
from collections import Counter

import pytest

from areal_like.config import run_config as configs
from areal_like.config.run_config import ConfigError
from areal_like.types import Lease
from areal_like.wire import messages
from buffer.checks import RolloutsFail
from scripts.simulation import costs, results
from scripts.simulation.actors import Prompts, SimulatedActor, World
from scripts.simulation.run import Outcome, Simulation, Stuck
from scripts.simulation.timeline import SimulatedRouter, Timeline

from .test_simulate import BASE, LONG_TAIL, closes, simulate

WORDS = [*LONG_TAIL, "scheduler.max_staleness=4", "run.steps=20", "actors.count=4"]


def failing(*overrides: str, journal: str = "fsync", **failures: object) -> Outcome:
    words = [*WORDS, f"buffer.journal={journal}", *overrides]
    return simulate(*words, failures=costs.Failures(**failures))  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [2, 5])
def test_a_learner_that_dies_resumes_from_its_checkpoint(every: int) -> None:
    outcome = failing(f"checkpoint.every={every}", learner=1.2, learner_restart=0.5)
    whole = failing(f"checkpoint.every={every}")
    assert outcome.crashes >= 2 and closes(outcome) and max(outcome.staleness) <= 4
    assert sum(outcome.staleness.values()) == 20 * 128 and outcome.report["ledger"]["trained"] == 20 * 16
    assert 0 < outcome.repeated <= outcome.crashes * every
    assert outcome.seconds > whole.seconds + 0.5 * outcome.crashes


def test_a_crash_before_the_first_checkpoint_costs_its_time_too() -> None:
    outcome = failing("run.steps=6", "checkpoint.every=50", learner=0.8, learner_restart=7.0)
    assert outcome.crashes > 0 and outcome.seconds > 7.0 * outcome.crashes and closes(outcome)


def test_checkpoints_cost_their_seconds_beside_the_rollout() -> None:
    def seconds(every: int) -> float:
        config = configs.load([BASE, "mode=sync", "run.steps=12", f"checkpoint.every={every}"])
        cost = costs.of_timed(config)
        cost.learner.checkpoint = 1.0  # .2 of them while the next batch is rolled out
        return Simulation(config, cost).run().seconds

    assert seconds(2) - seconds(6) == pytest.approx(4 * 0.8, abs=0.15)


@pytest.mark.parametrize("journal", ["memory", "fsync"])
def test_a_journal_that_stalls_holds_up_the_buffer_or_only_its_messages(journal: str) -> None:
    def run(cost: costs.JournalCost) -> Outcome:
        return simulate("mode=sync", "run.steps=8", f"buffer.journal={journal}", journal=cost)

    free, slow = run(costs.JournalCost(write=1e-9)), run(costs.JournalCost(write=0.05))
    assert slow.seconds > free.seconds + 8 * 0.05 and closes(slow)
    stalled = run(costs.JournalCost(write=1e-9, stall=0.5, every=0.5))
    assert stalled.seconds > free.seconds + 1.0 and closes(stalled)


@pytest.mark.parametrize("warning", [0.0, 0.2])
def test_an_actor_whose_node_is_taken_hands_back_if_it_is_warned(warning: float, monkeypatch) -> None:
    left = Counter[str]()
    monkeypatch.setattr(SimulatedActor, "leave", _counted(SimulatedActor.leave, left))
    outcome = failing("partial_rollout=resume", spot=2.0, warning=warning, away=0.5)
    assert outcome.taken > 3 and closes(outcome) and max(outcome.staleness) <= 4
    assert left["leave"] == (outcome.taken if warning else 0)


def _counted(method, counts):
    def called(self, *arguments):
        counts["leave"] += 1
        return method(self, *arguments)

    return called


def test_what_nobody_reports_the_buffer_finds_out() -> None:
    """Silent actors by their heartbeats, hung ones by their leases; both sooner with shorter limits."""
    silent = failing("buffer.heartbeat_timeout=2", mtbf=10.0, restart=30.0, silent=1.0, heartbeat=0.2)
    hung = failing("buffer.lease_timeout=0.5", mtbf=3.0, restart=0.2, hangs=1.0, heartbeat=0.2)
    assert silent.deaths > 0 and closes(silent) and hung.deaths > 1 and closes(hung)
    assert hung.report["rollout/lease_timeouts"] > 0 and silent.report["rollout/lease_timeouts"] == 0
    slow = failing("buffer.heartbeat_timeout=9", mtbf=10.0, restart=30.0, silent=1.0, heartbeat=0.2)
    assert slow.seconds > silent.seconds + 1.0


def test_verifications_that_overrun_end_then_and_earn_nothing() -> None:
    slow = ["mode=sync", "run.steps=4", "rewards.timeout=0.5", "rewards.min_timeout=0.1"]
    plain = simulate(*slow, verifier=costs.Verifier(median=0.5, sigma=0.0))
    late = simulate(*slow, "rewards.max_timeouts=null", verifier=costs.Verifier(median=9.0, sigma=0.0))
    assert late.seconds == pytest.approx(plain.seconds, rel=0.01)
    with pytest.raises(RolloutsFail, match="overran"):
        simulate(*slow, "rewards.max_timeouts=0.9", verifier=costs.Verifier(median=9.0, sigma=0.0))


def test_answers_of_several_turns_wait_for_tools_and_keep_their_tokens() -> None:
    def run(turns: costs.Turns, *words: str) -> Outcome:
        answers = costs.Answers(200, 0, 0, prompt=8, most=4000, turns=turns)
        return simulate("run.steps=6", *(words or ["mode=sync"]), answers=answers)

    one, four = run(costs.Turns()), run(costs.Turns(4, 4, tool=0.1, sigma=0.0))
    assert four.tokens == one.tokens and closes(four)
    assert four.seconds == pytest.approx(one.seconds + 6 * 3 * 0.1, rel=0.02)
    spread = run(costs.Turns(1, 8, tool=0.05, sigma=1.0, tokens=100), "scheduler.max_staleness=2")
    assert spread.tokens == one.tokens and closes(spread)
    recalled = run(costs.Turns(2, 8, tool=0.05), "mode=sync", "scheduler.oversample_prompts=1.5")
    assert recalled.tokens == one.tokens and closes(recalled)


def test_rollpackers_settings_are_presets() -> None:
    for name, most, ratio in (("rollpacker_8k", 8192, 6.0), ("rollpacker_32k", 32768, 12.0)):
        found = costs.Answers(preset=name)
        assert found.most == most
        assert math.exp(2.326 * math.hypot(found.sigma, found.noise)) == pytest.approx(ratio, rel=0.01)
    with pytest.raises(ValueError, match="rollpacker_16k"):
        costs.Answers(preset="rollpacker_9k")


@pytest.mark.parametrize(
    "text, why",
    [
        ("engine: {base: -0.01}", "engine.base: must be at least 0, got -0.01"),
        ("engine: {base: 0}", "base, per_sequence or per_token must be above 0"),
        ("engine: {base: 2e-5}", "expected float, got '2e-5' .write 2.0e-5."),
        ("engine: {busy: 5}", "engine.busy: must be at least 0 and at most 1, got 5"),
        ("engine: {slots: -3}", "engine.slots: must be at least 1, got -3"),
        ("engine: {kv_tokens: 0}", "engine.kv_tokens: must be at least 1, got 0"),
        ("engine: {fresh: -1}", "engine.fresh"),
        ("latency: -1", "latency: must be"),
        ("latency: .nan", "latency: expected float, got nan"),
        ("buffer: -1", "buffer: must be"),
        ("learner: {gpus: 0}", "learner.gpus"),
        ("weights: {fetch: -1}", "weights.fetch"),
        ("verifier: {median: -1}", "verifier.median"),
        ("sample: {cores: 0}", "sample.cores"),
        ("answers: {right: 2}", "answers.right: must be at least 0 and at most 1, got 2"),
        ("answers: {drift: -1}", "answers.drift: must be above 0"),
        ("answers: {most: -1}", "answers.most: must be at least 1, got -1"),
        ("answers: {trace: []}", "answers.trace: no lengths"),
        ("answers: {trace: [3, 0]}", "answers.trace: every length must be at least 1"),
        ("answers: {trace: there-is-none}", "answers.trace: .*there-is-none"),
        ("answers: {turns: {tool: -1}}", "answers.turns.tool: must be at least 0, got -1"),
        ("failures: {mtbf: 0}", "failures.mtbf: must be above 0, got 0"),
        ("failures: {restart: -1}", "failures.restart"),
        ("journal: {write: -1}", "journal.write"),
        ("failures: {silent: .7, hangs: .7}", "shares"),
        ("answers: {turns: {least: 3, most: 2}}", "least=3"),
        ("answers: {preset: long}", "rollpacker_8k"),
        ("journal: {every: -1}", "journal.every"),
    ],
)
def test_costs_that_make_no_sense_are_refused(text: str, why: str, tmp_path) -> None:
    (tmp_path / "costs.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError, match=rf"costs.yaml: .*{why}"):
        costs.read(tmp_path / "costs.yaml")


def test_every_number_of_the_costs_has_a_range() -> None:
    for part in (costs.Costs, *costs._PARTS.values()):
        for name, annotation in part.__annotations__.items():
            assert not annotation.startswith(("int", "float")), f"{part.__name__}.{name}"


def test_what_never_fails_may_have_an_infinite_mean(tmp_path) -> None:
    (tmp_path / "costs.yaml").write_text("failures: {mtbf: .inf, spot: .inf, learner: .inf}\njournal: {every: .inf}\n")
    found = costs.read(tmp_path / "costs.yaml")
    assert (found.failures.mtbf, found.failures.spot, found.failures.learner, found.journal.every) == (None,) * 4


def test_a_run_that_can_come_no_further_says_so() -> None:
    """All actors die before they have weights; all groups are filtered; no checkpoint is reached before a crash."""
    with pytest.raises(Stuck, match=r"before the first train step.* actors died; learner waits for batch 0"):
        simulate("run.steps=4", failures=costs.Failures(mtbf=1e-3, restart=1.0))
    right = costs.Answers(200, 0, 0, right=1.0)
    with pytest.raises(Stuck, match=r"before the first train step.*where a train step takes some"):
        simulate("run.steps=4", "filter.name=zero_variance", "sizing.group_size=2", answers=right)
    with pytest.raises(Stuck, match=r"train step.* crashes of the learner"):
        few = ["groups_per_batch=4", "sizing.group_size=4", "scheduler.max_staleness=1"]  # each crash reads the journal
        failing("run.steps=99", "checkpoint.every=99", *few, learner=0.1, learner_restart=1.0)


def test_a_slow_run_is_not_stuck() -> None:
    slow = costs.LearnerCost(base=2e4)
    assert simulate("run.steps=2", learner=slow).seconds > 4e4
    rare = costs.Answers(200, 0, 0, right=0.98)  # one group of 25 or so stays
    outcome = simulate("run.steps=2", "filter.name=zero_variance", "sizing.group_size=2", answers=rare)
    assert outcome.report["steps"] == 2 and closes(outcome)
    tools = costs.Answers(200, 0, 0, most=1000, turns=costs.Turns(4, 4, tool=2e3, sigma=1.0))
    assert simulate("run.steps=1", answers=tools).report["steps"] == 1


def test_what_a_crash_interrupts_counts_in_the_rates_of_the_whole_run() -> None:
    outcome = failing("checkpoint.every=2", "eval.prompts=8", "eval.every=5", learner=1.2, learner_restart=0.5)
    found = results.summary(outcome)
    assert outcome.crashes >= 2 and outcome.rolled_out >= outcome.tokens
    assert found["tokens_per_second"] >= found["trained_tokens_per_second"] and found["since_step"] == 0
    versions = [each["version"] for each in found["evaluations"]]
    assert versions[0] == 0 and versions == sorted(versions) and 0.0 < outcome.actor_idle < 1.0
    seconds = [each["seconds"] for each in found["evaluations"]]
    assert seconds == sorted(seconds) and seconds[-1] <= outcome.seconds + 5.0


def test_failures_that_a_config_cannot_survive_are_refused() -> None:
    for word, failures in (
        ("buffer.journal=off", costs.Failures(learner=9.0)),
        ("checkpoint.every=0", costs.Failures(learner=9.0)),
        ("buffer.lease_timeout=0", costs.Failures(mtbf=9.0, hangs=0.5)),
    ):
        with pytest.raises(ConfigError, match=word.partition("=")[0]):
            simulate(word, failures=failures)
    with pytest.raises(ConfigError, match="journal=off"):
        simulate("buffer.journal=off", journal=costs.JournalCost(write=0.1))


def test_groups_that_are_cancelled_together_end_together() -> None:
    """One by one, the second would take the places of the first, end at once and be cancelled a second time."""
    cost = costs.Costs(engine=costs.Engine(base=0.1, per_sequence=1.0, slots=2))
    timeline = Timeline()
    router = SimulatedRouter(timeline, 0.0)
    prompts = Prompts(lambda split, row: (1, row, (50, 1)[row]), 0.5)  # row 0: 50 tokens, row 1: one
    world = World(timeline, router, cost, prompts, 0, None, cost.answers.lengths, None)
    actor = SimulatedActor("actor-0", world)
    leases = [Lease(1, 0, "train", 2, 2), Lease(2, 1, "train", 1, 1)]
    actor.receive(messages.Lease(leases, []), [])
    timeline.at(2.0, actor.receive, messages.Cancel([1, 2], True), [])  # within the first step of 2.1 seconds
    while timeline.run(100):
        pass
    said = [received.message for _, received in router.incoming]
    assert [each.ids for each in said if isinstance(each, messages.HandBack)] == [[1, 2]]
    assert not any(isinstance(each, messages.Push) for each in said)
