"""The simulator, calibrated on a run with the embedded engine, against others: `python -m scripts.bench.calibrated
[--rounds R] [--runs FOLDER] [--json FILE]`.

A round is a run of 12 steps of each setting, one after the other, so that a slow hour meets them all. The costs of a
round's sync run, and those of its async one, predict all its settings. Per setting: the mean of what was measured, ±
half of its range, and the error of the mean prediction, with the 95 % interval of the rounds' errors. `--runs` keeps
the runs; those that are there are not made again. A round takes five minutes; nothing else should run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from areal_like.config import run_config as configs
from areal_like.config.run_config import ConfigError
from areal_like.errors import UserError
from areal_like.run.run_folder import SUMMARY

from ..analysis.intervals import bootstrap
from ..console import output
from ..console.arguments import interrupted, positive, refuse
from ..simulation import calibration, results, roofline
from ..simulation.run import Simulation
from .figures import bench_parser
from .simulation import FIGURES, compared, trained

CONFIG = "configs/quickstart.yaml"
COMMON = ["actors.count=1", "eval.prompts=0", "run.target_reward=null", "groups_per_batch=16", "run.steps=12"]
COMMON += ["sampling.max_new_tokens=420"]
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
    """A run of a round, made unless it is there. Nothing is left of one that fails or is interrupted."""
    name = f"{setting.replace(',', '').replace(' ', '-')}-{number}"
    made = folder / name
    if made.exists() and not (made / SUMMARY).exists():
        refuse(f"{made} is there, but holds no run that has ended: remove it")
    if not made.exists():
        try:
            trained([CONFIG, f"run.dir={folder}", f"run.name={name}", *COMMON, *SETTINGS[setting]])
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return made


def predicted(run: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Setting → figures of a simulated run with the costs of `run`."""
    file = folder / f"{run.name}.yaml"
    file.write_text(calibration.written(calibration.calibrate(run)))
    found = {}
    for setting, overrides in SETTINGS.items():
        config = configs.load([CONFIG, *COMMON, *overrides])
        found[setting] = results.figures(Simulation(config, roofline.known(config, file, None)).run())
    return found


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser("calibrated", __doc__)
    parser.add_argument("--rounds", type=positive, default=6, metavar="R", help="default: 6")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs here")
    args = parser.parse_args(argv)
    measured: dict[str, Figures] = {setting: [] for setting in SETTINGS}
    foretold: dict[str, dict[str, Figures]] = {source: {setting: [] for setting in SETTINGS} for source in SOURCES}
    try:
        _measure(args, measured, foretold)
    except KeyboardInterrupt:
        kept = [f"the runs so far are in {args.runs}"] if args.runs else []
        kept += [f"the rounds so far are in {args.json}"] if args.json else []
        return interrupted(", ".join(kept) or "nothing is kept")
    _tell(measured, foretold)
    return 0


def _measure(args: argparse.Namespace, measured: dict[str, Figures], foretold: dict[str, dict[str, Figures]]) -> None:
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


def _tell(measured: Mapping[str, Figures], foretold: Mapping[str, Mapping[str, Figures]]) -> None:
    console = output.console(150)
    shown = output.table(
        "samples per second", "setting", "measured", *(f"calibrated on {source}" for source in SOURCES)
    )
    for setting, there in measured.items():
        cells = [error_of("samples_per_second", foretold[source][setting], there) for source in SOURCES]
        speeds = [figures["samples_per_second"] for figures in there]
        half = (max(speeds) - min(speeds)) / 2 / mean(speeds)
        scatter = f" ±{half:.0%}" if len(speeds) > 1 else ""
        shown.add_row(setting, f"{mean(speeds):.1f}{scatter}", *cells)
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
    """The error of the mean prediction, and the interval of the rounds' errors, if there are several."""
    each = [results.difference(name, ours[name], theirs[name]) for ours, theirs in zip(here, there, strict=True)]
    found = f"{compared(name, here, there)[0]:+.1%}"
    if len(each) == 1:
        return found
    spread = bootstrap(each)
    return f"{found} [{spread.low:+.1%}, {spread.high:+.1%}]"


if __name__ == "__main__":
    sys.exit(main())
