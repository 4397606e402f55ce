"""Ablations of real, tiny runs: interrupted and resumed; tuned; through Slurm's array script."""

import csv
import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.forked import Command, forking_python, until
from tests.integration.living import processes

pytestmark = pytest.mark.integration

TIMED = {
    "config": "bench/modes",
    "set": {"run.steps": 3, "engine.median": 2, "learner.base": 0.01, "task.digits": 2, "actors.count": 1},
    "grid": {"scheduler.max_staleness": [0, 2]},
    "seeds": [0],
    "measure": {"staleness": {"summary": "staleness_max"}, "steps": {"summary": "steps"}},
    "curve": {"y": "staleness/mean", "x": "samples"},
}

BREAKABLE = TIMED["set"] | {"engine": "tests.integration.failing:FailingEngine"}


def write(folder: Path, **changes) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(TIMED | changes, sort_keys=False))
    return path


def start(folder: Path, *arguments: object, **variables: str) -> Command:
    return Command(["scripts.ablate", *map(str, arguments)], folder / "ablate.out", **variables)


def ablate(folder: Path, *arguments: object, code: int = 0, **variables: str) -> str:
    process = start(folder, *arguments, **variables)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    return said


def rows(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "results.csv").open()))


def test_an_ablation_that_is_interrupted_ends_every_process_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    long = {"slow": {"learner.base": 0.7, "run.steps": 3, "scheduler.max_staleness": 0}}
    study = write(tmp_path, grid={"pace": {"quick": {"scheduler.max_staleness": 2}, **long}})
    process = start(tmp_path, study, "--out", out, "--parallel", 2)
    finished = lambda: list(out.glob("runs/*quick*/summary.json"))  # noqa: E731
    going = lambda: [p for p in out.glob("runs/*slow*/metrics.jsonl") if p.stat().st_size]  # noqa: E731
    until("one run's end and the other's steps", lambda: finished() and going())
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "run the same command to continue" in said
    assert not processes(out)
    first = finished()[0].stat().st_mtime_ns

    assert "1 of 2 runs are finished already" in ablate(tmp_path, study, "--out", out)
    assert finished()[0].stat().st_mtime_ns == first, "a finished run was run again"
    assert [(row["pace"], row["steps"]) for row in rows(out)] == [("quick", "3.0"), ("slow", "3.0")]
    assert "resuming" in next(out.glob("logs/*slow*")).read_text()
    assert (out / "curves.png").exists()


def test_a_killed_ablation_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, write(tmp_path, grid={"learner.base": [2.0]}), "--out", out)
    until("a run's processes", lambda: len(processes(out / "runs")) >= 3)
    process.kill()
    process.communicate(timeout=30)
    until("their end", lambda: not processes(out))


def test_a_run_that_fails_is_told_and_does_not_stop_the_others(tmp_path: Path) -> None:
    study = write(tmp_path, set=BREAKABLE, grid={"engine.broken": [True, False]})
    said = ablate(tmp_path, study, "--out", tmp_path / "out", code=1)
    assert "[1/2] broken=true, seed 0: FAILED: actor-0" in said and "1 of 2 runs are finished" in said
    assert [row["steps"] for row in rows(tmp_path / "out")] == ["", "3.0"]


def test_tuning_and_a_failing_run_through_slurm(tmp_path: Path) -> None:
    """`sbatch` is a stand-in that runs its script at once, array tasks one after the other."""
    out, bin = tmp_path / "out", tmp_path / "bin"
    bin.mkdir()
    fake = f"""#!/bin/bash
echo "$@" >> {tmp_path}/calls
while [[ $1 == --* ]]; do shift; done
script=$1
tasks=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 ${{tasks:-0}}); do
    PYTHON={tmp_path}/python SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=1 bash "$@" >> {tmp_path}/jobs.log 2>&1
done
wc -l < {tmp_path}/calls
"""
    (bin / "sbatch").write_text(fake)
    (bin / "sbatch").chmod(0o755)
    tune = {"grid": {"engine.broken": [True, False]}, "seeds": [7], "by": "steps"}
    study = write(tmp_path, set=BREAKABLE, tune=tune, slurm={"partition": "cpu"}, grid={"scheduler.max_staleness": [2]})
    shown = ablate(tmp_path, study, "--out", out, "--slurm", "--dry-run")
    assert "#SBATCH --array=0-1\n" in shown and "#SBATCH --partition=cpu" in shown
    assert not (tmp_path / "calls").exists()

    with forking_python(tmp_path / "python", tmp_path / "jobs.log"):
        said = ablate(tmp_path, study, "--out", out, "--slurm", PATH=f"{bin}:{os.environ['PATH']}")
    assert "2 tune runs are submitted as job" in said
    calls = (tmp_path / "calls").read_text().splitlines()
    log = (tmp_path / "jobs.log").read_text()
    assert len(calls) == 4 and "--dependency=afterany:1" in calls[1], log
    assert "error: actor-0" in log and "this engine is broken" in log, "the run that is to fail has not failed"
    last = rows(out)[-1]
    assert (last["stage"], last["tuned engine.broken"], last["steps"]) == ("main", "false", "3.0"), log
