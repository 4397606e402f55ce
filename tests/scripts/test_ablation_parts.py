"""The parts of an ablation without runs: refusals, planned runs, their devices, measurements, what tuning picks."""

import csv
import json
import os
import re
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from areal_like.config import run_config as configs
from areal_like.config.layers import CONFIGS
from areal_like.config.placement import VISIBLE
from areal_like.config.run_config import Config, ConfigError
from scripts import ablate
from scripts.ablation import results, runs, slurm, study
from scripts.ablation.measures import Curve, Outcome, read_measure
from scripts.ablation.results import Result, gather
from scripts.ablation.runs import Folder, wanted
from scripts.ablation.study import MAIN, Run, Study
from scripts.starting.earlier_runs import lock
from scripts.starting.gpus import Gpus
from tests.folders import write_folder

SHIPPED = sorted((CONFIGS / "ablation").glob("*.yaml"))
STUDY = {
    "config": "copy4",
    "set": {"run.steps": 7},
    "grid": {"loss": ["ppo", "dg"], "mode": {"sync": {"mode": "sync"}, "old": {"scheduler.max_staleness": 4}}},
    "seeds": [0, 1],
    "tune": {"grid": {"learner.lr": [0.001, 0.01]}, "per": ["loss"], "at": {"mode": "old"}, "seeds": [9]},
    "measure": {"reward": {"summary": "reward_after"}},
}
ABSENT = "absent"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests' studies have one name, so that a config which several have is made once."""
    monkeypatch.chdir(tmp_path)


def load(folder: Path, **changes) -> Study:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (STUDY | changes).items() if v != ABSENT}, sort_keys=False))
    return study.load(path)


def test_a_study_comes_to_every_point_and_seed_with_its_own_config(tmp_path: Path) -> None:
    found = load(tmp_path)
    runs = found.main_runs({("ppo",): {"learner.lr": "0.01"}, ("dg",): {"learner.lr": "0.001"}})
    assert [(*run.labels.values(), run.seed) for run in runs] == [
        (loss, mode, seed) for seed in (0, 1) for loss in ("ppo", "dg") for mode in ("sync", "old")
    ], "the points take turns"
    assert [(run.config.loss["name"], run.config.learner["lr"]) for run in runs[:4:2]] == [("ppo", 0.01), ("dg", 0.001)]
    assert [run.config.mode for run in runs[:2]] == ["sync", "async"]
    assert runs[1].config.scheduler["max_staleness"] == 4 and runs[1].config.run.steps == 7
    assert len({run.name for run in runs}) == 8


def test_tuning_goes_over_its_grid_for_each_value_that_it_is_made_for(tmp_path: Path) -> None:
    runs = load(tmp_path).tuning_runs()
    assert [(run.labels["loss"], run.labels["mode"], run.config.learner["lr"], run.seed) for run in runs] == [
        (loss, "old", lr, 9) for loss in ("ppo", "dg") for lr in (0.001, 0.01)
    ]


def test_a_run_is_started_with_its_config_under_a_name_with_its_hash(tmp_path: Path) -> None:
    run, folder = load(tmp_path).tuning_runs()[1], Folder(tmp_path / "out")
    folder.prepare(run)
    made = configs.load([str(folder.config(run))])
    assert made.run.seed == 9 and made.resume == "auto" and made.run.name == run.name
    for key in ("loss", "learner", "scheduler", "mode", "inject_staleness"):
        assert configs.select(made, key) == configs.select(run.config, key)
    others = [
        load(tmp_path, **changes).tuning_runs()[1].name for changes in ({"seeds": [5]}, {"set": {"run.steps": 8}})
    ]
    assert others[0] == run.name != others[1] and not {"=", "/"} & set(run.name)


@pytest.mark.parametrize("journal", ["memory", "off"])
def test_an_unfinished_folder_stays_if_a_run_can_continue_from_it_or_is_alive(tmp_path: Path, journal: str) -> None:
    run = load(tmp_path, set={"run.steps": 7, "buffer.journal": journal}).tuning_runs()[0]
    folder = Folder(tmp_path / "out")
    folder.run(run).mkdir(parents=True)
    folder.prepare(run)
    assert not folder.run(run).exists(), "it was killed before it had a config"
    folder.run(run).mkdir(parents=True)
    (folder.run(run) / "config.yaml").touch()
    with lock(folder.run(run)):
        folder.prepare(run)
        assert folder.run(run).exists()
    folder.prepare(run)
    assert folder.run(run).exists() == (journal == "memory")


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each sbatch, which submits nothing."""
    calls: list[list[str]] = []
    monkeypatch.setattr(slurm, "sbatch", lambda arguments, environment=None: calls.append(arguments) or "1")
    return calls


def call(folder: Path, *arguments: str) -> int:
    return ablate.main([str(folder / "study.yaml"), "--out", str(folder / "out"), *arguments])


def finish(folder: Path) -> None:
    """As a run that leaves a model."""
    (folder / "checkpoints" / "final").mkdir(parents=True)
    (folder / "checkpoints" / "final" / "config.json").write_text("{}")
    (folder / "summary.json").write_text('{"steps": 7, "evaluations": []}')


def test_tasks_that_wait_keep_their_list(tmp_path: Path, submitted: list[list[str]]) -> None:
    """A task looks up its runs when it starts, by their places in the list."""
    load(tmp_path, tune=ABSENT)
    assert call(tmp_path, "--slurm") == 0
    _, first, tasks = submitted[0]
    before = Path(first).read_text()
    assert len(before.splitlines()) == int(tasks) == 8
    for line in before.splitlines()[:3]:
        finish(Path(line.split("\t")[1]))
    assert call(tmp_path, "--slurm", "--dry-run") == 0
    assert call(tmp_path, "--slurm") == 0
    _, second, tasks = submitted[2]
    assert Path(first).read_text() == before
    assert Path(second).read_text().splitlines() == before.splitlines()[3:] and tasks == "5"


@pytest.mark.parametrize("arguments", [["--slurm"], [], ["--only", "report"], ["--slurm", "--only", "tune"]])
def test_a_dry_run_writes_nothing(tmp_path: Path, submitted: list[list[str]], arguments: list[str]) -> None:
    found = load(tmp_path, set={"run.steps": 7, "buffer.journal": "off"})
    unfinished = Folder(tmp_path / "out").run(found.tuning_runs()[0])
    unfinished.mkdir(parents=True)
    (unfinished / "config.yaml").touch()
    finish(Folder(tmp_path / "out").run(found.tuning_runs()[1]))
    before = sorted(tmp_path.rglob("*"))
    assert call(tmp_path, *arguments, "--dry-run") == 0
    assert sorted(tmp_path.rglob("*")) == before and not submitted


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"grid": {"loss": ["ppo", "pppo"]}, "tune": ABSENT}, "loss=pppo"),
        ({"grid": {"mode": {"a": {"scheduler.max_staleness": "x"}}}}, "tune"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"measure": {"reward": {"sumary": "x"}}}, "measure.reward"),
        ({"curve": {"x": "hours"}}, "curve"),
        ({"set": {"run.stepz": 3}}, "run.stepz"),
        ({"grid": {"loss": "ppo"}}, "grid.loss"),
        ({"tune": STUDY["tune"] | {"by": "speed"}}, "tune.by"),
        ({"tune": STUDY["tune"] | {"grid": {"learner.lr": [0.1, "fast"]}}}, "learner.lr"),
        ({"tune": STUDY["tune"] | {"grid": {"scheduler.max_staleness": [1, 2]}}}, "scheduler.max_staleness"),
        ({"grid": {"run.seed": [3, 4]}, "tune": ABSENT}, "run.seed"),
        ({"set": {"run.name": "mine"}}, "run.name"),
        ({"config": "copy44"}, "config"),
    ],
)
def test_a_wrong_study_is_refused_with_its_key(tmp_path: Path, change: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        load(tmp_path, **change)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_study_loads_and_tunes(path: Path, tmp_path: Path) -> None:
    """A study that measures only seconds has nothing to tune: no learning rate changes them."""
    if "smollm2" in path.read_text():  # a model of that name
        file = Path(write_folder(tmp_path / "models" / "smollm2-135m-instruct", "llama")) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 8192}))
    found = study.load(path)
    if "reward" in found.measure:
        assert len(found.seeds) >= 5 and found.tune and not set(found.tune.seeds) & set(found.seeds)
        assert len(found.tuning_runs()) >= 3 * len(found.candidates())
    if any(m.key == "reward_after" for m in found.measure.values()):
        targets = {run.config.run.target_reward for run in found.tuning_runs()}
        targets |= {config.run.target_reward for config in found.main_configs()}
        assert targets == {None}, "rewards at the end are at equal samples, or at equal time"
    else:
        assert "seconds" in found.measure and len(found.seeds) >= 3


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    """4 train steps of 16 groups × 8 samples, weights published at every second step."""
    evaluations = [
        {"reward": r, "version": v, "seconds": s} for r, v, s in ((0.1, 0, 0.5), (0.6, 1, 4.0), (0.5, 2, 7.0))
    ]
    summary = {"reward_after": 0.5, "steps": 4, "seconds_to_target": None, "evaluations": evaluations}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": i + 1, "seconds": 2.0 * i, "x": x} for i, x in enumerate((4.0, None, 1.0, 2.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Outcome(tmp_path, configs.load(["copy4", "weight_sync_interval=2"]))


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        ({"summary": "reward_after"}, 0.5),
        ({"summary": "seconds_to_target"}, None),
        ({"steps_to": 0.55}, 2.0),
        ({"samples_to": 0.55}, 2.0 * 128),
        ({"at_steps": 3}, 0.6),
        ({"at_samples": 2 * 128}, 0.6),
        ({"at_seconds": 3.9}, 0.1),
        ({"metric": "x"}, 2.5),
    ],
)
def test_a_measure_of_a_finished_run(outcome: Outcome, spec: dict, number: float | None) -> None:
    assert outcome.measure(read_measure("m", spec)) == number


def test_curves_by_steps_samples_and_seconds(outcome: Outcome) -> None:
    assert outcome.curve(Curve(x="steps")) == ([0.0, 2.0, 4.0], [0.1, 0.6, 0.5])
    assert outcome.curve(Curve())[0] == [0.0, 256.0, 512.0]
    assert outcome.curve(Curve("x", "seconds")) == ([0.0, 4.0, 6.0], [4.0, 1.0, 2.5])
    outcome.summary["evaluations"] = []
    assert outcome.measure(read_measure("m", {"steps_to": 0.5})) is None and outcome.curve(Curve()) == ([], [])


def tuned(found: Study, numbers: dict[tuple[str, str], float | None]) -> list[Result]:
    return [
        Result(run, None, {"reward": numbers[run.labels["loss"], run.tuned["learner.lr"]]})
        for run in found.tuning_runs()
    ]


def test_the_best_candidate_is_picked_for_each_loss(tmp_path: Path) -> None:
    numbers = {("ppo", "0.001"): 0.2, ("ppo", "0.01"): 0.3, ("dg", "0.001"): 0.9, ("dg", "0.01"): None}
    choices = results.choose(load(tmp_path), tuned(load(tmp_path), numbers))
    assert {choice.key: choice.picked["learner.lr"] for choice in choices} == {("ppo",): "0.01", ("dg",): "0.001"}
    lower = load(tmp_path, measure={"reward": {"summary": "reward_after", "better": "lower"}})
    assert results.choose(lower, tuned(lower, numbers))[0].picked == {"learner.lr": "0.001"}
    with pytest.raises(ValueError, match="tuning of dg"):
        results.choose(load(tmp_path), tuned(load(tmp_path), numbers | {("dg", "0.001"): None}))


def test_results_have_every_run_what_was_picked_and_what_is_missing(tmp_path: Path) -> None:
    found = load(tmp_path, measure={"reward": {"summary": "reward_after"}, "misspelt": {"summary": "rewrad"}})
    picked = {("ppo",): {"learner.lr": "0.01"}, ("dg",): {"learner.lr": "0.001"}}
    folder = Folder(tmp_path / "out")
    runs = found.main_runs(picked)
    for number, run in enumerate(runs[:-1]):
        folder.run(run).mkdir(parents=True)
        evaluations = [{"reward": 0.1 * v, "version": v, "seconds": 1.0 * v} for v in range(3)]
        summary = {"reward_after": float(number), "steps": 7, "evaluations": evaluations}
        (folder.run(run) / "summary.json").write_text(json.dumps(summary))
    text = results.write(found, folder.path, gather(found, runs, folder), [], "the command")
    rows = list(csv.DictReader((folder.path / "results.csv").open()))
    assert [(r["loss"], r["mode"], r["tuned learner.lr"], r["seed"], r["reward"]) for r in rows[3:5]] == [
        ("dg", "old", "0.001", "0", "3.0"),
        ("ppo", "sync", "0.01", "1", "4.0"),
    ]
    assert rows[-1]["reward"] == "" and len(rows) == 8
    assert "7 of 8 runs are finished" in text and "a number for 'misspelt' (summary: rewrad)" in text
    table = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| dg ")]
    assert table[0][1:5] == ["dg", "sync", "0.001", "4.00 [2.00, 6.00]"] and table[1][4] == "3.00 (1 of 2)"
    assert (folder.path / "curves.png").read_bytes()[:4] == b"\x89PNG"


ON_GPUS = ("learner.device=cuda", "learner.ranks=2", "engine.device=cuda", "actors.count=1")
SHARED = ("learner.device=cuda", "engine.device=cuda", "actors.count=1")
ON_ONE = (*SHARED, "placement={learner: [0], actors: [0], share: true}")


def config_of(*overrides: str) -> Config:
    return configs.load(["quickstart", *overrides])


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (("engine.device=cpu",), 0),
        (ON_GPUS, 3),
        (ON_ONE, 1),
        ((*SHARED, "placement={learner: [0], actors: [2]}"), 3),
        (("engine=sglang", "engine.tp_size=2", "engine.replicas=2", "actors.count=1"), 4),
        ((*SHARED, "launcher=slurm", "buffer.transport=tcp"), 0),
    ],
    ids=["cpu", "auto", "shared", "named", "servers", "slurm"],
)
def test_a_run_needs_the_devices_of_its_placement(overrides: tuple[str, ...], count: int) -> None:
    assert wanted(config_of(*overrides)) == count


def test_a_run_that_needs_more_devices_than_there_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "gpus_here", lambda: Gpus("stated", 1))
    made = [Run(MAIN, {}, {}, 0, config_of(*ON_GPUS))]
    with pytest.raises(ConfigError, match="needs 3 devices of 1"):
        runs.run_all(made, Folder(tmp_path), 2, lambda: None)


class Looks:
    """Stands in for the process of a run, which ends when it has been looked at three times. `beside`: those that run
    at its start."""

    made: ClassVar[list["Looks"]] = []

    def __init__(self, module: str, arguments: list[str], variables: dict[str, str], log: Path):
        self.seen, self.left, self.beside = variables.get(VISIBLE), 3, [each for each in self.made if each.left]
        self.made.append(self)

    def poll(self) -> int | None:
        self.left = max(0, self.left - 1)
        return None if self.left else 0


@pytest.mark.parametrize("inherited", [None, "4,5,6,7"])
def test_runs_at_a_time_see_devices_of_their_own(
    inherited: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wide one waits until enough are free; later ones get the devices that others have given back."""
    monkeypatch.delenv(VISIBLE, raising=False)
    if inherited:
        monkeypatch.setenv(VISIBLE, inherited)
    monkeypatch.setattr(runs, "gpus_here", lambda: Gpus("stated", 4))
    wide, one, none = config_of(*ON_GPUS), config_of(*ON_ONE), config_of("engine.device=cpu")
    configs = [one, one, wide, one, none]
    monkeypatch.setattr(runs, "Forked", Looks)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)
    Looks.made.clear()
    made = [Run(MAIN, {}, {}, seed, config) for seed, config in enumerate(configs)]
    assert runs.run_all(made, Folder(tmp_path), 3, lambda: None) == []
    *on_gpus, last = Looks.made
    assert last.seen == inherited == os.environ.get(VISIBLE)
    seen = {each: set(each.seen.split(",")) for each in on_gpus}
    assert [len(devices) for devices in seen.values()] == [1, 1, 3, 1]
    assert set.union(*seen.values()) <= set((inherited or "0,1,2,3").split(","))
    assert not any(seen[each] & seen[other] for each in on_gpus for other in each.beside)
    assert len(on_gpus[2].beside) < 2, "three devices are free only when one of the first two has ended"
