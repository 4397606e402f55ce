"""The runs of an ablation on this machine: n resumable processes of `scripts.train` at a time; none outlives it.

The folder of an ablation has a run's config (`configs/NAME.yaml`), its run folder (`runs/NAME`) and its output
(`logs/NAME.log`). A run is finished when its folder has a summary; a killed one resumes from its last checkpoint. Runs
at a time divide the machine's GPUs: a run counts devices from 0 among those that it may see (`config.placement`), so it
is started with its own in CUDA_VISIBLE_DEVICES. Slurm and Ray choose devices.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.placement import KEY, VISIBLE, Devices, needs_of, place, visible
from areal_like.config.registry import resolve
from areal_like.config.run_config import Config, ConfigError
from areal_like.launch.forks import Forked
from areal_like.machine import has_gpu
from areal_like.places import COMMANDS, python_path
from areal_like.run.process import TERM_SECONDS

from ..starting.earlier_runs import lock
from ..starting.gpus import gpus_here
from .study import Run

POLL_SECONDS = 0.1


class Folder:
    """The folder of an ablation's files. Raises ConfigError for a path that looks like an override."""

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
        """Write the run's config, and remove a folder that cannot be resumed, unless its run is going on."""
        folder = self.run(run)
        unusable = not (folder / "config.yaml").is_file() or run.config.buffer.journal == "off"
        if folder.is_dir() and unusable and not self.is_finished(run):
            with contextlib.suppress(ConfigError):
                lock(folder).close()  # closed first: NFS does not remove the folder of an open file
                shutil.rmtree(folder)
        for path in (self.config(run), self.log(run)):
            path.parent.mkdir(parents=True, exist_ok=True)
        config, own = run.config, {"run.dir": str(folder.parent), "run.name": run.name, "run.seed": run.seed}
        for key, value in (own | {"resume": "auto"}).items():
            config = configs.replace(config, key, value)
        configs.save(config, self.config(run))


def wanted(config: Config) -> int:
    """Devices of this machine that a run needs to itself. Raises ConfigError for a placement that can't be."""
    launcher, needs = resolve("launcher", config.launcher["name"]), needs_of(config, has_gpu())
    if launcher.ACROSS_HOSTS or not needs.total:
        return 0
    spec = configs.select(config, KEY)
    if not isinstance(spec, Mapping) or not (placement := place(spec, needs, None)):
        return needs.total
    return 1 + max((max(each) for each in (*placement.ranks, *placement.actors) if each), default=-1)


class Going:
    """A run with a living process, which has these devices until it ends."""

    def __init__(self, run: Run, folder: Folder, devices: Devices):
        folder.prepare(run)
        self.run, self.devices, self.began = run, devices, time.monotonic()
        self._log = folder.log(run)
        self._earlier = self._log.stat().st_size if self._log.exists() else 0  # bytes of earlier attempts
        variables = os.environ | {"PYTHONPATH": python_path()}
        if devices:
            variables[VISIBLE] = visible(devices, os.environ.get(VISIBLE))
        self.process = Forked(f"{COMMANDS}.train", [str(folder.config(run)), "--plain"], variables, self._log)

    def end(self) -> str:
        """How the ended process did: its seconds, or the last error of its log."""
        if not self.process.poll():
            return f"{time.monotonic() - self.began:.0f} s"
        lines = self._log.read_bytes()[self._earlier :].decode(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:] or ["it printed nothing"]
        return f"FAILED: {errors[-1].removeprefix('error: ')} (its log: {self._log})"


def devices_to_share(runs: Sequence[Run]) -> list[int]:
    """This machine's devices; none if no run needs any. Raises ConfigError if a run needs more than there are."""
    most = max((wanted(run.config) for run in runs), default=0)
    count = gpus_here().count if most else 0
    if most > count:
        raise ConfigError(f"{KEY}: a run needs {most} devices of {count}: {{learner: [0], actors: [0], share: true}}")
    return list(range(count))


def run_all(runs: Sequence[Run], folder: Folder, parallel: int, check: Callable[[], None]) -> list[Run]:
    """Make all runs that are not finished, at most `parallel` at a time, each with devices of its own (with one at a
    time it sees all). Returns those that failed. `check` raises to end everything. Raises ConfigError."""
    waiting = [run for run in runs if not folder.is_finished(run)]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already")
    going, failed = list[Going](), list[Run]()
    free = devices_to_share(waiting) if parallel > 1 else []
    total = len(waiting)
    try:
        while waiting or going:
            check()
            while waiting and len(going) < parallel:
                count = wanted(waiting[0].config) if parallel > 1 else 0
                if count > len(free):
                    break
                devices, free = tuple(free[:count]), free[count:]
                going.append(Going(waiting.pop(0), folder, devices))
            for one in [one for one in going if one.process.poll() is not None]:
                going.remove(one)
                free = sorted([*free, *one.devices])
                say(f"[{total - len(waiting) - len(going)}/{total}] {one.run.title}: {one.end()}")
                failed += [one.run] if one.process.poll() else []
            time.sleep(POLL_SECONDS)
    finally:
        _end([one.process for one in going])
    return failed


def say(text: str) -> None:
    print(text, flush=True)


def _end(processes: list[Forked]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 3 * TERM_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.end(signal.SIGKILL)
        process.wait()
