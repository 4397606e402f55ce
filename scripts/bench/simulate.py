"""The simulator against real runs: `python -m scripts.bench.simulate [--repeats R] [--actors-10000] [--json FILE]`.

Real processes with timed engine and learner, and the same configs in virtual time. Errors of shares, and of staleness
below 1, are differences; the others are relative. Metrics: `samples_error_max`, `staleness_error_max`, `idle_error_max`
(largest of all settings); with `--actors-10000`: `actors_10000_minutes`, `actors_10000_gb`.
"""

import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from areal_like.config import run_config as configs

from ..console.arguments import positive
from ..console.output import console, table
from ..simulation import costs
from ..simulation.run import SHARES, Simulation, difference, figures_of
from .figures import bench_parser, tell, trained
from .modes import LONGTAIL

CONFIG = "configs/bench/modes.yaml"
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
MANY_OVERRIDES = [
    "actors.count=10000",
    "groups_per_batch=16384",
    "run.steps=10",
    "sampling.max_new_tokens=8192",
    "scheduler.max_staleness=8",
    "buffer.max_bytes=400000000000",
    "launcher.ready_timeout=1e6",
]

Figures = list[dict[str, float]]


def real(overrides: Sequence[str], run: Path) -> dict[str, float]:
    trained(run, [CONFIG, *overrides])
    return figures_of(run)


def simulated(overrides: Sequence[str]) -> Figures:
    config = configs.load([CONFIG, *overrides])
    cost = costs.of_timed(config)
    return [Simulation(config, cost, history).run().figures for history in range(HISTORIES)]


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
    found = dict.fromkeys(FIGURES.values(), 0.0)
    shown = table("error of the simulated mean, ± real scatter", "setting", *FIGURES, "real samples/s")
    with tempfile.TemporaryDirectory(prefix="simulate-") as place:
        for number, (setting, overrides) in enumerate(SETTINGS.items()):
            there = [real(overrides, Path(place) / f"{number}-{repeat}") for repeat in range(repeats)]
            here, cells = simulated(overrides), []
            for name, metric in FIGURES.items():
                values = [each[name] for each in there]
                middle, half = mean(values), (max(values) - min(values)) / 2
                error = difference(name, mean(each[name] for each in here), middle)
                found[metric] = max(found[metric], abs(error))
                cells.append(f"{error:+.1%} ±{abs(difference(name, middle + half, middle)):.1%}")
            shown.add_row(setting, *cells, f"{mean(each['samples_per_second'] for each in there):.0f}")
    console(150).print(shown)
    return found


def main() -> None:
    parser = bench_parser("simulate", __doc__)
    parser.add_argument("--repeats", type=positive, default=2, metavar="R", help="real runs per setting (default: 2)")
    parser.add_argument("--actors-10000", action="store_true", help="simulate 10,000 actors instead")
    args = parser.parse_args()
    tell(many() if args.actors_10000 else errors(args.repeats), args.json)


if __name__ == "__main__":
    main()
