"""Study: what over-provisioned responses cost and bring, and what a correction mends.

`python -m scripts.claims.cut_responses [--quick] [--out FOLDER] [--publish]`

Rounds of 32 groups of 8, log-normal lengths as in `scripts.bench.stragglers` at 16k, by the buffer's own scheduler; a
decode step takes 1 + .002 per running response. An answer is right with the chance of a normal score that falls with
its length within the prompt (long ones are wrong more often), so cutting long ones flatters the reward.

`length`, `reward`: mean of what is trained (weighed) over that of all responses started to the same prompts, minus 1;
every prompt that a round cut is trained in a later one. `effective`: Kish's share of the samples after weighing.
`speed`: samples per second over those of plain rounds. Means over seeds with 95 % intervals.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

from .studies import publishable

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = publishable(__doc__, "cut_responses").parse_args()

import numpy as np

from buffer.schedulers import SyncScheduler
from buffer.sizing import Fixed
from learners.cut_responses import inverse_chances

from ..analysis.intervals import bootstrap, markdown_table
from ..bench.stragglers import NOISE, SETTINGS, spread
from . import kept
from .studies import tell

GROUPS, SIZE, MEDIAN, LONGEST = 32, 8, 1000, 16_000
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompts 1.25": {"oversample_prompts": 1.25},
    "responses 1.25": {"oversample_responses": 1.25},
    "responses 1.25, weighed": {"oversample_responses": 1.25, "cut_responses": "weigh"},
    "both 1.25": {"oversample_prompts": 1.25, "oversample_responses": 1.25},
    "both 1.25, weighed": {"oversample_prompts": 1.25, "oversample_responses": 1.25, "cut_responses": "weigh"},
}


def measure(mode: Mapping[str, Any], seed: int, rounds: int) -> dict[str, float]:
    """Mean length and reward of what was trained and started, seconds per round, effective share of samples."""
    scheduler, dice, queue = SyncScheduler(Fixed(group_size=SIZE), **mode), np.random.default_rng(seed), deque[float]()
    tau, steps = spread(SETTINGS["16k"]), 0.0
    trained: list[np.ndarray] = []
    started: list[np.ndarray] = []
    shares: list[float] = []
    for _ in range(rounds):
        scheduler.open_batch(GROUPS * SIZE, len(queue), [])
        count = GROUPS if scheduler.long else math.ceil(GROUPS * scheduler.oversample_prompts)
        waiting = [queue.popleft() for _ in range(GROUPS)] if scheduler.long else []
        prompts = np.array(waiting) if scheduler.long else dice.normal(0.0, tau, count)
        scores = dice.standard_normal((count, scheduler.launch))
        lengths = np.clip(MEDIAN * np.exp(prompts[:, None] + NOISE * scores), 1, LONGEST).astype(int)
        order = np.argsort(lengths, axis=1, kind="stable")
        lengths, scores = (np.take_along_axis(each, order, axis=1) for each in (lengths, scores))
        ends = lengths[:, SIZE - 1]
        first = np.argsort(ends, kind="stable")[:GROUPS]
        end = int(ends[first].max())
        running = np.minimum(lengths, np.minimum(ends, end)[:, None])
        steps += end + 0.002 * float(running.sum())
        queue.extend(np.delete(prompts, first).tolist())
        ours, right = lengths[first, :SIZE].ravel(), chances(scores[first])
        weights = np.ones(len(ours))
        if scheduler.weighs:
            weights = inverse_chances(ours, np.repeat(np.arange(GROUPS), SIZE), scheduler.oversample_responses)
        shares.append(float(weights.sum() ** 2 / np.square(weights).sum() / len(weights)))
        trained.append(np.stack([weights, weights * ours, weights * right[:, :SIZE].ravel()]).sum(1))
        started.append(np.array([1.0, lengths[first].mean(), right.mean()]))
    (count_, length, reward), (_, whole, all_right) = np.sum(trained, axis=0), np.mean(started, axis=0)
    return {
        "length": length / count_ / whole - 1.0,
        "reward": reward / count_ / all_right - 1.0,
        "effective": float(np.mean(shares)),
        "steps": steps / rounds,
    }


def chances(scores: np.ndarray) -> np.ndarray:
    """Of being right: half for an answer of its prompt's median length."""
    cdf = np.vectorize(NormalDist().cdf)
    return 1.0 - np.asarray(cdf(scores), float)


COLUMNS = ("mode", "seed", "length", "reward", "effective", "steps")
TITLE = "Bias and speed"


def tables(results: Path) -> dict[str, str]:
    """Title → table of `results.csv`. Raises OSError, ValueError."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in kept.read(results, COLUMNS, texts=("mode",)):
        found.setdefault(row["mode"], []).append(row)
    return {TITLE: table(found)}


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    lines = []
    for mode, rows in found.items():
        speeds = [plain["steps"] / row["steps"] for plain, row in zip(found["plain"], rows, strict=True)]
        shown = [bootstrap(100 * row[name] for row in rows).text(1) for name in ("length", "reward")]
        lines.append([mode, *shown, bootstrap(row["effective"] for row in rows).text(2), bootstrap(speeds).text(2)])
    return markdown_table(["started per trained", "length, %", "reward, %", "effective", "speed"], lines)


def main(options: argparse.Namespace) -> None:
    seeds, rounds = (3, 40) if options.quick else (10, 200)
    rows = [{"mode": n, "seed": s} | measure(mode, s, rounds) for n, mode in MODES.items() for s in range(seeds)]
    results = options.out / "results.csv"
    kept.write(results, COLUMNS, rows)
    tell(options.out, *tables(results).values())
    if options.publish:
        kept.publish(results, "cut_responses")


if __name__ == "__main__":
    main(OPTIONS)
