"""`simulate: true` in a config: while a run starts, simulate it; when it has ended, say how far off that was.

The simulation is a process of its own, at the lowest priority, so the start waits for nothing. It writes
RUN/prediction.json. The summary then has `prediction`: figure → what was predicted, what was measured, and the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from areal_like.config.run_config import Config, ConfigError
from areal_like.places import COMMANDS, python_path
from areal_like.run.run_folder import CONFIG, NEXT

FILE = "prediction.json"
LOG = "prediction.log"
PATIENCE = 5.0
"""Seconds that the end of a run waits for a prediction."""
LEFT_OUT = ("seconds",)
"""A prediction does not know when a run stops early."""


def check(config: Config) -> None:
    """Raises ConfigError unless it is known what the run's parts cost, or if `simulate` is neither."""
    if not config.simulate:
        return
    from ..simulation import costs

    if config.simulate is not True and not isinstance(config.simulate, str):
        raise ConfigError(
            f"simulate={config.simulate}: true, or a file of costs (`areal-like calibrate RUN`)", "simulate"
        )
    costs.check_rollouts(config)
    if config.simulate is True:
        costs.of_timed(config)
    else:
        costs.read(Path(config.simulate))


def begin(config: Config, folder: Path) -> subprocess.Popen[bytes] | None:
    """Start the prediction of a new run, if its config asks for one."""
    if not config.simulate or (folder / FILE).exists() or (folder / NEXT).exists():
        return None
    given = [] if config.simulate is True else ["--costs", os.path.abspath(str(config.simulate))]
    files = [str(folder / CONFIG), "resume=null", *given, "--json", str(folder / FILE)]
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-m", f"{COMMANDS}.simulate", *files],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": python_path()},
        )


def end(process: subprocess.Popen[bytes] | None, patience: float = 0.0) -> None:
    """End the prediction if it has not ended after `patience` seconds."""
    if process is None:
        return
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def missing(folder: Path) -> str:
    """Why there is no prediction, if there is none."""
    if (folder / FILE).is_file():
        return ""
    said = (folder / LOG).read_text(errors="replace").strip().splitlines()
    why = said[-1] if said else f"it had not ended {PATIENCE:g} s after the run"
    return f"simulate: no prediction was made ({why}); see {folder / LOG}"


def compared(folder: Path) -> dict[str, dict[str, float]]:
    """Figure → predicted, measured, error (`simulation.results.difference`). Empty without a prediction."""
    from ..simulation import results

    if not (folder / FILE).is_file():
        return {}
    predicted: dict[str, Any] = json.loads((folder / FILE).read_text())
    try:
        measured = results.of_run(folder)
    except (ConfigError, KeyError):  # a run that trained nothing
        return {}
    names = [name for name in predicted if name in measured and name not in LEFT_OUT]
    return {
        name: {
            "predicted": predicted[name],
            "measured": measured[name],
            "error": results.difference(name, predicted[name], measured[name]),
        }
        for name in names
    }


def lines(found: dict[str, dict[str, float]]) -> dict[str, str]:
    """For a person: the line of a summary, with prediction, measurement and error of each figure."""
    if not found:
        return {}
    from ..simulation.results import error, shown

    words = [
        f"{name.replace('_', ' ')} {shown(name, each['predicted'])}, measured {shown(name, each['measured'])} "
        f"({error(name, each['predicted'], each['measured'])})"
        for name, each in found.items()
    ]
    return {"prediction": "; ".join(words)}
