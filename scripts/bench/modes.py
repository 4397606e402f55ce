"""Synchronous against asynchronous training, and techniques for rounds: `python -m scripts.bench.modes [--json FILE]`.

Real processes, sockets, buffer and weight updates; accelerators are simulated (`engine=timed`, `learner=timed`), so two
cores suffice. Trained samples per second, plain sync = 1.0. Scenarios: `balanced` (equal lengths), `longtail`
(log-normal lengths, the same mean cost on both sides), `decode` (longtail, with a cost per sequence), `rounds` (p99/p50
= 9, as RollPacker's, arXiv 2509.21009; tail batching starts a quarter more prompts and responses).

Each run is simulated (`areal-like simulate`), too. Metrics: `MODE_SCENARIO` (samples per second),
`MODE_over_sync_SCENARIO`, `tail_over_sync` and `all_over_sync` of "rounds"; the largest errors of simulated figures,
`samples_error_max`, `staleness_error_max` and `idle_error_max` (relative; of shares, and of staleness below 1,
differences).
"""

import math
import tempfile
from pathlib import Path
from statistics import mean

from areal_like.config import run_config as configs

from ..console.arguments import picture
from ..console.output import write_json
from ..simulation.costs import of_timed
from ..simulation.run import SHARES, Simulation, difference, figures_of
from ..timeline import draw, timeline
from .figures import bench_parser, trained

LONGTAIL = ["engine.median=60", "engine.sigma=1.0", "engine.noise=0.3", "learner.base=0.105"]
NOISE, RATIO = 0.5, 9.0
"""Spread within a prompt and p99/p50 of the lengths in "rounds"."""
SCENARIOS = {
    "balanced": ["engine.median=200", "engine.sigma=0", "engine.noise=0", "learner.base=0.2"],
    "longtail": LONGTAIL,
    "decode": [*LONGTAIL, "engine.per_sequence=2e-6"],
    "rounds": [
        *("run.steps=20", "groups_per_batch=32", "sizing.group_size=8", "engine.slots=320", "engine.base=0.001"),
        *("engine.per_sequence=2e-6", "engine.median=100", "sampling.max_new_tokens=1600", f"engine.noise={NOISE}"),
        f"engine.sigma={math.sqrt((math.log(RATIO) / 2.3263) ** 2 - NOISE**2)}",
        *("learner.base=0.02", "learner.per_token=5e-6"),
    ],
}
SYNC = ["mode=sync"]
TAIL = [*SYNC, "scheduler.oversample_prompts=1.25", "scheduler.oversample_responses=1.25"]
SAGC = ["sizing={name: sagc, candidates: [4, 8, 16, 32], budget: 0.3, straggler_ratio: 3.0}"]
BOUNDS = {f"async{bound}": [f"scheduler.max_staleness={bound}"] for bound in ("0", "1", "2", "4", "8", "inf")}
BOUNDS["async4_waiting"] = [*BOUNDS["async4"], "engine.interruptible=false"]
MODES = {
    "balanced": {"sync": SYNC, **BOUNDS},
    "longtail": {"sync": SYNC, **BOUNDS},
    "decode": {"sync": SYNC, "async1": BOUNDS["async1"], "async4": BOUNDS["async4"]},
    "rounds": {"sync": SYNC, "tail": TAIL, "sagc": SYNC + SAGC, "all": TAIL + SAGC, "async4": BOUNDS["async4"]},
}
ALL_MODES = list(dict.fromkeys(mode for modes in MODES.values() for mode in modes))
ERRORS = {
    "samples_per_second": "samples_error_max",
    "staleness_mean": "staleness_error_max",
    **dict.fromkeys(SHARES, "idle_error_max"),
}
HISTORIES = 8
"""Simulations of a run, of which the mean counts."""
WARMUP_STEPS = 3
"""The first batches of an asynchronous run fill the pipeline; sync has nothing to fill. "rounds" counts all steps."""
DRAWN_SECONDS = 8.0
DRAWN = {"sync": "sync", "tail": "sync with tail batching", "async4": "async, staleness at most 4"}


def measure(scenario: str, mode: str, run: Path, metrics: dict[str, float]) -> float:
    """Trained samples per second of one run. Prints them, what limits them, and the simulator's errors, the largest of
    which go to `metrics`."""
    words = ["configs/bench/modes.yaml", *SCENARIOS[scenario], *MODES[scenario][mode]]
    rows, config = trained(run, words), configs.load(words)
    warmup = 0 if scenario == "rounds" else WARMUP_STEPS
    samples = sum(sum(row["staleness/histogram"].values()) for row in rows[warmup:])
    rate = samples / (rows[-1]["seconds"] - (rows[warmup - 1]["seconds"] if warmup else 0.0))
    real = figures_of(run)
    made = [Simulation(config, of_timed(config), each).run().figures for each in range(HISTORIES)]
    shown = []
    for figure, metric in ERRORS.items():
        error = difference(figure, mean(each[figure] for each in made), real[figure])
        metrics[metric] = max(metrics.get(metric, 0.0), abs(error))
        shown.append(f"{figure} {real[figure]:.3g} ({error:+.1%})")
    print(f"{scenario} {mode}: {rate:.0f} samples/s; error of the simulator: {', '.join(shown)}", flush=True)
    return rate


def main() -> None:
    parser = bench_parser("modes", __doc__)
    parser.add_argument("--scenario", choices=[*SCENARIOS], action="append", help="only this one (may be repeated)")
    parser.add_argument("--modes", nargs="+", choices=ALL_MODES, default=ALL_MODES, help="sync and these")
    parser.add_argument("--plot", type=picture, help="write timelines of three of the first scenario's modes here")
    args = parser.parse_args()
    metrics, scenarios = dict[str, float](), args.scenario or [*SCENARIOS]
    with tempfile.TemporaryDirectory(prefix="modes-") as folder:
        for scenario in scenarios:
            rates: dict[str, float] = {}
            modes = [mode for mode in MODES[scenario] if mode in ("sync", *args.modes)]
            runs = {mode: Path(folder) / f"{scenario}-{mode}" for mode in modes}
            for mode, run in runs.items():
                rates[mode] = measure(scenario, mode, run, metrics)
                suffix = "" if scenario == "rounds" and mode in ("tail", "all") else f"_{scenario}"
                metrics[f"{mode}_{scenario}"] = rates[mode]
                metrics[f"{mode}_over_sync{suffix}"] = rates[mode] / rates["sync"]
            if args.plot and scenario == scenarios[0]:
                drawn = {DRAWN[mode]: timeline(run, end=DRAWN_SECONDS) for mode, run in runs.items() if mode in DRAWN}
                draw(drawn, args.plot, "Sync waits for its longest answer at every step, the others now and then")
    write_json(args.json, metrics)


if __name__ == "__main__":
    main()
