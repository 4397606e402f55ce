"""The runs of an ablation on this machine: n processes of `scripts.train` at a time, each resumable; no process
outlives it.

The folder of an ablation has a run's config (`configs/NAME.yaml`), its run folder (`runs/NAME`) and its output
(`logs/NAME.log`). A run is finished when its folder has a summary. A killed run resumes from its last checkpoint
(`resume=auto`); without a checkpoint it starts from scratch. A failed run does not stop the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.placement import Devices
from areal_like.config.run_config import ConfigError
from areal_like.launch.forks import Forked
from areal_like.places import COMMANDS, python_path
from areal_like.run.metrics import MetricsFollower
from areal_like.run.process import TERM_SECONDS

from ..starting.earlier_runs import lock
from .devices import DevicePool
from .study import Run

POLL_SECONDS = 0.1
LINE_SECONDS = (5.0, 60.0)
"""Seconds between lines of progress, at first and in the long run."""


class Folder:
    """The folder of an ablation's files. Raises ConfigError for a path that scripts.train would take for an
    override."""

    def __init__(self, path: Path):
        self.path = path.resolve()
        if "=" in str(self.path):
            raise ConfigError(f"--out: a path with a = in it can't be used: {self.path}")

    def run(self, run: Run) -> Path:
        return self.path / "runs" / run.name

    def config(self, run: Run) -> Path:
        return self.path / "configs" / f"{run.name}.yaml"

    def log(self, run: Run) -> Path:
        return self.path / "logs" / f"{run.name}.log"

    def is_finished(self, run: Run) -> bool:
        return (self.run(run) / "summary.json").is_file()

    def prepare(self, run: Run) -> None:
        """Write the run's config, and remove a folder that cannot be resumed. The folder of a run that is going on
        stays: a second start of it is refused, and says why."""
        folder = self.run(run)
        unusable = not (folder / "config.yaml").is_file() or run.config.buffer.journal == "off"
        if folder.is_dir() and unusable and not self.is_finished(run):
            with contextlib.suppress(ConfigError):
                lock(folder).close()  # closed first: NFS does not remove the folder of an open file
                shutil.rmtree(folder)
        for path in (self.config(run), self.log(run)):
            path.parent.mkdir(parents=True, exist_ok=True)
        config, more = run.config, {"run.dir": str(folder.parent), "run.name": run.name, "run.seed": run.seed}
        for key, value in (more | {"resume": "auto"}).items():
            config = configs.replace(config, key, value)
        configs.save(config, self.config(run))

    def make(self) -> None:
        """Raises ConfigError for a folder that cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            why = "" if os.access(self.path, os.W_OK) else "it is read-only for you"
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            raise ConfigError(f"{self.path} cannot be written ({why}); name another folder with --out")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Reserve the folder. Raises ConfigError if another ablation uses it, or it cannot be written."""
        self.make()
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.path} is in use by another ablation; wait for it, or end it") from None
            yield


class Going:
    """A run with a living process, which has `more` in its environment, and these devices until it ends."""

    def __init__(self, run: Run, folder: Folder, devices: Devices, more: dict[str, str]):
        folder.prepare(run)
        self.run, self.devices, self.began, self.step = run, devices, time.monotonic(), 0
        self._rows = MetricsFollower(folder.run(run) / "metrics.jsonl")
        log = folder.log(run)
        self.said = log.stat().st_size if log.exists() else 0  # by earlier attempts, in bytes
        variables = os.environ | {"PYTHONPATH": python_path()} | more
        self.process = Forked(f"{COMMANDS}.train", [str(folder.config(run)), "--plain"], variables, log)

    def share(self) -> float:
        """The share of finished train steps."""
        for row in self._rows.new_rows():
            self.step = row["step"]
        return self.step / max(1, self.run.config.run.steps)


@dataclass(frozen=True, slots=True)
class Width:
    """How many runs go at a time, and the devices that they divide (None: each sees all)."""

    parallel: int
    devices: DevicePool | None = None


def run_all(
    runs: Sequence[Run],
    folder: Folder,
    width: Width,
    check: Callable[[], None],
    say: Callable[[str], None],
    finished: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Make all runs that are not finished; returns those that failed. `check` raises to end everything, `finished` is
    given each run that has ended well.

    When this returns or raises, no process that it started is left.
    """
    waiting = [run for run in runs if not folder.is_finished(run)]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already")
    pool = width.devices or DevicePool(0)
    going: list[Going] = []
    failed: list[Run] = []
    progress = Progress(len(waiting), say)
    try:
        while waiting or going:
            check()
            while waiting and len(going) < width.parallel:
                devices = pool.take(waiting[0].config) if width.devices else ()
                if devices is None:
                    break
                going.append(Going(waiting.pop(0), folder, devices, pool.environment(devices)))
            for one in [one for one in going if one.process.poll() is not None]:
                going.remove(one)
                pool.give_back(one.devices)
                code = one.process.poll()
                if code:
                    failed.append(one.run)
                progress.ended(one, last_words(folder.log(one.run), one.said) if code else "")
                if not code:
                    finished(one.run)
            progress.tell(going)
            time.sleep(POLL_SECONDS)
    finally:
        _end([one.process for one in going])
    return failed


def last_words(log: Path, begin: int) -> str:
    """The error that a run reported at its end, and the path of its log, which is read from byte `begin` on: before are
    the words of earlier attempts."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines() if log.is_file() else []
    told = [line for line in lines if line.startswith("error: ")] or lines[-1:] or ["it printed nothing"]
    return f"{told[-1].removeprefix('error: ')} (its log: {log})"


def _end(processes: list[Forked]) -> None:
    """SIGTERM ends a run with all of its processes; later, remaining ones are killed."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 3 * TERM_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.end(signal.SIGKILL)
        process.wait()


class Progress:
    """Lines of progress on the console."""

    def __init__(self, total: int, say: Callable[[str], None]):
        self.total, self.done, self._say = total, 0, say
        self._began = self._told = time.monotonic()

    def ended(self, one: Going, error: str) -> None:
        self.done += 1
        how = f"FAILED: {error}" if error else f"{time.monotonic() - one.began:.0f} s"
        self._say(f"[{self.done}/{self.total}] {one.run.title}: {how}")

    def tell(self, going: list[Going]) -> None:
        now = time.monotonic()
        shortest, longest = LINE_SECONDS
        if not going or now - self._told < min(longest, max(shortest, (now - self._began) / 30)):
            return
        self._told = now
        parts = [f"{one.run.title}: {one.share():.0%}" for one in going]
        done = self.done + sum(one.share() for one in going)
        left = f"; about {_clock((now - self._began) * (self.total - done) / done)} left" if done else ""
        self._say(f"{self.done} of {self.total} done{left}; now {'; '.join(parts)}")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
