"""The simulator against real runs: `python -m scripts.bench.simulation [--cells TEXT] [--json FILE]`.

Real processes, sockets, buffer and weight updates with timed engine and learner, and the same configs in virtual time.
Per cell the error of samples per second, mean and p95 staleness, and idle shares; the worst cell is named. Errors of
shares, and of ages below 1, are differences; the others are relative.

balanced   all answers equally long; generating a batch takes as long as training on it
longtail   log-normal answer lengths (sigma 1 over prompts, 0.3 within)
decode     longtail, with a decode step that costs 2 us more per sequence
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from areal_like import config as configs
from areal_like.places import REPOSITORY

from .. import output
from ..simulation import costs, results
from ..simulation.run import Simulation
from .figures import bench_parser

CONFIG = "configs/bench/modes.yaml"
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
    command = [sys.executable, "-m", "scripts.train", CONFIG, "--plain", f"run.dir={folder}", f"run.name={name}"]
    done = subprocess.run([*command, *overrides], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return results.of_run(folder / name)


def simulated(overrides: list[str]) -> dict[str, float]:
    config = configs.load([CONFIG, *overrides])
    cost = costs.of_timed(config)
    cost.sample.cores = len(os.sched_getaffinity(0))  # the real processes share them
    return results.figures(Simulation(config, cost).run())


def main() -> None:
    parser = bench_parser("simulation", __doc__)
    parser.add_argument("--cells", default="", metavar="TEXT", help="only cells with this in their name")
    args = parser.parse_args()
    console = output.console()
    names = ("samples_per_second", "staleness_mean", "staleness_p95", "actor_idle_share", "learner_idle_share")
    table = output.table(
        "error of the simulation", "cell", "samples/s", "staleness", "p95", "idle: actors", "learner", "real samples/s"
    )
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="simulation-") as folder:
        for name, overrides in cells().items():
            if args.cells not in name:
                continue
            there, here = real(overrides, Path(folder)), simulated(overrides)
            found[name] = {each: results.difference(each, here[each], there[each]) for each in names}
            shown = [results.error(each, here[each], there[each]) for each in names]
            table.add_row(name, *shown, f"{there['samples_per_second']:.0f}")
            console.print(f"  {name}: {', '.join(shown)}")
    console.print(table)
    for each in names:
        worst = max(found, key=lambda name: abs(found[name][each]))
        console.print(f"worst {each}: {found[worst][each]:+.1%}, {worst}")
    output.write_json(args.json, found)


if __name__ == "__main__":
    main()
