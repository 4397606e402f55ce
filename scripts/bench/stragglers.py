"""Costs of waiting for stragglers, and techniques against it:
`python -m scripts.bench.stragglers [--json F] [--plot F]`.

Real processes, sockets, buffer and weight updates; the accelerators are simulated (`engine=timed`, `learner=timed`).
All modes train equally many samples of the same prompts. A decode step costs 1 + 0.002 · n for n running sequences, and
every sequence has a place in an engine. Response lengths are log-normal, with a cap per setting (scaled down, so that a
run takes seconds); most of the spread is between prompts, the rest within. The settings stand for RollPacker's (arXiv
2509.21009) answers of up to 8k, 16k and 32k tokens: sigma gives each the ratio of p99 to p50 in SETTINGS, which grows
with the cap. These ratios are our choice: the paper shows them only in plots.

It also runs the controller of SAGC (`sagc`) alone on drifting lengths (`simulate`), since a run of seconds
says little about shares in the long run. And it shows by how much trained responses are shorter than offered ones
(`kept`, by quarter of the run: waiting groups weigh less and less, cut samples are lost): by the engine's own lengths,
which are known here, and by the estimate of `scripts.ledger`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from areal_like.config.registry import build
from areal_like.config.run_config import load
from areal_like.places import REPOSITORY
from areal_like.sampling import stream_key
from areal_like.types import Limits
from buffer.journal import scan
from buffer.sizing import GroupLengths, Sagc

from ..console import output
from ..console.arguments import picture
from ..ledger import TRAINED, Books, bias
from ..timeline import draw, timeline
from .figures import bench_parser

STEPS, LONG = 20, 80
GROUPS, GROUP_SIZE = 32, 8
MEDIAN, CAP, NOISE = 100, 16, 0.5
"""Tokens; longest response over the median; spread within a prompt."""
BASE, PER_TOKEN = 0.02, 5e-6
"""Seconds of a train step: about a sixth of a plain synchronous one."""
DRAWN_SECONDS = 8.0
SETTINGS = {"8k": 6.0, "16k": 9.0, "32k": 12.0}
"""p99 / p50 of response lengths."""
SYNC = ["mode=sync"]
TAIL = [*SYNC, "scheduler.oversample_prompts=1.25"]
RESPONSES = ["scheduler.oversample_responses=1.25"]
SAGC = ["sizing={name: sagc, candidates: [4, 8, 16, 32], budget: 0.3, straggler_ratio: 3.0}"]
STREAM = ["learner.stream=true"]
MODES = {
    "sync": SYNC,
    "tail, prompts only": TAIL,
    "tail": [*TAIL, *RESPONSES],
    "sagc": [*SYNC, *SAGC],
    "stream": [*SYNC, *STREAM],
    "all": [*TAIL, *RESPONSES, *SAGC, *STREAM],
    "all but sagc": [*TAIL, *RESPONSES, *STREAM],
    "async 1": ["mode=async", "scheduler.max_staleness=1"],
    "async 4": ["mode=async", "scheduler.max_staleness=4"],
}
"""Mode → overrides. `tail` starts a quarter more prompts, and of each a quarter more responses, as the paper does;
`prompts only` leaves out no response, so it has no bias within a prompt."""

SAID = {
    "sync": "plain rounds (sync)",
    "tail, prompts only": "tail batching, prompts only",
    "tail": "tail batching",
    "sagc": "SAGC",
    "stream": "stream trainer",
    "all": "all techniques together",
    "all but sagc": "all but SAGC",
    "async 1": "async, staleness ≤ 1",
    "async 4": "async, staleness ≤ 4",
}
"""Mode → its name in plots."""


def spread(ratio: float) -> float:
    """Sigma over prompts that gives lengths this p99 / p50, NOISE within prompts included."""
    return math.sqrt((math.log(ratio) / 2.3263) ** 2 - NOISE**2)


def measure(mode: str, ratio: float, seed: int, folder: Path, steps: int = STEPS, speed: float = 1.0) -> dict[str, Any]:
    """One run: `seconds` from the first lease to the last step, idle shares, mean trained length, rows of metrics."""
    name = f"run-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "scripts.train", "configs/bench/modes.yaml", "--plain"]
    command += [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}", f"run.seed={seed}"]
    command += [f"groups_per_batch={GROUPS}", f"sizing.group_size={GROUP_SIZE}", "engine.slots=320"]
    command += [f"engine.base={0.001 / speed}", f"engine.per_sequence={0.000002 / speed}", f"engine.median={MEDIAN}"]
    command += [f"engine.sigma={spread(ratio)}", f"engine.noise={NOISE}", f"sampling.max_new_tokens={MEDIAN * CAP}"]
    command += [
        f"learner.base={BASE / speed}",
        f"learner.per_token={PER_TOKEN / speed}",
        "buffer.keep_journal=true",
        *MODES[mode],
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / name / "summary.json").read_text())
    trained = Books().read(list(scan(folder / name / "journal")))[TRAINED]
    return {
        "seconds": rows[-1]["seconds"],
        "actor_idle": summary["actor_idle_share"],
        "learner_idle": summary["learner_idle_share"],
        "round_idle": float(np.mean([row["barrier/round_idle_share"] for row in rows])),
        "group_idle": float(np.mean([row["barrier/group_idle_share"] for row in rows])),
        "length": float(np.mean(trained.lengths)),
        "samples": len(trained.lengths),
        "rows": rows,
        "folder": folder / name,
    }


def kept(run: Path) -> dict[str, list[float]]:
    """Mean trained length over mean offered length, minus 1: the true value, and the ledger's estimate. Cumulative,
    averaged over each quarter of the run, so that the queue of cut prompts has every length."""
    config = load([str(run / "config.yaml")])
    task, engine = build("task", config.task, config.run.seed), build("engine", config.engine)
    records = list(scan(run / "journal"))

    @cache
    def lengths(group_id: int, row: int, launch: int) -> list[int]:
        limits = [Limits(MEDIAN * CAP, key=stream_key(config.run.seed, group_id, index)) for index in range(launch)]
        return [min(engine.length(task.prompt("train", row).tokens, each), MEDIAN * CAP) for each in limits]

    true, told = [], []
    for steps in range(1, LONG + 1):
        books = Books()
        accounts = books.read(records, steps)
        offered = [length for admitted in books.admitted for length in lengths(*admitted)]
        true.append(np.mean(accounts[TRAINED].lengths) / np.mean(offered) - 1)
        told.append(bias(accounts))
    return {name: np.reshape(of, (4, -1)).mean(1).tolist() for name, of in (("kept", true), ("kept_by_ledger", told))}


def bench(setting: str, repeats: int, folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """All modes of a setting; of each the run with the median time."""
    columns = ("mode", "seconds", "over sync", "actors idle", "learner idle", "round idle", "group idle", "length")
    table = output.table(f"{setting}: p99/p50 = {SETTINGS[setting]:g}", *columns)
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        console.print(f"  {setting}: {mode} ...", highlight=False)
        runs = [measure(mode, SETTINGS[setting], seed, folder) for seed in range(repeats)]
        found[mode] = row = sorted(runs, key=lambda run: run["seconds"])[repeats // 2]
        row["over_sync"] = found["sync"]["seconds"] / row["seconds"]
        for key in ("length", "actor_idle", "learner_idle", "round_idle", "group_idle"):
            row[key] = median(run[key] for run in runs)
        shares = [f"{row[key]:.0%}" for key in ("actor_idle", "learner_idle", "round_idle", "group_idle")]
        shares.append(f"{row['length'] / found['sync']['length'] - 1:+.1%}")
        table.add_row(mode, f"{row['seconds']:.1f}", f"{row['over_sync']:.2f}", *shares)
    console.print(table)
    return found


def drifting(samples: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Response lengths [samples] per step, log-normal, whose spread swings twice."""
    random = np.random.default_rng(seed)
    for step in range(steps):
        sigma = 0.6 + 0.12 * math.sin(4 * math.pi * step / steps)
        yield np.exp(sigma * random.standard_normal(samples))


def simulate(steps: int = 4000, samples: int = 128, budget: float = 0.3) -> dict[str, list[float]]:
    """SAGC's controller under drift: per quarter the share of groups with a straggler and the mean group size."""
    controller = Sagc(budget=budget)
    shares: list[float] = []
    sizes: list[int] = []
    seen: list[GroupLengths] = []
    for lengths in drifting(samples, steps, 0):
        size = controller.next_size(seen)
        groups = lengths.reshape(-1, size)
        seen = [GroupLengths(tuple(group), (False,) * size) for group in groups.tolist()]
        shares.append(float(np.mean(groups.max(1) > controller.straggler_ratio * np.median(groups, 1))))
        sizes.append(size)
    quarters = [np.array(values).reshape(4, -1).mean(1).tolist() for values in (shares, sizes)]
    return {"shares": quarters[0], "sizes": quarters[1]}


def _said(mode: str, over_sync: float) -> str:
    return SAID.get(mode, mode) + ("" if mode == "sync" else f": {over_sync:.2f} × as fast")


def _key(mode: str) -> str:
    return mode.replace(", ", "_").replace(" ", "_")


def main() -> None:
    parser = bench_parser("stragglers", __doc__)
    parser.add_argument("--plot", type=picture, help="draw a timeline of the first setting's modes here")
    parser.add_argument("--setting", choices=[*SETTINGS], action="append", help="only this one (may be repeated)")
    parser.add_argument("--repeats", type=int, default=3, help="runs per mode, of which the median counts")
    args = parser.parse_args()
    console = output.console()
    controlled = simulate()
    console.print("SAGC under drift, by quarter: straggler share", [f"{share:.3f}" for share in controlled["shares"]])
    console.print("                              mean group size", [f"{size:.1f}" for size in controlled["sizes"]])
    metrics = {"sagc_straggler_share": float(np.mean(controlled["shares"])), "sagc_budget": 0.3}
    with tempfile.TemporaryDirectory(prefix="stragglers-") as folder:
        for number, setting in enumerate(args.setting or SETTINGS):
            found = bench(setting, args.repeats, Path(folder), console)
            for mode, row in found.items():
                key = _key(mode)
                metrics |= {f"{key}_over_sync_{setting}": row["over_sync"]}
                named = ("actor_idle", "learner_idle", "round_idle", "length")
                metrics |= {f"{key}_{name}_{setting}": row[name] for name in named}
            if args.plot and number == 0:
                spans = {mode: timeline(row["folder"], end=DRAWN_SECONDS) for mode, row in found.items()}
                runs = {_said(mode, row["over_sync"]): spans[mode] for mode, row in found.items()}
                draw(runs, args.plot, "Who works and who waits, by mode")
        for mode in ("tail, prompts only", "tail"):
            shares = kept(measure(mode, SETTINGS["16k"], 0, Path(folder), LONG, speed=4.0)["folder"])
            for name, by_quarter in shares.items():
                told = " ".join(f"{share:+.1%}" for share in by_quarter)
                console.print(f"trained against offered length, {mode}, {name}, by quarter: {told}", highlight=False)
                metrics |= {f"{_key(mode)}_{name}_{i + 1}": share for i, share in enumerate(by_quarter)}
    for mode in ("tail", "all"):  # over the settings
        over = [metrics[f"{mode}_over_sync_{setting}"] for setting in args.setting or SETTINGS]
        metrics[f"{mode}_over_sync"], metrics[f"{mode}_over_sync_least"] = (
            float(np.exp(np.mean(np.log(over)))),
            min(over),
        )
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    main()
