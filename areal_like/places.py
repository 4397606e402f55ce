"""Where this project's own files lie: beside its packages in a clone, within `areal_like` where it is installed."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
IMPORTED_FROM = PACKAGE.parent
"""The folder that must be on `sys.path`: the clone, or site-packages."""
INSTALLED = (PACKAGE / "configs").is_dir()
CONFIGS = (PACKAGE if INSTALLED else IMPORTED_FROM) / "configs"
COMMANDS = "areal_like.commands" if INSTALLED else "scripts"
"""The package of the commands: `python -m COMMANDS.train`."""
SBATCH = (PACKAGE / "commands" if INSTALLED else IMPORTED_FROM / "scripts") / "slurm"


def python_path() -> str:
    """PYTHONPATH for a process that is to import this project, wherever it starts."""
    before = os.environ.get("PYTHONPATH", "")
    return f"{IMPORTED_FROM}{os.pathsep}{before}" if before else str(IMPORTED_FROM)
