"""Synchronous against asynchronous training, and techniques for rounds: `python -m scripts.bench.modes [--json FILE]`.

Real processes, sockets, buffer and weight updates; the accelerators are simulated (`engine=timed`, `learner=timed`), so
two cores suffice and a run measures waiting. Trained samples per second, plain sync = 1.0.

balanced   all answers equally long; generating a batch takes as long as training on it
longtail   log-normal answer lengths (sigma 1 over prompts, 0.3 within), the same mean cost on both sides
decode     longtail, and a decode step costs 0.002 of its base more per sequence
rounds     answers of up to 16 times the median, p99/p50 = 9, as RollPacker's (arXiv 2509.21009) of up to 16k tokens;
           tail batching starts a quarter more prompts and responses, and a train step takes a fifth of a plain round

"waiting": not interruptible, an update waits for running sequences. Metrics: `MODE_SCENARIO` (samples per second),
`MODE_over_sync_SCENARIO`, `tail_over_sync` and `all_over_sync` of "rounds"; `sagc_straggler_share` and `sagc_budget` of
SAGC's controller alone under drifting lengths, as a run of seconds measures no long-run shares.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from areal_like.places import REPOSITORY

from ..console import output
from ..console.arguments import picture
from .figures import bench_parser

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
BOUNDS = {f"async {bound}": [f"scheduler.max_staleness={bound}"] for bound in ("0", "1", "2", "4", "8", "inf")}
BOUNDS["async 4, waiting"] = ["scheduler.max_staleness=4", "engine.interruptible=false"]
MODES = {
    "balanced": {"sync": SYNC, **BOUNDS},
    "longtail": {"sync": SYNC, **BOUNDS},
    "decode": {"sync": SYNC, "async 1": BOUNDS["async 1"], "async 4": BOUNDS["async 4"]},
    "rounds": {
        "sync": SYNC,
        "tail": TAIL,
        "sagc": [*SYNC, *SAGC],
        "all": [*TAIL, *SAGC],
        "async 4": BOUNDS["async 4"],
    },
}
QUICK = ("sync", "tail", "all")
WARMUP_STEPS = 3
"""The first batches of an asynchronous run fill the pipeline; sync has nothing to fill. "rounds" counts all steps."""
DRAWN_SECONDS = 8.0


def measure(overrides: list[str], folder: Path, warmup: int) -> dict[str, float]:
    """One run: trained samples per second, idle shares, staleness; its folder is the newest of `folder`."""
    name = f"run-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "scripts.train", "configs/bench/modes.yaml", "--plain"]
    command += [f"run.dir={folder}", f"run.name={name}", *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    summary = json.loads((folder / name / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    groups = [int(each.partition("=")[2]) for each in overrides if each.startswith("groups_per_batch=")]
    seconds = rows[-1]["seconds"] - (rows[warmup - 1]["seconds"] if warmup else 0.0)
    found = {"samples_per_second": 8 * [16, *groups][-1] * (len(rows) - warmup) / seconds}
    keys = ("actor_idle_share", "learner_idle_share", "staleness_mean", "staleness_max")
    return found | {key: summary[key] for key in keys}


def bench(scenario: str, repeats: int, quick: bool, folder: Path, console: Console) -> dict[str, dict[str, float]]:
    """Mode → medians over the repeats."""
    columns = ("mode", "samples/s", "over sync", "actors idle", "learner idle", "staleness mean", "max")
    table, found = output.table(scenario, *columns), dict[str, dict[str, float]]()
    warmup = 0 if scenario == "rounds" else WARMUP_STEPS
    more = ["run.steps=5", "groups_per_batch=4"] if quick else []
    for mode, overrides in MODES[scenario].items():
        if quick and mode not in QUICK:
            continue
        console.print(f"  {scenario}: {mode} ...", highlight=False)
        runs = [
            measure([*SCENARIOS[scenario], *overrides, f"run.seed={seed}", *more], folder, warmup)
            for seed in range(repeats)
        ]
        found[mode] = row = {key: median(run[key] for run in runs) for key in runs[0]}
        row["over_sync"] = row["samples_per_second"] / found["sync"]["samples_per_second"]
        shares = [f"{row[key]:.0%}" for key in ("actor_idle_share", "learner_idle_share")]
        ages = [f"{row['staleness_mean']:.2f}", f"{row['staleness_max']:.0f}"]
        table.add_row(mode, f"{row['samples_per_second']:.0f}", f"{row['over_sync']:.2f}", *shares, *ages)
    console.print(table)
    return found


def straggler_share(budget: float, steps: int = 4000, samples: int = 128) -> float:
    """Share of groups with a straggler under SAGC's controller, with log-normal lengths whose spread swings twice."""
    from buffer.sizing import GroupLengths, Sagc

    controller, random = Sagc(budget=budget), np.random.default_rng(0)
    shares: list[float] = []
    seen: list[GroupLengths] = []
    for step in range(steps):
        sigma = 0.6 + 0.12 * math.sin(4 * math.pi * step / steps)
        size = controller.next_size(seen)
        groups = np.exp(sigma * random.standard_normal(samples)).reshape(-1, size)
        seen = [GroupLengths(tuple(group), (False,) * size) for group in groups.tolist()]
        shares.append(float(np.mean(groups.max(1) > controller.straggler_ratio * np.median(groups, 1))))
    return float(np.mean(shares))


def picture_of(folders: dict[str, Path], speeds: dict[str, float], path: Path) -> None:
    """Timelines of the first seconds of each mode."""
    from ..timeline import draw, timeline

    lines = {f"{mode}: {speeds[mode]:.2f}×": timeline(run, end=DRAWN_SECONDS) for mode, run in folders.items()}
    draw(lines, path, "Who works and who waits, by mode")


def main() -> None:
    parser = bench_parser("modes", __doc__)
    parser.add_argument("--scenario", choices=[*SCENARIOS], action="append", help="only this one (may be repeated)")
    parser.add_argument("--repeats", type=int, default=1, help="runs per mode, of which the median counts")
    parser.add_argument("--plot", type=picture, help="write timelines of the first scenario's modes here")
    parser.add_argument("--quick", action="store_true", help="few steps; the numbers mean little")
    args = parser.parse_args()
    console, metrics = output.console(), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="modes-") as name:
        for number, scenario in enumerate(args.scenario or SCENARIOS):
            folder = Path(name) / scenario
            folder.mkdir()
            found = bench(scenario, args.repeats, args.quick, folder, console)
            for mode, row in found.items():
                key = mode.replace(", ", "_").replace("async ", "async")
                suffix = "" if scenario == "rounds" and mode in ("tail", "all") else f"_{scenario}"
                metrics |= {
                    f"{key}_{scenario}": row["samples_per_second"],
                    f"{key}_over_sync{suffix}": row["over_sync"],
                }
            if args.plot and number == 0:
                runs = dict(zip(found, sorted(folder.iterdir(), key=lambda run: run.stat().st_ctime), strict=False))
                picture_of(runs, {mode: row["over_sync"] for mode, row in found.items()}, args.plot)
    metrics |= {"sagc_straggler_share": straggler_share(0.3, 100 if args.quick else 4000), "sagc_budget": 0.3}
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    main()
