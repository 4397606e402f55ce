"""Paths of this project's files: next to its packages in a clone, within `areal_like` where it is installed."""

import os
import sys
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
    """PYTHONPATH for a process that must import what this one can, wherever it starts: this project, and the user's own
    modules, from the current folder or from this process's `sys.path`."""
    own = [os.path.abspath(path) for path in sys.path]  # "" is the current folder
    of_python = tuple({f"{prefix}{os.sep}" for prefix in (sys.prefix, sys.base_prefix)})
    own = [path for path in own if not path.startswith(of_python)]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(path for path in (str(REPOSITORY), *own, *before) if path))
