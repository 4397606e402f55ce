"""An ablation as Slurm array jobs: writes the files, and submits them. Each stage is an array and a job that follows
it.

    tune.sbatch (array) → tune-then.sbatch: picks, and submits → main.sbatch (array) → main-then.sbatch: the results

All files are in `slurm/` of the ablation's folder, which all nodes must see. You can edit the `#SBATCH` lines;
`%A_%a.log` are the jobs' own logs. A run that Slurm ends early (time limit, preemption) is queued again and resumes
from its last checkpoint. The number of tasks in an array is limited, so a task may make several runs of the list.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.launch.slurm import flags, sbatch
from areal_like.places import COMMANDS, SBATCH, python_path

from .runs import Folder
from .study import Run

SCRIPT = SBATCH / "ablate.sbatch"
LARGEST_ARRAY = 1000

THEN = """\
{lines}
cd {folder}
PYTHONPATH={path} exec {command}
"""


@dataclass(frozen=True)
class Jobs:
    """The two files of a stage: `array`, submitted with `arguments`, and `then`, which runs after it, however it
    ends."""

    array: Path
    then: Path
    arguments: list[str]

    def submit(self) -> list[str]:
        """Returns the ids of the two jobs. Raises OSError where sbatch is missing or refuses."""
        environment = {"PYTHONPATH": python_path(), "COMMANDS": COMMANDS, "PYTHON": sys.executable}
        first = sbatch([str(self.array), *self.arguments], environment)
        return [first, sbatch([f"--dependency=afterany:{first}", str(self.then)])]

    def describe(self) -> str:
        """What `submit` would do, with the files that it would submit."""
        first = f"sbatch --parsable {shlex.join([str(self.array), *self.arguments])}"
        second = f"sbatch --parsable --dependency=afterany:JOB {shlex.quote(str(self.then))}"
        return "\n".join([f"$ {first}", self.array.read_text(), f"$ {second}", self.then.read_text()])


def write(
    stage: str, runs: Sequence[Run], folder: Folder, options: Mapping[str, Any], parallel: int | None, after: list[str]
) -> Jobs:
    """Write the files of a stage. `parallel` bounds the tasks at once; `after`: arguments of `scripts.ablate` for the
    next stage."""
    here = folder.path / "slurm"
    here.mkdir(parents=True, exist_ok=True)
    for run in runs:
        folder.prepare(run)
    tasks, limit = min(len(runs), LARGEST_ARRAY), f"%{parallel}" if parallel else ""
    listed = here / f"{stage}.runs"
    listed.write_text("".join(f"{folder.config(run)}\t{folder.run(run)}\n" for run in runs))
    name = f"{folder.path.name}-{stage}"
    array = {"job-name": name, "array": f"0-{tasks - 1}{limit}", "output": here / "%A_%a.log"} | dict(options)
    then = {"job-name": f"{name}-then", "output": here / "%j.log"}
    then |= {key: options[key] for key in ("partition", "account", "qos") if key in options}
    jobs = Jobs(here / f"{stage}.sbatch", here / f"{stage}-then.sbatch", [str(listed), str(tasks)])
    jobs.array.write_text(_with_lines(SCRIPT.read_text(), array))
    command = shlex.join([sys.executable, "-m", f"{COMMANDS}.ablate", *after])
    lines = "\n".join(["#!/bin/bash", *_lines(then)])
    place, path = shlex.quote(os.getcwd()), shlex.quote(python_path())
    jobs.then.write_text(THEN.format(lines=lines, folder=place, path=path, command=command))
    return jobs


def _lines(options: Mapping[str, Any]) -> list[str]:
    return [f"#SBATCH {flag}" for flag in flags(options)]


def _with_lines(script: str, options: Mapping[str, Any]) -> str:
    """Added after the script's own #SBATCH lines: the last of a kind counts."""
    lines = script.splitlines()
    place = 1 + max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    return "\n".join([*lines[:place], *_lines(options), *lines[place:], ""])
