"""The simulator against real runs: `python -m scripts.bench.simulation [--cells TEXT] [--repeats R] [--histories H]
[--real FILE] [--json FILE]`.

Real processes, sockets, buffer and weight updates with timed engine and learner, and the same configs in virtual time.
Per cell the error of the simulated mean against the real mean, of samples per second, mean and p95 staleness, and idle
shares; beside it the scatter of the real runs, half of their range. Errors of shares, and of ages below 1, are
differences, and so is their scatter; the others are relative. The worst cell is named. `--real` takes the real figures
from what an earlier `--json` has written, and makes no real runs.

balanced   all answers equally long; generating a batch takes as long as training on it
longtail   log-normal answer lengths (sigma 1 over prompts, 0.3 within)
decode     longtail, with a decode step that costs 2 us more per sequence
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from rich.console import Console

from areal_like.config import run_config as configs
from areal_like.places import REPOSITORY

from ..console import output
from ..console.arguments import interrupted, positive, refuse
from ..simulation import costs, results
from ..simulation.run import Simulation
from .figures import bench_parser

CONFIG = "configs/bench/modes.yaml"
FIGURES = {
    "samples_per_second": "samples/s",
    "staleness_mean": "staleness",
    "staleness_p95": "p95",
    "actor_idle_share": "idle: actors",
    "learner_idle_share": "learner",
}
"""What is compared → its column."""
GOAL = 0.05
SCENARIOS = {
    "balanced": ["engine.median=200", "engine.sigma=0", "engine.noise=0", "learner.base=0.2"],
    "longtail": ["engine.median=60", "engine.sigma=1.0", "engine.noise=0.3", "learner.base=0.105"],
    "decode": [
        "engine.median=60",
        "engine.sigma=1.0",
        "engine.noise=0.3",
        "engine.per_sequence=2e-6",
        "learner.base=0.105",
    ],
}
MODES = {
    "sync": ["mode=sync"],
    "sync, tail batching": ["mode=sync", "scheduler.oversample_prompts=1.25", "scheduler.oversample_responses=1.25"],
    "sync, sagc": ["mode=sync", "sizing={name: sagc}"],
    "sync, stream": ["mode=sync", "learner.stream=true", "learner.base=0.02", "learner.per_sample=0.0008"],
    "async 0": ["scheduler.max_staleness=0"],
    "async 1": ["scheduler.max_staleness=1"],
    "async 4": ["scheduler.max_staleness=4"],
    "async inf": ["scheduler.max_staleness=inf"],
    "async 4, waiting": ["scheduler.max_staleness=4", "engine.interruptible=false"],
}
ACTORS = {2: ["actors.count=2"], 8: ["actors.count=8", "engine.slots=16"]}


def cells() -> dict[str, list[str]]:
    """Name → overrides."""
    return {
        f"{scenario}, {mode}, {count} actors": [*settings, *how, *actors]
        for scenario, settings in SCENARIOS.items()
        for mode, how in MODES.items()
        for count, actors in ACTORS.items()
        if scenario != "decode" or count == 2
    }


def real(overrides: list[str], folder: Path) -> dict[str, float]:
    name = f"run-{len(list(folder.iterdir()))}"
    trained([CONFIG, f"run.dir={folder}", f"run.name={name}", *overrides])
    return results.of_run(folder / name)


def trained(words: Sequence[str]) -> None:
    """Make a run to its end. At Ctrl-C it is waited for: it gets the signal, too, and ends its processes."""
    command = [sys.executable, "-m", "scripts.train", "--plain", *words]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # if it was sent to this process alone
        process.communicate()
        raise
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{said}")


def simulated(overrides: list[str], histories: int) -> list[dict[str, float]]:
    config = configs.load([CONFIG, *overrides])
    cost = costs.of_timed(config)
    cost.sample.cores = len(os.sched_getaffinity(0))  # the real processes share them
    return [results.figures(Simulation(config, cost, history=history).run()) for history in range(histories)]


def compared(name: str, here: Sequence[dict[str, float]], there: Sequence[dict[str, float]]) -> tuple[float, float]:
    """The error of the simulated mean of a figure, and half of the range of the real ones: relative where the error
    is."""
    real = [each[name] for each in there]
    middle, half = mean(real), (max(real) - min(real)) / 2
    error = results.difference(name, mean(each[name] for each in here), middle)
    return error, abs(results.difference(name, middle + half, middle))


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser("simulation", __doc__)
    parser.add_argument("--cells", default="", metavar="TEXT", help="only cells with this in their name")
    parser.add_argument("--repeats", type=positive, default=3, metavar="R", help="real runs of each cell (default: 3)")
    parser.add_argument(
        "--histories", type=positive, default=16, metavar="H", help="simulated runs of each cell (default: 16)"
    )
    parser.add_argument("--real", type=Path, metavar="FILE", help="real figures, as an earlier --json has written them")
    args = parser.parse_args(argv)
    earlier = json.loads(args.real.read_text()) if args.real else {}
    chosen = {name: overrides for name, overrides in cells().items() if args.cells in name}
    if missing := [name for name in chosen if args.real and name not in earlier]:
        refuse(f"{args.real} has no {', '.join(missing)}")
    console = output.console(150)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="simulation-") as place:
            for name, overrides in chosen.items():
                folder = Path(place)
                there = earlier[name]["real"] if args.real else [real(overrides, folder) for _ in range(args.repeats)]
                found[name] = {"real": there, "simulated": simulated(overrides, args.histories)}
                console.print(f"  {name}: {', '.join(_cells(found[name]))}")
                output.write_json(args.json, found)
    except KeyboardInterrupt:
        return interrupted(f"the cells so far are in {args.json}" if args.json else "nothing is kept")
    _tell(console, found)
    return 0


def _cells(cell: dict[str, list[dict[str, float]]]) -> list[str]:
    each = (compared(name, cell["simulated"], cell["real"]) for name in FIGURES)
    return [f"{error:+.1%} ±{scatter:.1%}" for error, scatter in each]


def _tell(console: Console, found: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    table = output.table("error of the simulated mean, ± real scatter", "cell", *FIGURES.values(), "real samples/s")
    for name, cell in found.items():
        table.add_row(name, *_cells(cell), f"{mean(each['samples_per_second'] for each in cell['real']):.0f}")
    console.print(table)
    for each in FIGURES:
        errors = {name: compared(each, cell["simulated"], cell["real"]) for name, cell in found.items()}
        worst = max(errors, key=lambda name: abs(errors[name][0]))
        good = sum(abs(error) <= max(GOAL, scatter) for error, scatter in errors.values())
        console.print(
            f"{each}: {good} of {len(found)} within {GOAL:.0%} or the real scatter; "
            f"worst {errors[worst][0]:+.1%} ±{errors[worst][1]:.1%}, {worst}"
        )


if __name__ == "__main__":
    sys.exit(main())
