"""Synchronous against asynchronous training, by staleness bound: `python -m scripts.bench.modes [--json FILE]`.

Real processes, sockets, buffer and weight updates; the accelerators are simulated (`engine=timed`, `learner=timed`), so
two cores suffice and a run measures the system: who waits for whom. Trained samples per second, plain sync = 1.0.

balanced   all answers equally long; generating a batch takes as long as training on it
longtail   log-normal answer lengths (sigma 1 over prompts, 0.3 within), the same mean cost on both sides

"waiting": not interruptible, an update waits for running sequences.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from areal_like.places import REPOSITORY

from ..console import output
from .figures import bench_parser

SCENARIOS = {
    "balanced": ["engine.median=200", "engine.sigma=0", "engine.noise=0", "learner.base=0.2"],
    "longtail": ["engine.median=60", "engine.sigma=1.0", "engine.noise=0.3", "learner.base=0.105"],
}
ASYNC = ("0", "1", "2", "4", "8", "inf")
WARMUP_STEPS = 3
"""The first batches of an asynchronous run fill the pipeline; sync has nothing to fill. All modes leave them out."""


def measure(overrides: list[str], folder: Path) -> dict[str, float]:
    """One run: trained samples per second, idle shares, staleness."""
    name = f"run-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "scripts.train", "configs/bench/modes.yaml", "--plain"]
    command += [f"run.dir={folder}", f"run.name={name}", *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    summary = json.loads((folder / name / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps, seconds = len(rows) - WARMUP_STEPS, rows[-1]["seconds"] - rows[WARMUP_STEPS - 1]["seconds"]
    return {
        "samples_per_second": 128 * steps / seconds,
        "actor_idle": summary["actor_idle_share"],
        "learner_idle": summary["learner_idle_share"],
        "staleness_max": summary["staleness_max"],
        "staleness_mean": summary["staleness_mean"],
    }


def modes() -> list[tuple[str, list[str]]]:
    """(label, overrides) of each row."""
    rows = [("sync", ["mode=sync"])]
    rows += [(f"async {bound}", [f"scheduler.max_staleness={bound}"]) for bound in ASYNC]
    rows += [
        (f"async {bound}, waiting", [f"scheduler.max_staleness={bound}", "engine.interruptible=false"])
        for bound in ("1", "4")
    ]
    return rows


def bench(scenario: str, folder: Path, console: Console) -> dict[str, dict[str, float]]:
    table = output.table(
        scenario, "mode", "samples/s", "over sync", "actors idle", "learner idle", "staleness mean", "max"
    )
    results: dict[str, dict[str, float]] = {}
    for label, overrides in modes():
        console.print(f"  {scenario}: {label} ...", highlight=False)
        results[label] = row = measure([*SCENARIOS[scenario], *overrides], folder)
        ratio = row["samples_per_second"] / results["sync"]["samples_per_second"]
        table.add_row(
            label,
            f"{row['samples_per_second']:.0f}",
            f"{ratio:.2f}",
            f"{row['actor_idle']:.0%}",
            f"{row['learner_idle']:.0%}",
            f"{row['staleness_mean']:.2f}",
            f"{row['staleness_max']:.0f}",
        )
    console.print(table)
    return results


def engine_against_generate(folder: Path) -> dict[str, float]:
    """The embedded engine's ratios, from a short run of its own bench."""
    path = folder / "engine.json"
    command = [sys.executable, "-m", "scripts.bench.engine", "--repeats", "1", "--json", str(path)]
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return json.loads(path.read_text())


def main() -> None:
    parser = bench_parser("modes", __doc__)
    parser.add_argument("--scenario", choices=[*SCENARIOS], action="append", help="only this one (may be repeated)")
    args = parser.parse_args()
    console = output.console()
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="modes-") as folder:
        for scenario in args.scenario or SCENARIOS:
            for label, row in bench(scenario, Path(folder), console).items():
                key = label.replace(", waiting", "_waiting").replace("async ", "async")
                metrics[f"{key}_{scenario}"] = row["samples_per_second"]
        if not args.scenario:
            metrics |= engine_against_generate(Path(folder))
    for scenario in SCENARIOS:
        for bound in ASYNC:
            if f"async{bound}_{scenario}" in metrics:
                ratio = metrics[f"async{bound}_{scenario}"] / metrics[f"sync_{scenario}"]
                metrics[f"async{bound}_over_sync_{scenario}"] = ratio
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    main()
