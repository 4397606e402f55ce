"""Runs that are killed and resumed: nothing is trained twice or skipped, and the result is the same."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from areal_like.run import checkpoints
from areal_like.run.process import EXIT_PAUSED
from buffer.events import Serve
from buffer.journal import scan
from tests.forked import Command
from tests.integration.runs import rows, summary, train, unused

TIMED = [
    "engine=timed",
    "learner=timed",
    "engine.median=20",
    "learner.base=0.02",
    "eval.prompts=4",
    "eval.every=0",
    "run.trackers=[]",
]


def start(folder: Path, name: str, *overrides: str) -> Command:
    words = ["scripts.train", "configs/quickstart.yaml", f"run.dir={folder}", f"run.name={name}"]
    words += ["run.target_reward=null", "buffer.keep_journal=true", *overrides]
    return Command(words, unused(folder, name))


def wait_for_step(run: Path, step: int, process: Command) -> None:
    deadline = time.monotonic() + 200  # a busy machine may take a minute to start torch in several processes
    while time.monotonic() < deadline:
        path = run / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    pytest.fail(f"the run did not reach step {step} in 200 s")


def pid_of(run: Path, role: str) -> int:
    found = subprocess.run(["pgrep", "-f", f"name {role} --run {run}"], capture_output=True, text=True).stdout.split()
    assert found, f"no process of {role}"
    return int(found[0])


def trained_ids(run: Path) -> list[list[int]]:
    """The groups of each batch, from the journal; a batch that was served again must be the same."""
    batches: dict[int, list[int]] = {}
    for event, _ in scan(run / "journal"):
        if isinstance(event, Serve):
            batch, ids = event.batch, event.ids
            assert batches.setdefault(batch, ids) == ids, f"batch {batch} was served with other groups after the crash"
    return [batches[index] for index in sorted(batches)]


@pytest.mark.integration
@pytest.mark.parametrize("victim", ["learner", "buffer", "supervisor"])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, victim: str) -> None:
    steps = 40
    overrides = [*TIMED, f"run.steps={steps}", "checkpoint.every=7"]
    process = start(tmp_path, "run", *overrides)
    run = tmp_path / "run"
    wait_for_step(run, 17, process)
    os.kill(process.pid if victim == "supervisor" else pid_of(run, victim), signal.SIGKILL)
    process.wait(timeout=30)
    reached = len(rows(run))
    assert not (run / "summary.json").exists()
    assert checkpoints.latest(run) is not None

    output, _ = (resumed := start(tmp_path, "run", *overrides, "resume=auto")).communicate(timeout=120)
    assert resumed.returncode == 0, output
    assert f"resuming {run}" in output
    assert [row["step"] for row in rows(run)] == list(range(1, steps + 1))
    ledger = summary(run)["ledger"]
    gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["admitted"] == gone + ledger["active"] and ledger["trained"] == 16 * steps
    batches = trained_ids(run)[:steps]
    trained = [group_id for batch in batches for group_id in batch]
    assert len(set(trained)) == len(trained) == 16 * steps
    assert sorted(trained) == list(range(16 * steps)), "a prompt was skipped"
    assert summary(run)["staleness_max"] <= 1
    mean = sum(row["staleness/mean"] for row in rows(run)) / steps
    assert summary(run)["staleness_mean"] == pytest.approx(mean), "of all that was trained, before the crash and after"
    since = summary(run)["since_step"]
    assert 0 < since <= reached and rows(run)[-1]["rollout/since_step"] == since, (
        "what is counted anew says from where on"
    )


@pytest.mark.integration
def test_a_resumed_learner_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Its learner is killed, and the run is paused (SIGUSR1). Synchronous, and no sum depends on which sequences
    share a decode step. So every loss is that of a run without these and with another number of actors, to the last
    bit."""
    overrides = ["mode=sync", "engine.batch_invariant=true", "groups_per_batch=4", "run.steps=9"]
    overrides += ["eval.prompts=4", "eval.every=0", "checkpoint.every=2"]
    undisturbed = train(tmp_path, "undisturbed", "run.target_reward=null", "actors.count=1", *overrides)
    process = start(tmp_path, "killed", *overrides)
    wait_for_step(tmp_path / "killed", 3, process)
    os.kill(pid_of(tmp_path / "killed", "learner"), signal.SIGKILL)
    process.wait(timeout=30)
    paused = start(tmp_path, "killed", *overrides, "resume=auto")
    wait_for_step(tmp_path / "killed", 6, paused)
    paused.send_signal(signal.SIGUSR1)
    assert paused.wait(timeout=60) == EXIT_PAUSED, paused.communicate()[0]
    output, _ = (resumed := start(tmp_path, "killed", *overrides, "resume=auto")).communicate(timeout=120)
    assert resumed.returncode == 0, output
    assert summary(tmp_path / "killed")["weights_digest"] == summary(undisturbed)["weights_digest"]
    for ours, theirs in zip(rows(tmp_path / "killed"), rows(undisturbed), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"], f"step {ours['step']}: other tokens"
        assert ours["loss"] == theirs["loss"], f"step {ours['step']}"


@pytest.mark.integration
def test_what_decides_the_data_cannot_change_on_resume(tmp_path: Path) -> None:
    run = train(tmp_path, "run", *TIMED, "run.steps=3")
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    process = start(tmp_path, "run", *TIMED, "run.steps=3", "run.seed=1", f"resume={run}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "run.seed was 0" in output
    longer = start(tmp_path, "run", *TIMED, "run.steps=5", f"resume={run}")
    output, _ = longer.communicate(timeout=60)
    assert longer.returncode == 0, output
    assert summary(run)["steps"] == 5, "a finished run can be made longer"
