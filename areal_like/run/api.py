"""Runs from Python: `train` starts one, and `Run` reads the contents of its folder. No torch."""

import functools
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from areal_like.config import run_config as configs
from areal_like.launch.outcome import RunFailed
from areal_like.places import COMMANDS, python_path
from areal_like.run import samples
from areal_like.run.metrics import MetricsFollower
from areal_like.run.process import end_with_starter
from areal_like.run.run_folder import CONFIG, summary_of

LAST_LINES = 12
END_SECONDS = 60.0


class Run:
    """A run, from its folder, also while it is running. Raises FileNotFoundError if there is none."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / CONFIG).is_file():
            raise FileNotFoundError(f"{self.folder}: no run folder ({CONFIG} is missing)")

    @property
    def config(self) -> configs.Config:
        """The resolved config."""
        return configs.load_resolved(self.folder / CONFIG)

    @property
    def metrics(self) -> list[dict[str, object]]:
        """One row per train step: name → number."""
        return list(MetricsFollower(self.folder / "metrics.jsonl").new_rows())

    @property
    def summary(self) -> dict[str, object] | None:
        """Summary of the run; None while it is running."""
        return summary_of(self.folder)

    @property
    def checkpoint(self) -> Path:
        """The trained model, as a folder for transformers (`from_pretrained`); it is there when the run has ended."""
        return self.folder / "checkpoints" / "final"

    def samples(self, fate: samples.Fate = samples.TRAINED) -> Iterator[samples.Kept]:
        """Recorded samples in order: "trained", "dropped" or "heldout". Raises ValueError for another word."""
        if fate not in (known := get_args(samples.Fate)):
            raise ValueError(f"samples({fate!r}): there are {', '.join(map(repr, known))}")
        return samples.read(self.folder, [fate])

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


def train(config: str | Path, overrides: Mapping[str, object] | None = None, *, quiet: bool = False) -> Run:
    """Run a config to its end in processes of its own, as the command does, and print its progress unless `quiet`.

    `config` is a file or the name of a shipped one; `overrides` maps dotted keys to values. To resume, name the run
    folder. Raises ConfigError, RunFailed (with the last lines) and, after all processes, KeyboardInterrupt."""
    name = f"{Path(config).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1000:03d}"
    wanted = {"run.name": None, **(overrides or {})}
    wanted["run.name"] = wanted["run.name"] or name
    resumed = wanted.get("resume")
    if resumed == "auto":
        raise configs.ConfigError("resume=auto: name the run folder to resume", "resume")
    arguments = [str(config), *(f"{key}={as_yaml(value)}" for key, value in wanted.items())]
    run = configs.load(arguments, origins=dict.fromkeys(wanted, "the overrides")).run
    command = [sys.executable, "-m", f"{COMMANDS}.train", *arguments, "--plain"]
    code, last = _follow(command, quiet)
    if code:
        raise RunFailed(f"the run ended with exit code {code}:\n" + "".join(last))
    return Run(str(resumed) if resumed else Path(run.dir).expanduser() / str(run.name))


def as_yaml(value: object) -> str:
    """A value as text of an override on the command line; also of paths and NumPy's numbers. Raises ConfigError."""
    if isinstance(value, str | os.PathLike):
        return str(value)
    try:
        return json.dumps(value, default=lambda each: str(each) if isinstance(each, os.PathLike) else each.tolist())
    except (TypeError, AttributeError):
        raise configs.ConfigError(f"{value!r}: a value of a config is a number, a text, a list or a dict") from None


def _follow(command: list[str], quiet: bool) -> tuple[int, deque[str]]:
    """Run a command, printing its output; returns its exit code and last lines."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        command,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process only, which ends the other
        preexec_fn=functools.partial(end_with_starter, os.getpid()),
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                last.append(line)
                if not quiet:
                    print(line, end="", flush=True)
            return process.wait(), last
        except BaseException:  # the command ends its processes
            process.terminate()
            process.wait(timeout=END_SECONDS)
            raise
