"""Where this project's own files lie: beside its packages in a clone, within `areal_like` where it is installed."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent
"""The folder that must be on `sys.path`: the clone, or site-packages."""
INSTALLED = (PACKAGE / "configs").is_dir()
CONFIGS = (PACKAGE if INSTALLED else REPOSITORY) / "configs"
COMMANDS = "areal_like.commands" if INSTALLED else "scripts"
"""The package of the commands: `python -m COMMANDS.train`."""
SBATCH = (PACKAGE / "commands" if INSTALLED else REPOSITORY / "scripts") / "slurm"


def python_path() -> str:
    """PYTHONPATH for a process that is to import this project, wherever it starts."""
    before = os.environ.get("PYTHONPATH", "")
    return f"{REPOSITORY}{os.pathsep}{before}" if before else str(REPOSITORY)
