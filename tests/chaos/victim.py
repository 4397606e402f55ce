"""A run that tests break: started, killed and resumed by one command, a `scripts.train` with `resume=auto`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.forked import Command

STARTER = "starter"
PATIENCE = 120.0
"""Seconds within which a run must make a step, or end."""
NO_END = 1_000_000_000


class Stuck(AssertionError):
    """The run does not proceed; the text has the end of its output."""


class Victim:
    """`words`: the module and its arguments."""

    def __init__(self, words: list[str], folder: Path):
        self.words, self.folder = words, folder
        self.output = folder.with_name(f"{folder.name}.out")
        self.process: Command | None = None
        self.starts = 0

    def start(self, *overrides: str) -> None:
        self.process = Command([*self.words, *overrides], self.output)
        self.starts += 1

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def steps(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def pids(self) -> dict[str, int]:
        """Role → process id of the live processes."""
        assert self.process is not None
        return {STARTER: self.process.pid} | children(self.process.pid)

    def until(self, what: str, event: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait for an event. Raises Stuck."""
        deadline = time.monotonic() + seconds
        while not event():
            if self.ended:
                raise Stuck(f"the run ended before {what}:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise Stuck(f"not within {seconds:.0f} s: {what}:\n{self.last_words()}")
            time.sleep(0.02)

    def wait(self) -> int:
        """The exit code; waits while the run makes steps. Raises Stuck."""
        assert self.process is not None
        while True:
            steps = self.steps()
            try:
                return self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                if self.steps() == steps:
                    raise Stuck(f"no end and no step in {PATIENCE:.0f} s:\n{self.last_words()}") from None

    def last_words(self) -> str:
        return "\n".join(self.output.read_text().splitlines()[-12:])

    def end(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE)


def commands() -> Iterator[tuple[int, str]]:
    """Process id and command line of all live processes. A zombie has no command line."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if line := Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid), line.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def children(starter: int) -> dict[str, int]:
    """Role → process id of the live roles that this process has started, or had started by a fork server."""
    found = {}
    for pid, line in commands():
        words = line.split()
        if f"--starter {starter} " in f"{line} " and "--name" in words:
            found[words[words.index("--name") + 1]] = pid
    return found


def finish(victim: Victim, more: int) -> dict:
    """Let the run train `more` steps, and as many after a resume. Returns its summary. Raises Stuck."""
    begin = victim.steps()
    victim.until(f"{more} train steps after the last fault", lambda: victim.steps() >= begin + more)
    victim.end()
    victim.start(f"run.steps={victim.steps() + more}")
    if victim.wait():
        raise Stuck(f"the run failed:\n{victim.last_words()}")
    return json.loads((victim.folder / "summary.json").read_text())


def replay(victim: Victim) -> dict:
    """The summary of an undisturbed run over the recorded batches. Raises Stuck."""
    folder = victim.folder.with_name(f"{victim.folder.name}-replay")
    again = Victim([*victim.words, f"replay={victim.folder}", "resume=null", f"run.name={folder.name}"], folder)
    again.start()
    if again.wait():
        raise Stuck(f"the replay failed:\n{again.last_words()}")
    return json.loads((folder / "summary.json").read_text())
