"""A live run in its own folder, with all of its processes: to be watched and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.victim import commands
from tests.forked import Command

PATIENCE = 120.0
"""Seconds until an event that is awaited counts as missed; it comes within one or two."""


def processes(place: Path) -> dict[int, str]:
    """Process id → command line of all live processes that name `place`."""
    return {pid: line for pid, line in commands() if str(place) in line}


class Run:
    """One `scripts.train`, with its run folder and its folder for sockets below `place`."""

    def __init__(self, place: Path, *overrides: str, wrapper: tuple[str, ...] = (), fresh: bool = False):
        self.folder, self.temporary = place / "run", place / "tmp"
        self.temporary.mkdir(exist_ok=True)
        words = ["scripts.train", "configs/quickstart.yaml", f"run.dir={place}", "run.name=run", *overrides]
        self.output = place / "output"
        self.process = Command(words, self.output, wrapper, fresh, TMPDIR=str(self.temporary))

    def text(self) -> str:
        return self.output.read_text()

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def until(self, what: str, event: Callable[[], Any]) -> Any:
        """The first true result of `event`; fails, naming `what`, if the run ends or time passes without it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if result := event():
                return result
            assert not ended, f"the run ended while the test waited for {what}:\n{self.text()}"
            time.sleep(0.01)
        raise AssertionError(f"waited in vain for {what}:\n{self.text()}")

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            path = self.folder / "metrics.jsonl"
            return path.exists() and path.read_bytes().count(b"\n") >= step

        self.until(f"step {step}", reached)

    def until_starting(self) -> None:
        """Wait until all processes exist; none has come far."""
        self.until("the last actor's process", lambda: self.pid("actor-1"))

    def until_forking(self) -> None:
        """Wait until torch is being imported, for roles that don't exist yet."""
        self.until("the fork server", lambda: any("multiprocessing.forkserver" in text for text in self.children()))

    def children(self) -> list[str]:
        """The command lines of the starter's own children."""
        listed = subprocess.run(["ps", "-o", "args=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        return listed.stdout.splitlines()

    def end(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            logs = "\n".join(f"{path.name}: {path.read_text()}" for path in self.folder.glob("logs/*.log"))
            raise AssertionError(f"the run did not end:\n{self.text()}\n{logs}") from None

    def processes(self) -> dict[int, str]:
        """All processes of this run, except the one started here."""
        return {pid: command for pid, command in processes(self.folder.parent).items() if pid != self.process.pid}

    def pid(self, name: str) -> int | None:
        return next((pid for pid, command in self.processes().items() if f"--name {name} " in command), None)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(name)
        assert pid, f"{name} is not there"
        os.kill(pid, number)
        return pid

    def assert_nothing_is_left(self) -> None:
        """No process, socket or rendezvous is left, and the user saw no traceback."""
        assert self.processes() == {}
        assert not (left := list(self.temporary.rglob("*"))), left
        assert not (self.folder / "rendezvous").exists()
        assert "Traceback" not in self.text()
