"""A live run in its own folder, with all of its processes: to be watched, killed and started again."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import PATIENCE, Command, until
from tests.integration.runs import summary

NO_END = 1_000_000_000


def processes(text: object) -> dict[int, str]:
    """Process id → command line of all live processes that name `text`. A zombie has no command line."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found[int(pid)] = f"{line} "
    return {pid: line for pid, line in found.items() if str(text) in line}


def roles(text: str) -> dict[str, int]:
    """Role → process id of the live roles that name `text`."""
    split = {pid: line.split() for pid, line in processes(f"{text} ").items()}
    return {words[words.index("--name") + 1]: pid for pid, words in split.items() if "--name" in words}


class Run:
    """One `scripts.train`, again after each `start`. Its run folder and its output are in `place`."""

    def __init__(
        self,
        place: Path,
        *overrides: str,
        name: str = "run",
        wrapper: tuple[str, ...] = (),
        fresh: bool = False,
        config: str = "configs/quickstart.yaml",
        **variables: str,
    ):
        self.place, self.overrides, self.folder, self.output = place, overrides, place / name, place / f"{name}.out"
        self.words = ["scripts.train", config, f"run.dir={place}", f"run.name={name}", *overrides]
        self.how, self.variables = (wrapper, fresh), variables
        self.start()

    def start(self, *overrides: str) -> None:
        self.process = Command([*self.words, *overrides], self.output, *self.how, **self.variables)

    def text(self) -> str:
        """The output since the last start."""
        return self.process.text()

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def until(self, what: str, event: Callable[[], Any]) -> Any:
        """The first true result of `event`; fails, naming `what`, if the run ends or time passes without it."""

        def seen() -> Any:
            ended, result = self.ended, event()
            assert result or not ended, f"the run ended while the test waited for {what}:\n{self.text()}"
            return result

        return until(what, seen)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: self.steps() >= step)

    def until_steps(self, more: int) -> None:
        self.until_step(self.steps() + more)

    def end(self) -> int:
        """The exit code; waits while the run makes steps."""
        while True:
            steps = self.steps()
            try:
                return self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                logs = "\n".join(f"{path.name}: {path.read_text()}" for path in self.folder.glob("logs/*.log"))
                assert self.steps() > steps, f"no end and no step:\n{self.text()}\n{logs}"

    def finish(self, code: int = 0) -> dict[str, Any]:
        """The summary at the end."""
        assert self.end() == code, self.text()
        return summary(self.folder)

    def finish_resumed(self, more: int) -> dict[str, Any]:
        """The summary after `more` train steps, and as many after a resume."""
        self.until_steps(more)
        self.close()
        self.start(f"run.steps={self.steps() + more}")
        return self.finish()

    def roles(self) -> dict[str, int]:
        """Role → process id, guests included."""
        return roles(f"--run {self.folder}")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.roles()[name]
        os.kill(pid, number)
        return pid

    def join(self, *options: str) -> Command:
        """A running `scripts.join`."""
        return Command(["scripts.join", str(self.folder), *options], self.place / "guests.out")

    def close(self) -> None:
        if not self.ended:
            self.process.terminate()
            self.end()


def train(folder: Path, name: str, *overrides: str, **how: str) -> Path:
    """Run `scripts.train` to its end; returns the run folder."""
    run = Run(folder, *overrides, name=name, **how)
    assert run.end() == 0, run.text()
    return run.folder
