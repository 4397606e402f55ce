"""Who may go on with a run folder, and when."""

import fcntl
import threading
import time
from pathlib import Path

import pytest

from areal_like import config as configs
from areal_like.config import ConfigError
from scripts import earlier_runs
from scripts.earlier_runs import lock, reopen_run_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    return tmp_path


def test_one_starter_has_a_folder(folder: Path) -> None:
    held = lock(folder)
    with pytest.raises(ConfigError, match="in use"):
        lock(folder)
    held.close()
    lock(folder).close()


def test_processes_that_outlive_their_starter_are_waited_for(folder: Path) -> None:
    orphan = (folder / "config.yaml").open()
    fcntl.flock(orphan, fcntl.LOCK_SH)
    ended: list[float] = []

    def end() -> None:
        ended.append(time.monotonic())
        orphan.close()

    threading.Timer(0.3, end).start()
    held = lock(folder)
    assert ended and time.monotonic() >= ended[0]
    held.close()


def test_one_that_does_not_end_is_an_error(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(earlier_runs, "ORPHAN_SECONDS", 0.1)
    with (folder / "config.yaml").open() as orphan:
        fcntl.flock(orphan, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="in use"):
            lock(folder)


def made(tmp_path: Path, *overrides: str) -> Path:
    configs.save(configs.load(["configs/quickstart.yaml", *overrides]), tmp_path / "config.yaml")
    return tmp_path


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("scheduler.max_staleness=4", "scheduler.max_staleness=2", "bound was 4 .* is 2 now"),
        ("scheduler.max_staleness=1", "mode=sync", "bound was 1 .* is 0 now"),
        ("buffer.journal=off", "buffer.journal=memory", "had no journal"),
        ("buffer.journal=memory", "buffer.journal=off", "would have no journal"),
        ("loss=ppo", "loss=dg", "loss was"),
    ],
)
def test_what_a_resume_may_not_change(tmp_path: Path, before: str, now: str, told: str) -> None:
    folder = made(tmp_path, before)
    with pytest.raises(ConfigError, match=told):
        reopen_run_folder(configs.load(["configs/quickstart.yaml", now]), folder)


@pytest.mark.parametrize("now", ["scheduler.max_staleness=8", "buffer.journal=fsync", "actors.count=5", "run.steps=9"])
def test_what_a_resume_may_change(tmp_path: Path, now: str) -> None:
    folder = made(tmp_path)
    reopened = reopen_run_folder(configs.load(["configs/quickstart.yaml", now]), folder)
    assert reopened.run.name == folder.name
