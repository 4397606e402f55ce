"""The simulator against real runs: `python -m scripts.bench.simulate [--repeats R] [--actors-10000] [--json FILE]`.

Real processes, sockets, buffer and weight updates with timed engine and learner, and the same configs in virtual time.
Per setting: errors of the simulated means, ± half the range of the real runs. Errors of shares, and of staleness below
1, are differences; the others are relative. `--actors-10000` simulates 10 train steps of 10,000 actors instead.

samples_error_max, staleness_error_max, idle_error_max    largest errors of all settings
actors_10000_minutes, actors_10000_gb                     wall-clock and peak memory
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from areal_like.config import run_config as configs
from areal_like.places import REPOSITORY

from ..console import output
from ..console.arguments import interrupted, positive
from ..simulation import costs
from ..simulation.run import SHARES, Simulation, difference, figures_of
from .figures import bench_parser, tell

CONFIG = "configs/bench/modes.yaml"
LONGTAIL = ["engine.median=60", "engine.sigma=1.0", "engine.noise=0.3", "learner.base=0.105"]
SETTINGS = {
    "equal lengths, sync": ["engine.median=200", "learner.base=0.2", "mode=sync"],
    "equal lengths, async 1": ["engine.median=200", "learner.base=0.2", "scheduler.max_staleness=1"],
    "long tail, sync": [*LONGTAIL, "mode=sync"],
    "long tail, tail batching": [*LONGTAIL, "mode=sync", "scheduler.oversample_prompts=1.25"],
    "long tail, async 1": [*LONGTAIL, "scheduler.max_staleness=1"],
    "long tail, async 4": [*LONGTAIL, "scheduler.max_staleness=4"],
    "long tail, async 4, waiting": [*LONGTAIL, "scheduler.max_staleness=4", "engine.interruptible=false"],
    "cost per sequence, async 4": [*LONGTAIL, "engine.per_sequence=2e-6", "scheduler.max_staleness=4"],
}
FIGURES = {
    "samples_per_second": "samples_error_max",
    "staleness_mean": "staleness_error_max",
    **dict.fromkeys(SHARES, "idle_error_max"),
}
"""Compared figure → its metric."""
HISTORIES = 8
MANY = 10_000
MANY_OVERRIDES = [
    f"actors.count={MANY}",
    "groups_per_batch=16384",
    "run.steps=10",
    "sampling.max_new_tokens=8192",
    "scheduler.max_staleness=8",
    "buffer.max_bytes=400000000000",
    "launcher.ready_timeout=1e6",
]

Figures = list[dict[str, float]]


def real(overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """Make a run to its end. At Ctrl-C it is waited for: it gets the signal, too, and ends its processes."""
    name = f"run-{len(list(folder.iterdir()))}"
    words = ["--plain", CONFIG, f"run.dir={folder}", f"run.name={name}", *overrides]
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.train", *words],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        log, _ = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if process.returncode:
        sys.exit(f"train {' '.join(words)} failed:\n{log.decode(errors='replace')}")
    return figures_of(folder / name)


def simulated(overrides: Sequence[str]) -> Figures:
    config = configs.load([CONFIG, *overrides])
    cost = costs.of_timed(config)
    cost.sample.cores = len(os.sched_getaffinity(0))  # the real processes share them
    return [Simulation(config, cost, history).run().figures for history in range(HISTORIES)]


def compared(name: str, here: Figures, there: Figures) -> tuple[float, float]:
    """Error of the simulated mean of a figure, and half of the range of the real ones."""
    found = [each[name] for each in there]
    middle, half = mean(found), (max(found) - min(found)) / 2
    return difference(name, mean(each[name] for each in here), middle), abs(difference(name, middle + half, middle))


def many() -> dict[str, float]:
    cost = costs.Costs(
        costs.Engine(base=0.018, per_sequence=2e-5, per_token=2e-8, apply=0.4),
        costs.Answers(median=1500, sigma=0.8, noise=0.5, prompt=180),
        costs.LearnerCost(base=2.0),
        costs.WeightsCost(encode=0.001, fetch=0.003),
        buffer=2e-5,
    )
    begin = time.perf_counter()
    Simulation(configs.load([CONFIG, *MANY_OVERRIDES]), cost).run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"actors_10000_minutes": (time.perf_counter() - begin) / 60, "actors_10000_gb": peak / 1e9}


def errors(repeats: int) -> dict[str, float]:
    """Print a row per setting; return the largest errors."""
    found = dict.fromkeys(FIGURES.values(), 0.0)
    table = output.table("error of the simulated mean, ± real scatter", "setting", *FIGURES, "real samples/s")
    with tempfile.TemporaryDirectory(prefix="simulate-") as place:
        for setting, overrides in SETTINGS.items():
            there = [real(overrides, Path(place)) for _ in range(repeats)]
            here, cells = simulated(overrides), []
            for name, metric in FIGURES.items():
                error, scatter = compared(name, here, there)
                found[metric] = max(found[metric], abs(error))
                cells.append(f"{error:+.1%} ±{scatter:.1%}")
            table.add_row(setting, *cells, f"{mean(each['samples_per_second'] for each in there):.0f}")
    output.console(150).print(table)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser("simulate", __doc__)
    parser.add_argument("--repeats", type=positive, default=2, metavar="R", help="real runs per setting (default: 2)")
    parser.add_argument("--actors-10000", action="store_true", help="simulate 10,000 actors instead")
    args = parser.parse_args(argv)
    try:
        tell(many() if args.actors_10000 else errors(args.repeats), args.json)
    except KeyboardInterrupt:
        return interrupted("nothing is kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
