"""Runs in virtual time: the production buffer with modelled peers."""

import json
import math
import os
import signal

import pytest

from actors.engines.lengths import AnswerLengths
from areal_like.config import run_config as configs
from areal_like.run.spans import read
from areal_like.sampling import stream_key, uniform
from areal_like.wire.frames import Payloads, decode, encode
from areal_like.wire.groups import Head, pack_heads
from areal_like.wire.messages import Push
from buffer.handlers import Handlers
from buffer.relays import Relays
from scripts.simulate import main
from scripts.simulation import costs, results, roofline
from scripts.simulation.draws import RIGHT, Draws
from scripts.simulation.pushes import HandedOver, SimulatedHandlers
from scripts.simulation.run import Outcome, Simulation, Stuck

BASE = "configs/bench/modes.yaml"
FREE = {"sample": costs.Sample(), "weights": costs.WeightsCost(encode=0.001, fetch=0.003)}
"""A finished sample costs actor and buffer nothing."""
LONG_TAIL = ["engine.median=60", "engine.sigma=1.0", "engine.noise=0.3", "learner.base=0.105"]


def simulate(*overrides: str, history: int = 0, **changed: object) -> Outcome:
    config = configs.load([BASE, *overrides])
    cost = costs.of_timed(config)
    for name, value in changed.items():
        setattr(cost, name, value)
    return Simulation(config, cost, history=history).run()


def closes(outcome: Outcome) -> bool:
    """Is each prompt that was admitted trained, filtered or dropped?"""
    ledger = outcome.report["ledger"]
    left = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    return bool(ledger["admitted"] == left)


def test_equal_lengths_come_to_what_arithmetic_says() -> None:
    """200 steps of 1 ms, 128 samples on two engines of 64 slots; .2 s to train them."""
    sync, one_ahead = simulate("mode=sync", **FREE), simulate("scheduler.max_staleness=1", **FREE)
    assert sync.samples_per_second == pytest.approx(128 / 0.4, rel=0.03)
    assert one_ahead.samples_per_second == pytest.approx(128 / 0.2, rel=0.03)
    assert sync.staleness == {0: 16 * 128} and sync.learner_idle == pytest.approx(0.5, abs=0.02)
    assert set(one_ahead.staleness) == {0, 1} and closes(sync) and closes(one_ahead)


def test_engines_are_slower_while_the_learner_trains() -> None:
    """Of 200 steps 100 take 2 ms, during .2 s of training, and the others 1 ms, while the learner waits."""
    engine = costs.Engine(base=0.001, beside=2.0)
    one_ahead = simulate("scheduler.max_staleness=1", **FREE, engine=engine)
    assert one_ahead.samples_per_second == pytest.approx(128 / 0.3, rel=0.03) and closes(one_ahead)
    assert one_ahead.learner_idle == pytest.approx(1 / 3, abs=0.03)
    sync = simulate("mode=sync", **FREE, engine=engine)
    assert sync.samples_per_second == pytest.approx(128 / 0.4, rel=0.03), "nothing runs beside it"


def test_long_tails_gain_from_staleness_as_real_runs_do() -> None:
    """Real processes came to 1.82 and 2.99 times sync (docs/results.md, "Sync against async")."""
    sync = simulate("mode=sync", *LONG_TAIL).samples_per_second
    gains = [simulate(f"scheduler.max_staleness={bound}", *LONG_TAIL).samples_per_second / sync for bound in (1, 4)]
    assert gains == pytest.approx([1.82, 2.99], rel=0.03)


def test_async_at_zero_is_sync() -> None:
    sync, zero = simulate("mode=sync", *LONG_TAIL), simulate("scheduler.max_staleness=0", *LONG_TAIL)
    assert sync.samples_per_second == pytest.approx(zero.samples_per_second, rel=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ["mode=sync", "scheduler.oversample_prompts=1.25", "scheduler.oversample_responses=1.25"],
        ["mode=sync", "sizing={name: sagc}"],
        ["mode=sync", "learner.stream=true", "learner.per_token=1e-5"],
        ["scheduler.max_staleness=1", "policy.name=fifo", "staleness_policy=requeue"],
        ["scheduler.max_staleness=1", "policy.name=fifo", "staleness_policy=mask_tokens", "weight_sync_interval=2"],
        ["scheduler.max_staleness=2", "filter.name=zero_variance", "sizing.group_size=2"],
        ["scheduler.max_staleness=2", "eval.prompts=8", "eval.every=5", "engine.interruptible=false"],
        ["scheduler.max_staleness=2", "engine.per_token=1e-8", "engine.prefill=1e-6", "engine.kv_tokens=9000"],
    ],
    ids=["tail batching", "sagc", "stream", "requeue", "mask", "filter", "evaluation", "cache"],
)
def test_every_mode_ends_within_its_bound_and_loses_no_prompt(overrides: list[str]) -> None:
    outcome = simulate(*LONG_TAIL, "run.steps=12", *overrides)
    bound = outcome.report["staleness_bound"]
    assert closes(outcome) and max(outcome.staleness) <= bound and outcome.report["refused"] == 0
    assert outcome.report["steps"] == 12 and outcome.seconds > 0
    again = simulate(*LONG_TAIL, "run.steps=12", *overrides)
    assert again == outcome


def test_groups_handed_over_are_those_that_the_wire_would_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*LONG_TAIL, "run.steps=8", "scheduler.max_staleness=1", "policy.name=fifo", "staleness_policy=requeue"]
    plain, versions = simulate(*words), set[int]()

    def read_push(handlers: Handlers, message: HandedOver, payloads: Payloads) -> tuple[list[Head], dict]:
        received = decode(encode(Push(pack_heads(message.heads)), payloads))
        assert isinstance(received.message, Push)
        heads, faults = Handlers.read_push(handlers, received.message, received.payloads)
        assert (heads, faults) == (message.heads, {})
        versions.update(len(head.versions) for head in heads)
        return heads, faults

    monkeypatch.setattr(SimulatedHandlers, "read_push", read_push)
    assert simulate(*words) == plain and versions == {1, 2}


def test_verifiers_and_drift_take_their_time() -> None:
    plain = simulate("mode=sync")
    slow = simulate("mode=sync", verifier=costs.Verifier(median=0.1))
    assert slow.seconds == pytest.approx(plain.seconds + 16 * 0.1, rel=0.01)
    longer = simulate("mode=sync", answers=costs.Answers(200, 0, 0, drift=1.1, right=0.5))
    assert longer.tokens == pytest.approx(plain.tokens * sum(1.1**step for step in range(16)) / 16, rel=0.01)


@pytest.mark.parametrize("cores, waits", [(None, 64), (2, 64), (1, 128)])
def test_samples_that_end_at_once_are_finished_one_after_the_other(cores: int | None, waits: int) -> None:
    """Two actors of 64 slots, all answers of 200 tokens: a round waits for the last one."""
    free = simulate("mode=sync", **FREE)
    costly = simulate("mode=sync", **FREE | {"sample": costs.Sample(actor=1e-3, cores=cores)})
    assert costly.seconds == pytest.approx(free.seconds + 16 * waits * 1e-3, rel=0.005)
    assert costly.actor_idle > free.actor_idle and closes(costly)
    slow = simulate("mode=sync", **FREE | {"sample": costs.Sample(buffer=1e-3)})
    assert slow.seconds == pytest.approx(free.seconds + 16 * 0.12, rel=0.03), "the last push waits for those before"


def test_actors_that_die_cost_time_and_no_prompt() -> None:
    words = ["scheduler.max_staleness=4", "run.steps=30", "actors.count=4", *LONG_TAIL]
    whole = simulate(*words)
    outcome = simulate(*words, failures=costs.Failures(mtbf=3.0, restart=0.5))
    assert outcome.deaths > 3 and closes(outcome) and max(outcome.staleness) <= 4
    assert outcome.report["steps"] == 30 and outcome.seconds > whole.seconds
    assert simulate(*words, failures=costs.Failures(mtbf=1e9)).seconds == whole.seconds


def test_what_a_dead_actor_had_under_way_ends_with_it() -> None:
    words = ["scheduler.max_staleness=4", "run.steps=20", "actors.count=4", *LONG_TAIL]
    late = costs.Verifier(median=0.1, sigma=0.5)
    outcome = simulate(*words, failures=costs.Failures(mtbf=2.0, restart=1.0), verifier=late)
    assert outcome.deaths > 3 and closes(outcome) and max(outcome.staleness) <= 4


def test_samples_drawn_in_blocks_are_those_of_their_keys() -> None:
    lengths = AnswerLengths(200.0, 1.0, 0.5, seed=3)
    draws = Draws(7, lengths)
    for group_id in (0, 255, 256, 100_003):
        keys, drawn, right = draws.of(group_id, 3)
        assert keys == [stream_key(7, group_id, index) for index in range(3)]
        assert lengths.drawn(5, drawn) == [lengths.of(5, key) for key in keys]
        assert right == [uniform(stream_key(key, RIGHT)) for key in keys]


@pytest.mark.parametrize("place, fanout, hops", [(0, 2, 0), (1, 2, 0), (2, 2, 1), (5, 2, 1), (6, 2, 2), (9, 0, 0)])
def test_updates_take_as_long_as_the_tree_of_relays_is_deep(place: int, fanout: int, hops: int) -> None:
    weights = costs.WeightsCost(fetch=10.0, hop=1.0)
    assert weights.seconds(place, 10, fanout) == 10.0 + hops
    relays = Relays(fanout)
    for number in range(10):
        relays.join(f"actor-{number}", "somewhere", "")
    assert len(relays.above(f"actor-{place}")) == hops, "the production tree says the same"


def test_actors_of_a_source_share_its_link() -> None:
    weights = costs.WeightsCost(size=100.0, link=10.0)
    assert weights.seconds(0, 8, 0) == weights.seconds(7, 8, 8) == 80.0 and weights.seconds(0, 1, 8) == 10.0
    assert weights.seconds(0, 8, 0, ranks=4) == 20.0, "each rank sends its part"
    assert weights.seconds(1, 6, 2, ranks=4) == 5.0 and weights.seconds(5, 6, 2, ranks=4) == 25.0


def test_the_command_writes_a_run_folder_that_is_read_as_a_real_one(tmp_path, capsys) -> None:
    run, file = tmp_path / "run", tmp_path / "found.json"
    assert main([BASE, "run.steps=6", "scheduler.max_staleness=1", "--run", str(run), "--json", str(file)]) == 0
    assert "samples_per_second" in capsys.readouterr().out
    spans = read(run)
    trains = sum(span.end - span.begin for span in spans["learner"])  # steps without a pause between are one span
    assert set(spans) == {"actor-0", "actor-1", "learner"} and trains == pytest.approx(6 * (0.2 + 128 * 3e-5), rel=1e-3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["rollout/actors"] == 2
    found = json.loads(file.read_text())
    assert results.of_run(run) == pytest.approx(found, rel=1e-6)
    assert main([BASE, "run.steps=6", "scheduler.max_staleness=1", "--against", str(run)]) == 0
    assert "+0.0%" in capsys.readouterr().out


def test_errors_say_what_to_do(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["quickstart"])
    assert "--costs" in capsys.readouterr().err
    file = tmp_path / "costs.yaml"
    file.write_text("engine: {bass: 1}\n")
    with pytest.raises(SystemExit):
        main(["quickstart", "--costs", str(file)])
    assert "bass" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([BASE, "--against", str(tmp_path)])
    assert "no folder of a run" in capsys.readouterr().err


def test_costs_of_a_file_stand_for_any_config(tmp_path) -> None:
    file = tmp_path / "costs.yaml"
    file.write_text("engine: {base: 0.01, slots: 16}\nanswers: {median: 20, most: 60}\nlearner: {base: 0.5}\n")
    found = costs.read(file)
    assert found.engine.base == 0.01 and found.learner.base == 0.5 and math.isclose(found.answers.sigma, 1.0)
    outcome = Simulation(configs.load(["quickstart", "run.steps=4", "actors.count=2"]), found).run()
    assert outcome.report["steps"] == 4 and closes(outcome)
    for overrides, slots in (["engine=sglang"], 16), (["engine.slots=8"], 8):
        assert roofline.known(configs.load(["quickstart", *overrides]), file).engine.slots == slots


def test_the_configs_own_knobs_count_with_costs_of_a_file(tmp_path) -> None:
    file = tmp_path / "costs.yaml"
    file.write_text("engine: {interruptible: false, recompute: false, kv_tokens: 900}\nlearner: {base: 0.5}\n")
    plain = roofline.known(configs.load(["quickstart"]), file).engine
    assert (plain.interruptible, plain.recompute, plain.kv_tokens) == (True, True, 900)
    told = ["engine.interruptible=false", "engine.kv_policy=keep", "engine.kv_tokens=500"]
    set_so = roofline.known(configs.load(["quickstart", *told]), file).engine
    assert (set_so.interruptible, set_so.recompute, set_so.kv_tokens) == (False, False, 500)
    server = roofline.known(configs.load(["quickstart", "engine=sglang"]), file).engine
    assert (server.interruptible, server.recompute) == (False, False), "it has no such knobs"


def test_ranks_train_whole_batches_together(tmp_path) -> None:
    """Four GPUs of 95 % per doubling; a step on one takes .5 s."""
    file = tmp_path / "costs.yaml"
    file.write_text("engine: {base: 0.0001, slots: 64}\nanswers: {median: 20, sigma: 0}\nlearner: {base: 0.5}\n")

    def rate(ranks: int) -> float:
        words = [f"learner.ranks={ranks}", "run.steps=8", "eval.prompts=0", "actors.count=2"]
        config = configs.load(["quickstart", *words])
        outcome = Simulation(config, roofline.known(config, file)).run()
        assert sum(outcome.staleness.values()) == 8 * 128
        return outcome.samples_per_second

    assert rate(1) == pytest.approx(128 / 0.5, rel=0.05)
    assert rate(4) == pytest.approx(128 / (0.5 / (4 * 0.95**2)), rel=0.05)
    file.write_text(file.read_text().replace("0.5}", "0.5, gpus: 4}"))
    assert rate(4) == pytest.approx(128 / 0.5, rel=0.05), "the run that was measured had four already"


def test_batches_of_a_set_age_are_simulated() -> None:
    outcome = simulate("inject_staleness=2", "run.steps=8", "eval.prompts=0", "policy=in_order")
    assert max(outcome.staleness) == 2 and closes(outcome)


def test_a_simulated_timeline_has_all_work_of_a_real_one(tmp_path) -> None:
    words = ["scheduler.max_staleness=4", "eval.every=4", "eval.prompts=64"]
    config = configs.load([BASE, *words])
    cost = costs.of_timed(config)
    cost.learner.publish = 0.01
    outcome = Simulation(config, cost, tmp_path).run()
    spans = read(tmp_path)
    assert {span.name for span in spans["learner"]} == {"train", "publish"}
    assert {span.name for span in spans["actor-0"]} == {"generate", "evaluate", "update"}
    generates = sum(span.end - span.begin for span in spans["actor-0"] if span.name == "generate")
    assert generates / outcome.seconds == pytest.approx(1.0 - outcome.actor_idle, abs=0.1)


def test_what_was_under_way_at_a_death_is_in_the_timeline(tmp_path) -> None:
    config = configs.load([BASE, "scheduler.max_staleness=4", "run.steps=4"])
    simulation = Simulation(config, costs.of_timed(config), tmp_path)
    actor = simulation.actors[0]
    simulation.timeline.at(0.5, actor.die)
    simulation._begin()
    simulation.timeline.run(200)
    last = [span for span in read(tmp_path)["actor-0"] if span.name == "generate"][-1]
    assert last.end == pytest.approx(0.5) and last.begin < 0.45


def test_runs_that_are_not_simulated_are_refused(capsys) -> None:
    for words, why in (
        ([BASE, "replay=runs/a"], "replay=runs/a: a replay has no actors"),
        ([BASE, "resume=auto"], "resume=auto: a simulated run begins with its first train step"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert why in capsys.readouterr().err
    alone = configs.load(["quickstart", "algorithm=sft", "run.target_reward=null"])
    with pytest.raises(configs.ConfigError, match="loss=sft: the learner trains alone"):
        Simulation(alone, costs.Costs())


def test_an_engine_on_several_gpus(tmp_path, capsys) -> None:
    lengths, found = tmp_path / "lengths.yaml", list[float]()
    lengths.write_text("answers: {median: 20, most: 200, prompt: 20}\n")
    for each in ("1", "8"):
        said = tmp_path / f"{each}.json"
        hardware = ["--hardware", "H100", "--gpus-per-actor", each, "--costs", str(lengths), "--json", str(said)]
        assert main(["quickstart", "run.steps=6", *hardware]) == 0
        found.append(json.loads(said.read_text())["seconds"])
    assert found[1] < found[0], "a tiny model gains little, but something"
    with pytest.raises(SystemExit):
        main(["quickstart", "--costs", str(lengths), "--gpus-per-actor", "2"])
    assert "Set --hardware, too" in capsys.readouterr().err


def test_a_run_of_no_steps_makes_none(tmp_path) -> None:
    run = tmp_path / "run"
    assert main([BASE, "run.steps=0", "--run", str(run)]) == 0
    found = json.loads((run / "summary.json").read_text())
    assert (found["steps"], found["seconds"], found["stopped_because"]) == (0, 0.0, "0 steps are done")
    assert found["ledger"]["admitted"] == 0


def test_a_run_says_why_it_ends() -> None:
    assert simulate("run.steps=3").reason == "3 steps are done"
    early = simulate("run.steps=16", "run.max_seconds=1")
    assert early.reason == "1.0 seconds have passed" and early.report["steps"] < 16


def test_a_run_that_is_told_to_end_leaves_no_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Simulation, "run", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        main([BASE, "run.steps=2", "--run", str(tmp_path / "run")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stuck("no event is left")])
def test_what_fails_or_is_interrupted_leaves_no_folder(error, tmp_path, monkeypatch, capsys) -> None:
    def fail(self: Simulation) -> Outcome:
        assert self.folder and self.folder.is_dir()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "run", fail)
        words = [BASE, "run.steps=2", "--run", str(tmp_path / "run")]
        if error is KeyboardInterrupt:
            assert main(words) == 130
            assert capsys.readouterr().err == "ended by SIGINT; nothing is kept\n"
        else:
            with pytest.raises(SystemExit, match="2"):
                main(words)
    assert not list(tmp_path.iterdir())
    before = signal.getsignal(signal.SIGTERM)
    assert (
        main(words) == 0
        and signal.getsignal(signal.SIGTERM) == before
        and [each.name for each in tmp_path.iterdir()] == ["run"]
    )
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "is there already" in capsys.readouterr().err
