"""An ablation as Slurm array jobs. Each stage is an array and a job that follows it.

    tune.sbatch (array) → tune-then.sbatch: picks, and submits → main.sbatch (array) → main-then.sbatch: the results

All files are in `slurm/` of the ablation's folder, which all nodes must see. A run that Slurm ends early is queued
again and resumes. A task makes runs of a list, named by its content: a later submission leaves it alone.
"""

import hashlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.launch.slurm import flags, sbatch
from areal_like.places import COMMANDS, SBATCH, python_path

from .runs import Folder
from .study import Run

SCRIPT = SBATCH / "ablate.sbatch"
LARGEST_ARRAY = 1000


class Jobs:
    """The jobs of a stage: `array` with its `arguments`, then `then`. `submit` writes the `files`: path → content.
    `parallel` bounds the tasks at once; `after`: arguments of `scripts.ablate` for the next stage."""

    def __init__(
        self,
        stage: str,
        runs: Sequence[Run],
        folder: Folder,
        options: Mapping[str, Any],
        parallel: int | None,
        after: list[str],
    ):
        here, name = folder.path / "slurm", f"{folder.path.name}-{stage}"
        tasks, limit = min(len(runs), LARGEST_ARRAY), f"%{parallel}" if parallel else ""
        lines = "".join(f"{folder.config(run)}\t{folder.run(run)}\n" for run in runs)
        listed = here / f"{stage}-{hashlib.sha256(lines.encode()).hexdigest()[:8]}.runs"
        array = {"job-name": name, "array": f"0-{tasks - 1}{limit}", "output": here / "%A_%a.log"} | dict(options)
        then = {"job-name": f"{name}-then", "output": here / "%j.log"}
        then |= {key: options[key] for key in ("partition", "account", "qos") if key in options}
        command = shlex.join([sys.executable, "-m", f"{COMMANDS}.ablate", *after])
        place, path = shlex.quote(os.getcwd()), shlex.quote(python_path())
        self.array, self.then = here / f"{stage}.sbatch", here / f"{stage}-then.sbatch"
        self.arguments = [str(listed), str(tasks)]
        self.files: dict[Path, str] = {
            listed: lines,
            self.array: _with_lines(SCRIPT.read_text(encoding="utf-8"), array),
        }
        head = _with_lines("#!/bin/bash", then)
        self.files[self.then] = f"{head}\ncd {place}\nPYTHONPATH={path} exec {command}\n"

    def submit(self) -> list[str]:
        """Returns the ids of the two jobs. Raises OSError where sbatch is missing or refuses."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # A list that tasks may be reading is never cut short.
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
        environment = {"PYTHONPATH": python_path(), "COMMANDS": COMMANDS, "PYTHON": sys.executable}
        first = sbatch([str(self.array), *self.arguments], environment)
        return [first, sbatch([f"--dependency=afterany:{first}", str(self.then)])]

    def describe(self) -> str:
        first = f"sbatch --parsable {shlex.join([str(self.array), *self.arguments])}"
        second = f"sbatch --parsable --dependency=afterany:JOB {shlex.quote(str(self.then))}"
        return "\n".join([f"$ {first}", self.files[self.array], f"$ {second}", self.files[self.then]])


def _with_lines(script: str, options: Mapping[str, Any]) -> str:
    """Added after the script's own #SBATCH lines: the last of a kind counts."""
    lines = script.splitlines()
    place = 1 + max(number for number, line in enumerate(lines) if line.startswith(("#!", "#SBATCH")))
    return "\n".join([*lines[:place], *(f"#SBATCH {flag}" for flag in flags(options)), *lines[place:], ""])
