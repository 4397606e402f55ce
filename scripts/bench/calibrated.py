"""The simulator, calibrated on a run with the embedded engine, against others: `python -m scripts.bench.calibrated
[--rounds R] [--runs FOLDER] [--json FILE]`.

A round is a run of 12 steps of each setting, one after the other, so that a slow hour meets them all. The costs of a
round's sync run, and those of its async one, predict all its settings. Per setting: the mean of what was measured, ±
half of its range, and the error of the mean prediction, with the 95 % interval of the rounds' errors. `--runs` keeps
the runs; those that are there are not made again. A round takes five minutes; nothing else should run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from areal_like import config as configs
from areal_like.config import ConfigError
from areal_like.errors import UserError
from areal_like.places import REPOSITORY
from areal_like.run_folder import SUMMARY

from .. import output
from ..arguments import positive, refuse
from ..comparison import bootstrap
from ..simulation import calibration, results, roofline
from ..simulation.run import Simulation
from .figures import bench_parser
from .simulation import FIGURES, compared

CONFIG = "configs/quickstart.yaml"
COMMON = ["actors.count=1", "eval.prompts=0", "run.target_reward=null", "groups_per_batch=16", "run.steps=12"]
COMMON += ["sampling.max_tokens=420"]
COMMON += ["task={name: copy, digits: 8, length_trace: {median: 60, sigma: 0.6, noise: 0.5, max: 400}}"]
SETTINGS = {
    "sync": ["mode=sync"],
    "async 1": ["scheduler.max_staleness=1"],
    "async 4": ["scheduler.max_staleness=4"],
    "async 1, 16 slots": ["scheduler.max_staleness=1", "engine.slots=16"],
}
SOURCES = ("sync", "async 1")
"""Settings whose runs are calibrated on."""
GOAL = 0.1

Figures = list[dict[str, float]]
"""Of each round."""


def real(setting: str, number: int, folder: Path) -> Path:
    """A run of a round, made unless it is there."""
    name = f"{setting.replace(',', '').replace(' ', '-')}-{number}"
    if not (folder / name / SUMMARY).exists():
        command = [sys.executable, "-m", "scripts.train", CONFIG, "--plain", f"run.dir={folder}", f"run.name={name}"]
        done = subprocess.run(
            [*command, *COMMON, *SETTINGS[setting]], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return folder / name


def predicted(run: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Setting → figures of a simulated run with the costs of `run`."""
    file = folder / f"{run.name}.yaml"
    file.write_text(calibration.written(calibration.calibrate(run)))
    found = {}
    for setting, overrides in SETTINGS.items():
        config = configs.load([CONFIG, *COMMON, *overrides])
        found[setting] = results.figures(Simulation(config, roofline.known(config, file, None)).run())
    return found


def main(argv: list[str] | None = None) -> None:
    parser = bench_parser("calibrated", __doc__)
    parser.add_argument("--rounds", type=positive, default=6, metavar="R", help="default: 6")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs here")
    args = parser.parse_args(argv)
    measured: dict[str, Figures] = {setting: [] for setting in SETTINGS}
    foretold: dict[str, dict[str, Figures]] = {source: {setting: [] for setting in SETTINGS} for source in SOURCES}
    with tempfile.TemporaryDirectory(prefix="calibrated-") as scratch:
        folder = (args.runs or Path(scratch)).absolute()
        for number in range(1, args.rounds + 1):
            try:
                runs = {setting: real(setting, number, folder) for setting in SETTINGS}
                for setting, run in runs.items():
                    measured[setting].append(results.of_run(run))
                for source in SOURCES:
                    for setting, figures in predicted(runs[source], Path(scratch)).items():
                        foretold[source][setting].append(figures)
            except (ConfigError, UserError, OSError, ValueError) as error:
                refuse(error)
            print(f"round {number} of {args.rounds}", file=sys.stderr)
            output.write_json(args.json, {"measured": measured, "predicted": foretold})
    _tell(measured, foretold)


def _tell(measured: Mapping[str, Figures], foretold: Mapping[str, Mapping[str, Figures]]) -> None:
    console = output.console(150)
    shown = output.table(
        "samples per second", "setting", "measured", *(f"calibrated on {source}" for source in SOURCES)
    )
    for setting, there in measured.items():
        cells = [error_of("samples_per_second", foretold[source][setting], there) for source in SOURCES]
        speeds = [figures["samples_per_second"] for figures in there]
        half = (max(speeds) - min(speeds)) / 2 / mean(speeds)
        shown.add_row(setting, f"{mean(speeds):.1f} ±{half:.0%}", *cells)
    console.print(shown)
    for name in FIGURES:
        errors = {
            f"{setting}, calibrated on {source}": compared(name, foretold[source][setting], there)[0]
            for source in SOURCES
            for setting, there in measured.items()
            if setting != source
        }
        worst = max(errors, key=lambda which: abs(errors[which]))
        good = sum(abs(error) <= GOAL for error in errors.values())
        console.print(
            f"{name}: {good} of {len(errors)} that were not calibrated on are within {GOAL:.0%}; "
            f"worst {errors[worst]:+.1%}, {worst}"
        )


def error_of(name: str, here: Sequence[dict[str, float]], there: Sequence[dict[str, float]]) -> str:
    """The error of the mean prediction, and the interval of the rounds' errors."""
    each = [results.difference(name, ours[name], theirs[name]) for ours, theirs in zip(here, there, strict=True)]
    spread = bootstrap(each)
    return f"{compared(name, here, there)[0]:+.1%} [{spread.low:+.1%}, {spread.high:+.1%}]"


if __name__ == "__main__":
    main()
