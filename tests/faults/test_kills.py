"""Processes killed and stopped at random moments, many times in one run. A long one is in docs/results.md."""

from pathlib import Path

import pytest

from scripts.verify import chaos

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SMALL = [
    "eval.prompts=4",
    "eval.every=0",
    "groups_per_batch=4",
    "checkpoint.every=3",
    "task.digits=4",
    "run.trackers=[]",
]
TIMED = ["engine=timed", "learner=timed", "learner.base=0.02", "engine.median=20"]


def wreak(place: Path, *arguments: str) -> int:
    return chaos.main(["configs/quickstart.yaml", f"run.dir={place}", "run.name=run", *SMALL, *arguments])


def test_each_role_killed_in_one_run_leaves_the_weights_of_an_undisturbed_one(tmp_path: Path, capsys) -> None:
    assert wreak(tmp_path, "--kills", "4", "--spread", "0.5", "--seed", "1") == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert "BROKEN" not in told and "final weights: equal" in told


def test_a_buffer_that_dies_again_and_again_under_load(tmp_path: Path, capsys) -> None:
    """Out of order, each record synced: batches served before a crash are served again unchanged."""
    order = ["policy=windowed", "buffer.journal=fsync", "scheduler.max_staleness=2"]
    assert wreak(tmp_path, *TIMED, *order, "--kills", "3", "--victims", "buffer", "--spread", "0.5") == 0, (
        capsys.readouterr().out
    )


def test_an_actor_that_stands_still_longer_than_the_time_out(tmp_path: Path, capsys) -> None:
    """Its groups go to others; when it continues it joins again, and its late groups are not trained twice."""
    stop = ["buffer.heartbeat_timeout=2", "--kills", "0", "--stops", "1", "--stop-seconds", "4"]
    assert wreak(tmp_path, *TIMED, *stop, "--more", "40") == 0, capsys.readouterr().out
    log = (tmp_path / "run" / "logs" / "buffer.log").read_text()
    assert "actor-0: no sign of life for 2 s, its leases go to others" in log
    assert log.count("actor-0 joined") >= 3, "at the start, after the stop, and at the resume"


def test_bad_pushes_hangs_full_disks_and_cuts_in_one_run(tmp_path: Path, capsys, monkeypatch) -> None:
    """At b40a5d9 the first bad push was acknowledged, and the run was lost for good."""
    monkeypatch.setattr(chaos, "DISK_SECONDS", 1.0)  # each record meets it, and each checkpoint
    faults = ["--kills", "0", "--hangs", "1", "--full-disks", "2", "--cuts", "2", "--bad-pushes", "5"]
    assert wreak(tmp_path, *faults, "--stop-seconds", "2", "--spread", "0.5") == 0, capsys.readouterr().out
    assert "accepted" not in capsys.readouterr().out
