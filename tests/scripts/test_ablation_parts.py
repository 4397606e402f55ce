"""The parts of an ablation without runs: refusals, planned runs, measurements, what tuning picks, written files."""

import csv
import json
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from areal_like.config import run_config as configs
from areal_like.config.layers import CONFIGS
from areal_like.config.registry import build
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from scripts import ablate
from scripts import eval as evaluation
from scripts.ablation import final, overall, results, slurm, study
from scripts.ablation.measures import Outcome, read_curve, read_measure
from scripts.ablation.pictures import plots
from scripts.ablation.points import Result, gather, read
from scripts.ablation.runs import Folder, Width, run_all
from scripts.ablation.study import Run, Study
from scripts.plotting.plot import Plot
from scripts.starting.earlier_runs import lock
from scripts.train import Interrupted
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
SUPERVISED = {"config": "base", "grid": {"learner.lr": [0.001, 0.002]}, "tune": ABSENT}
SUPERVISED["set"] = {"algorithm": "sft", "task": "reverse", "model": "tiny", "groups_per_batch": 8, "run.steps": 4}


def load(folder: Path, **changes) -> Study:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (STUDY | changes).items() if v != ABSENT}, sort_keys=False))
    return study.load(path)


# The study


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


def test_a_name_tells_configs_apart_and_fits_a_command_line(tmp_path: Path) -> None:
    def first(**changes) -> Run:
        return load(tmp_path, **changes).tuning_runs()[0]

    assert first().name == first(seeds=[5]).name != first(set={"run.steps": 8}).name
    assert "=" not in first().name and "/" not in first().name


def test_what_a_run_is_started_with_is_its_config(tmp_path: Path) -> None:
    run = load(tmp_path).tuning_runs()[1]
    folder = Folder(tmp_path / "out")
    folder.prepare(run)
    made = configs.load([str(folder.config(run))])
    assert made.run.seed == 9 and made.resume == "auto" and made.run.name == run.name
    for key in ("loss", "learner", "scheduler", "mode", "inject_staleness"):
        assert configs.select(made, key) == configs.select(run.config, key)


def test_an_unfinished_folder_stays_if_a_run_can_go_on_from_it(tmp_path: Path) -> None:
    run, folder = load(tmp_path).tuning_runs()[0], Folder(tmp_path / "out")
    folder.run(run).mkdir(parents=True)
    folder.prepare(run)
    assert not folder.run(run).exists(), "it was killed before it had a config"
    folder.run(run).mkdir(parents=True)
    (folder.run(run) / "config.yaml").touch()
    folder.prepare(run)
    assert folder.run(run).exists()


def test_the_folder_of_a_run_that_is_going_on_stays(tmp_path: Path) -> None:
    """Also without a journal, where an unfinished folder is of no use otherwise."""
    run = load(tmp_path, set={"run.steps": 7, "buffer.journal": "off"}).tuning_runs()[0]
    folder = Folder(tmp_path / "out")
    folder.run(run).mkdir(parents=True)
    (folder.run(run) / "config.yaml").touch()
    with lock(folder.run(run)):
        folder.prepare(run)
        assert (folder.run(run) / "config.yaml").exists()
    folder.prepare(run)
    assert not folder.run(run).exists()


class Dies(Folder):
    """Its runs say this and fail."""

    said = ""

    def command(self, run: Run) -> list[str]:
        return [sys.executable, "-c", f"import sys; print({self.said!r}); sys.exit(1)"]


def test_a_failed_run_is_told_by_the_words_of_its_last_attempt(tmp_path: Path) -> None:
    run, folder, told = load(tmp_path).tuning_runs()[0], Dies(tmp_path / "out"), list[str]()
    for folder.said, words in (
        ("error: no space left\nended", "FAILED: no space left (its log: "),
        ("resuming\nended by SIGTERM", "FAILED: ended by SIGTERM (its log: "),
    ):
        assert run_all([run], folder, Width(1), lambda: None, told.append) == [run]
        assert words in told[-1]


# Through Slurm


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


@pytest.mark.parametrize("more", [[], ["--only", "main"]])
def test_final_models_of_the_tuning_are_asked_before_the_main_runs(
    tmp_path: Path,
    submitted: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    """The job behind the tuning's array is the first one that can."""
    found = load(tmp_path, measure={"final": {"final": 7}})
    for run in found.tuning_runs():
        finish(Folder(tmp_path / "out").run(run))

    def ask(folder: Path, config: Config, prompts: int) -> None:
        (folder / f"final-{prompts}.json").write_text(json.dumps({"reward": config.learner["lr"]}))

    monkeypatch.setattr(final, "ask", ask)
    assert call(tmp_path, "--slurm", "--dry-run", *more) == 2
    assert "4 final models of the tuning: a dry run asks none" in capsys.readouterr().err
    assert call(tmp_path, "--slurm", *more) == 0
    lines = Path(submitted[0][1]).read_text().splitlines()
    assert [configs.load([line.split("\t")[0]]).learner["lr"] for line in lines] == [0.01] * 8
    assert call(tmp_path, "--slurm", "--dry-run", *more) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sedes": [1]}, "unknown key 'sedes'.*'seeds'"),
        ({"grid": {"loss": ["ppo", "pppo"]}, "tune": ABSENT}, "loss=pppo.*no loss 'pppo'"),
        ({"grid": {"loss.clipp": [0.1]}, "set": {"loss": "ppo"}, "tune": ABSENT}, "loss.clipp=0.1.*clipp"),
        ({"grid": {"mode": {"a": {"scheduler.max_staleness": "x"}}}}, "tune: 'loss' is no factor"),
        ({"seeds": [1, 1]}, "a seed appears twice"),
        ({"seeds": [0, -1]}, "seeds: -1 must be at least 0"),
        ({"seeds": None}, "seeds: expected a list"),
        ({"measure": {"reward": {"sumary": "x"}}}, "measure.reward: expected one of summary"),
        ({"measure": {"x": {"metric": "loss", "take": "median"}}}, "take is mean"),
        ({"curve": {"x": "hours"}}, "curve: expected y"),
        ({"grid": {"loss": ["ppo", "pppo"]}, "tune": ABSENT, "curve": {"x": "steps"}}, "loss=pppo.*no loss 'pppo'"),
        ({"set": {"run.stepz": 3}}, r"unknown key 'run.stepz'.*\[from set in .*study.yaml\]"),
        ({"grid": {"run.stepz": [3, 4]}, "tune": ABSENT}, r"'run.stepz'.*\[from grid in .*study.yaml\]"),
        ({"tune": STUDY["tune"] | {"grid": {"learner.lrr": [1]}}}, r"'lrr'.*\[from tune.grid in .*study.yaml\]"),
        (SUPERVISED, "measure.reward: supervised runs have no rewards: measure {summary: loss_after"),
        (SUPERVISED | {"measure": {"x": {"samples_to": 0.9}}}, "measure.x: supervised runs"),
        (SUPERVISED | {"measure": {"x": {"summary": "loss_after"}}, "curve": {"y": "eval/reward"}}, "curve.y: superv"),
        ({"names": {"los": "loss"}}, "names: 'los' is no factor of the grid"),
        ({"grid": {"loss": "ppo"}}, "grid.loss: expected a list"),
        ({"tune": STUDY["tune"] | {"by": "speed"}}, "tune.by: 'speed' is not measured"),
        ({"tune": STUDY["tune"] | {"grid": {"learner.lr": [0.1, "fast"]}}}, "lr=fast.*learner.lr: expected float"),
        ({"tune": STUDY["tune"] | {"at": {"mode": "older"}}}, "mode has no value 'older'"),
        ({"tune": STUDY["tune"] | {"grid": {"scheduler.max_staleness": [1, 2]}}}, "is set by 'mode' already"),
        ({"grid": {"run.seed": [3, 4]}, "tune": ABSENT}, "run.seed is set by the ablation"),
        ({"set": {"run.name": "mine"}}, "set: run.name is set by the ablation"),
        ({"config": "copy44"}, "no config 'copy44'"),
        ({"set": {"task": {"name": "jsonl", "path": "none", "tokenizer": "none"}}}, "loss=ppo, mode=old"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_starts(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **change)


def test_a_study_is_a_file_or_the_name_of_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert study.named("staleness") == CONFIGS / "ablation" / "staleness.yaml"
    Path("staleness").touch()
    assert study.named("staleness") == Path("staleness"), "a file of the user's own comes first"
    with pytest.raises(ConfigError, match=r"no study 'ablation/stalenes.yaml'. Did you mean 'staleness'\? Give a yaml"):
        study.named("ablation/stalenes.yaml")


def test_a_folder_that_cannot_be_written_is_refused_with_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"/file cannot be written \(File exists\); name another folder with --out"):
        Folder(tmp_path / "file").make()
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=r"written \(it is read-only"), Folder(tmp_path).locked():
        pass


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_study_loads_and_tunes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that measures only seconds has nothing to tune: no learning rate changes them."""
    if "smollm2" in path.read_text():  # a model of that name, as `scripts.pretrained` makes it
        monkeypatch.chdir(tmp_path)
        file = Path(write_folder(tmp_path / "models" / "smollm2-135m-instruct", "llama")) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 8192}))
    found = study.load(path)
    if "reward" in found.measures:
        assert len(found.seeds) >= 5 and found.tune and not set(found.tune.seeds) & set(found.seeds)
        assert len(found.tuning_runs()) >= 3 * len(found.candidates())
    if any(m.source == "final" or m.key == "reward_after" for m in found.measures.values()):
        targets = {run.config.run.target_reward for run in found.tuning_runs()}
        targets |= {config.run.target_reward for config in found.main_configs()}
        assert targets == {None}, "rewards at the end are at equal samples, or at equal time"
    else:
        assert "seconds" in found.measures and len(found.seeds) >= 3


# Measures


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


def test_a_key_that_a_run_has_nowhere_is_told_of_with_one_that_is_near(outcome: Outcome) -> None:
    specs = {"a": {"summary": "reward_aftr"}, "b": {"metric": "xx"}, "c": {"summary": "seconds_to_target"}}
    specs |= {"d": {"metric": "x"}, "e": {"samples_to": 0.9}, "f": {"final": 7}}
    found = outcome.unknown([read_measure(*each) for each in specs.items()], read_curve({"y": "y", "x": "steps"}))
    assert list(found) == ["measure.a", "measure.b", "curve.y"]
    assert found["measure.a"].endswith("/summary.json has no 'reward_aftr'. Did you mean 'reward_after'?")
    assert found["measure.b"].endswith("/metrics.jsonl has no 'xx'. Did you mean 'x'?")
    assert not outcome.unknown([], read_curve({}))


def test_it_is_told_of_once_after_the_first_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load(tmp_path, measure={"reward": {"summary": "stepz"}})
    ablation = ablate.Ablation(ablate.parse([str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]), [])
    for run in found.tuning_runs()[:2]:
        finish(Folder(tmp_path / "out").run(run))
    for run in found.tuning_runs()[:3]:  # the last has left no summary
        ablation.look_for_measures(run)
    assert capsys.readouterr().out.count("note: measure.reward: ") == 1


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        ({"summary": "reward_after"}, 0.5),
        ({"summary": "seconds_to_target"}, None),
        ({"summary": "no such"}, None),
        ({"steps_to": 0.55}, 2.0),
        ({"samples_to": 0.55}, 2.0 * 128),
        ({"seconds_to": 0.55}, 4.0),
        ({"seconds_to": 0.7}, None),
        ({"at_steps": 3}, 0.6),
        ({"at_samples": 2 * 128}, 0.6),
        ({"at_seconds": 3.9}, 0.1),
        ({"at_seconds": 0.1}, None),
        ({"metric": "x"}, 2.5),
        ({"metric": "x", "take": "max"}, 4.0),
        ({"metric": "x", "take": "min"}, 1.0),
        ({"metric": "x", "take": "last"}, 2.5),
        ({"metric": "y"}, None),
    ],
)
def test_a_measure_of_a_finished_run(outcome: Outcome, spec: dict, number: float | None) -> None:
    assert outcome.measure(read_measure("m", spec)) == number


def test_a_final_model_is_asked_anew_and_once(outcome: Outcome) -> None:
    measure = read_measure("m", {"final": 12})
    assert not final.can_be_asked(outcome.folder) and outcome.measure(measure) is None, "the run has left no model"
    config = outcome.config
    configs.save(config, outcome.folder / "config.yaml")
    task = build("task", config.task, config.run.seed)
    build("model", config.model, 0, task.vocab_size).save_pretrained(outcome.folder / "checkpoints" / "final")
    assert final.can_be_asked(outcome.folder) and outcome.measure(measure) is None, "nobody has asked it"
    for prompts in (12, 5):
        final.ask(outcome.folder, config, prompts)
    found, other = (outcome.measure(read_measure("m", {"final": prompts})) for prompts in (12, 5))
    answers = {part: round(reward * 4 * part, 6) for part, reward in ((12, found), (5, other))}
    assert all(whole == int(whole) and 0 <= whole < 4 * part for part, whole in answers.items()), "shares of 4 digits"
    kept = outcome.folder / "final-12.json"
    assert json.loads(kept.read_text())["reward"] == found
    for broken in ("", "{}", "[1]"):
        kept.write_text(broken)
        assert outcome.measure(measure) is None, "it is asked again"


def test_a_final_model_is_asked_as_the_run_asks(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    made = SimpleNamespace(figures={"a": {"reward": [0.5]}, "b": {"reward": [1.0]}})
    monkeypatch.setattr(evaluation, "both", lambda args: (heard.append(args), (made, None))[1])
    for overrides in ({"eval.temperature": 0.0}, {"eval.temperature": 0.7, "sampling.max_new_tokens": 5}):
        config = outcome.config
        for key, value in overrides.items():
            config = configs.replace(config, key, value)
        final.ask(outcome.folder, config, 3)
    assert [(args.prompts, args.temperature, args.max_tokens, args.threads) for args in heard] == [
        (3, 0.0, None, 1),
        (3, 0.7, 5, 1),
    ]
    assert final.kept(outcome.folder, 3) == 0.75, "the mean of its sets"


def test_a_final_model_that_can_not_be_asked_leaves_the_other_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = STUDY | {"measure": {"reward": {"final": 7}, "steps": {"summary": "steps"}}, "tune": ABSENT}
    load(tmp_path, **changes)
    ablation = ablate.Ablation(ablate.parse([str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]), [])
    runs, asked = ablation.main_runs(), []
    for run in runs[:3]:
        model = ablation.folder.run(run) / "checkpoints" / "final"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (ablation.folder.run(run) / "summary.json").write_text('{"steps": 7, "evaluations": []}')

    def ask(folder: Path, config: object, prompts: int) -> None:
        asked.append(folder.name)
        if folder.name == runs[1].name:
            raise UserError("no verifier")
        (folder / f"final-{prompts}.json").write_text('{"reward": 0.5}')

    monkeypatch.setattr(final, "ask", ask)
    ablation.ask_all()
    ablation.report()
    assert asked == [run.name for run in runs[:3]]
    assert "can't be asked: no verifier" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert [row["reward"] for row in rows] == ["0.5", "", "0.5", *[""] * 5] and rows[1]["steps"] == "7.0"
    with pytest.raises(Interrupted):
        ablation.ask(runs, interrupt)


def interrupt() -> None:
    raise Interrupted("SIGINT")


@pytest.mark.parametrize("prompts", [0, 2.5, "all"])
def test_a_final_model_is_asked_a_number_of_prompts(prompts: object) -> None:
    with pytest.raises(ConfigError, match=r"measure\.m\.final: expected a number of prompts"):
        read_measure("m", {"final": prompts})


def test_curves_by_steps_samples_and_seconds(outcome: Outcome) -> None:
    assert outcome.curve(read_curve({"x": "steps"})) == ([0.0, 2.0, 4.0], [0.1, 0.6, 0.5])
    assert outcome.curve(read_curve({}))[0] == [0.0, 256.0, 512.0]
    assert outcome.curve(read_curve({"y": "x", "x": "seconds"})) == ([0.0, 4.0, 6.0], [4.0, 1.0, 2.5])


def test_a_supervised_study_draws_its_held_out_losses(tmp_path: Path) -> None:
    found = load(tmp_path, **SUPERVISED, measure={"loss": {"summary": "loss_after", "better": "lower"}})
    folder, evaluations = Folder(tmp_path / "out"), [{"version": v, "seconds": v, "loss": 2.0 - v} for v in (0, 1)]
    for run in found.main_runs({}):
        folder.run(run).mkdir(parents=True)
        summary = {"steps": 1, "loss_after": 1.0, "evaluations": evaluations}
        (folder.run(run) / "summary.json").write_text(json.dumps(summary))
    made = gather(found, found.main_runs({}), folder)
    assert [result.numbers for result in made] == [{"loss": 1.0}] * 4
    assert made[0].outcome and made[0].outcome.curve(found.curve) == ([0.0, 8.0], [2.0, 1.0]), "a sample for each group"
    assert plots(found, made)["curves.png"].y == "held-out loss, in nats"
    assert found.curve.x == "samples" and load(tmp_path).curve.y == "eval/reward"


@pytest.mark.parametrize("spec", [{"steps_to": 0.5}, {"at_steps": 2}])
def test_a_supervised_run_beside_others_has_no_number_of_rewards(outcome: Outcome, spec: dict) -> None:
    outcome.summary["evaluations"] = [{"version": 0, "seconds": 0.1, "loss": 2.0}]
    assert outcome.measure(read_measure("m", spec)) is None
    assert outcome.curve(read_curve({})) == ([], [])


# Tuning and what is written


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
    with pytest.raises(ValueError, match="tuning of dg: no run has a number for 'reward'"):
        results.choose(load(tmp_path), tuned(load(tmp_path), numbers | {("dg", "0.001"): None}))


def test_a_candidate_that_lacks_a_seed_comes_behind_a_complete_one(tmp_path: Path) -> None:
    found = load(tmp_path, tune=STUDY["tune"] | {"seeds": [8, 9]})
    numbers = {("0.001", 8): 0.2, ("0.001", 9): 0.2, ("0.01", 8): 0.9, ("0.01", 9): None}
    given = [Result(r, None, {"reward": numbers[r.tuned["learner.lr"], r.seed]}) for r in found.tuning_runs()]
    assert results.choose(found, given)[0].picked == {"learner.lr": "0.001"}


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
    names = {path.name for path in folder.path.iterdir() if path.suffix in (".png", ".json")}
    assert names == {"curves.png", "curves.json", "measure-reward.png", "measure-reward.json"}, (
        "misspelt has no numbers"
    )


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    found = load(tmp_path)
    tried = tuned(found, {("ppo", "0.001"): 0.2, ("ppo", "0.01"): 0.3, ("dg", "0.001"): 0.9, ("dg", "0.01"): 0.1})
    choices = results.choose(found, tried)
    runs = found.main_runs({choice.key: choice.picked for choice in choices})
    main = [Result(run, None, {"reward": None if number == 3 else number / 7}) for number, run in enumerate(runs)]
    results.write(found, tmp_path, [*tried, *main], choices, "the command")
    file = tmp_path / "results.csv"
    assert read(found, runs, file) == main and read(found, found.tuning_runs(), file) == tried
    assert [each.finished for each in main[2:5]] == [True, False, True]
    made, plotted = results.of_file(found, file)
    assert made == results.tables(found, main, choices) and list(plotted) == ["measure-reward.png"]
    (tmp_path / "again").mkdir()
    text = results.write(found, tmp_path / "again", [*tried, *main], choices, "the command")
    assert all(f"## {title}" in text for title in made) and "11 of 12 runs are finished" in text
    with pytest.raises(ValueError, match="not results of study: its columns are stage, loss"):
        read(load(tmp_path, measure={"other": {"summary": "reward_after"}}), runs, file)


def drawn(found: Study, finished: bool = True) -> dict[str, Plot]:
    """The plots of runs whose reward is their number; the last run may be missing."""
    runs = found.main_runs({})
    evaluations = [{"reward": 0.5, "version": 0, "seconds": 1.0}, {"reward": 0.9, "version": 2, "seconds": 2.0}]
    made = []
    for number, run in enumerate(runs):
        outcome = Outcome.__new__(Outcome)  # without a folder
        outcome.config, outcome.summary = run.config, {"steps": 7, "evaluations": evaluations}
        done = finished or number < len(runs) - 1
        made.append(Result(run, outcome if done else None, {"reward": float(number) if done else None}))
    return plots(found, made)


def test_a_key_with_numbers_is_the_x_axis_with_a_line_per_loss(tmp_path: Path) -> None:
    grid = {"loss": ["ppo", "dg"], "inject_staleness": [0, 1, 8]}
    words = {"names": {"inject_staleness": "staleness η, in versions"}, "note": "Copy.", "tune": ABSENT}
    measure = {"reward": {"summary": "reward_after", "label": "final reward", "title": "dg does not mind"}}
    found = load(tmp_path, grid=grid, measure=measure, **words)
    plot = drawn(found)["measure-reward.png"]
    assert (plot.kind, plot.title, plot.x, plot.y) == (
        "against", "dg does not mind", "staleness η, in versions", "final reward",
    )  # fmt: skip
    assert {label: [p.x for p in points] for label, points in plot.panels[""].items()} == {
        "ppo": [0.0, 1.0, 8.0], "dg": [0.0, 1.0, 8.0],
    }  # fmt: skip
    assert plot.panels[""]["dg"][2].values == (5.0, 11.0) and plot.note == "Copy."
    curves = drawn(found)["curves.png"]
    assert list(curves.panels) == ["staleness η = 0", "staleness η = 1", "staleness η = 8"]
    assert curves.title == "Held-out reward against samples trained", "the study names no finding of the curves"


def test_what_is_compared_is_tested_over_all_points_and_seeds_that_all_have(tmp_path: Path) -> None:
    found = load(tmp_path, tune=ABSENT, seeds=list(range(6)), measure={"reward": {"summary": "x", "better": "lower"}})
    made = []
    for run in found.main_runs({}):
        number = 0.1 * run.seed + (1.0 if run.labels["loss"] == "dg" else 0.0)
        missing = run.seed == 5 and run.labels == {"loss": "ppo", "mode": "old"}
        made.append(Result(run, None, {"reward": None if missing else number}))
    text = "\n".join(chain.from_iterable(overall.tables(found, made).items()))
    row = next(line for line in text.splitlines() if line.startswith("| ppo   | dg"))
    assert "+1 [+1, +1]" in row and "0.062" in row, "five seeds: 2 of 32 signs"
    assert row.rstrip(" |").endswith("0.00 [0.00, 0.00]"), "lower is better"
    assert not overall.tables(found, [each for each in made if each.run.labels["loss"] == "dg"])


def test_a_finding_is_claimed_of_all_runs_only(tmp_path: Path) -> None:
    measure = {"reward": {"summary": "reward_after", "title": "dg wins"}}
    found = load(tmp_path, measure=measure, tune=ABSENT, set={"run.steps": 7})
    assert drawn(found)["measure-reward.png"].title == "dg wins"
    assert drawn(found, finished=False)["measure-reward.png"].title == "Reward against loss and mode (7 of 8 runs)"


def test_without_numbers_on_the_grid_each_point_is_a_row(tmp_path: Path) -> None:
    plot = drawn(load(tmp_path, tune=ABSENT))["measure-reward.png"]
    assert plot.kind == "rows" and list(plot.panels) == ["mode = sync", "mode = old"]
    assert [p.x for p in plot.panels["mode = old"][""]] == ["ppo", "dg"]


def test_the_staleness_study_draws_curves_and_the_reward_against_staleness() -> None:
    found = study.load(CONFIGS / "ablation" / "staleness.yaml")
    assert found.curve.title and found.measures["reward"].title and "η" in found.names["inject_staleness"]
