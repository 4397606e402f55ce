"""Study: do group sizes that follow stragglers pay?

`python -m scripts.claims.sagc [--quick] [--out FOLDER] [--publish]`

Static groups of 4, 8, 16 and 32 against `sagc` and `sagc_plain`, in virtual time. The buffer's own scheduler and
controllers decide sizes, long rounds and what is cut; lengths are log-normal; a decode step takes 1 ms and 2 us per
running response, a train step 5 us per token. The policy is that of `off_policy` and learns from the batches that the
rounds bring: six bits backwards, rewarded if all are right. Lengths do not depend on what is answered.

| condition | lengths vary | a batch keeps | rounds |
|---|---|---|---|
| samples | over prompts | 128 samples | end with the last group |
| samples, tail | over prompts | 128 samples | tail batching: 1.25 times the prompts |
| prompts | over prompts | 16 prompts | end with the last group |
| prompts, tail | over prompts | 16 prompts | tail batching |
| samples, barrier | within prompts | 128 samples | group after group (the paper's trainer); SAGC begins with 32 |
| prompts, barrier | within prompts | 16 prompts | group after group; SAGC begins with 32 |

Learning rates are tuned for each method and condition on seeds of their own. `mean`: held-out reward, averaged over the
seconds in which the fastest method takes all its steps. `equal`: after equally many train steps.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .studies import publishable

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    OPTIONS = publishable(__doc__, "sagc").parse_args()

import numpy as np
import torch
from numpy.typing import NDArray

from areal_like.wire import messages
from buffer.sagc import Sagc
from buffer.sagc_plain import SagcPlain
from buffer.schedulers import AsyncScheduler, Scheduler, SyncScheduler
from buffer.sizing import Fixed, GroupLengths, Keep, Sizing
from learners.gradient_noise import NoiseEstimates

from ..analysis.aggregates import holm
from ..analysis.intervals import bootstrap, markdown_table
from ..analysis.pairing import paired
from ..plotting.drawing import keep
from ..plotting.plot import Plot, point
from . import kept
from .gated import distributions, gated, held_out, roll_out
from .stacks import Stack
from .studies import Cell, Row, Study, prepare, tell
from .tokens import Draws, Task

SIZES = (4, 8, 16, 32)
METHODS = (*(f"static {size}" for size in SIZES), "sagc", "sagc_plain")
SAMPLES, GROUP_SIZE, MEDIAN, LONGEST = 128, 8, 1000, 16_000
STEP, PER_RESPONSE, PER_TOKEN = 1e-3, 2e-6, 5e-6
"""Seconds: of a decode step, of one more response in it, of a trained token."""
BUDGET, TOLERANCE, RATIO = 0.3, 0.01, 3.0
RATES = (1e-2, 2e-2, 4e-2, 8e-2, 0.16)
GLANCED = 128
ENTROPY_BONUS = 0.02
STEPS = 120
TASK = Task(length=6, vocabulary=2, terminal=True)
COLUMNS = ("condition", "phase", "algorithm", "rate", "seed", "mean", "equal", "seconds", "size", "stragglers")
"""Of `results.csv`."""
TOLD = (
    ("Held-out reward, averaged over equal seconds", "mean", 3),
    ("Held-out reward after equally many train steps", "equal", 3),
    ("Seconds of all train steps", "seconds", 0),
    ("Samples per group", "size", 1),
    ("Share of groups with a straggler", "stragglers", 3),
)
FINDING = "With equal samples SAGC keeps up with the best static size; with equal prompts it does not"


@dataclass(frozen=True)
class Setting:
    """`tau`, `sigma`: spread of ln length over prompts and within one. `start`: SAGC's first size."""

    keep: Keep = "samples"
    tail: float = 1.0
    barrier: bool = False
    tau: float = 0.7
    sigma: float = 0.5
    start: int = GROUP_SIZE


SETTINGS = {
    "samples": Setting(),
    "samples, tail": Setting(tail=1.25),
    "prompts": Setting("prompts"),
    "prompts, tail": Setting("prompts", tail=1.25),
    "samples, barrier": Setting(barrier=True, tau=0.3, sigma=0.7, start=32),
    "prompts, barrier": Setting("prompts", barrier=True, tau=0.3, sigma=0.7, start=32),
}


def sizing_of(method: str, setting: Setting) -> Sizing:
    """`least_prompts` lets SAGC take every size that is compared with it."""
    if method == "sagc":
        return Sagc(
            candidates=SIZES, budget=BUDGET, straggler_ratio=RATIO, group_size=setting.start,
            least_prompts=SAMPLES // SIZES[-1], keep=setting.keep,
        )  # fmt: skip
    if method == "sagc_plain":
        plain = SagcPlain(candidates=SIZES, budget=BUDGET, straggler_ratio=RATIO, group_size=setting.start)
        plain.keep = setting.keep
        return plain
    return Fixed(group_size=int(method.split()[1]))


class Rounds:
    """The rounds of one run, in virtual time: its scheduler, the prompts that wait, the seconds so far."""

    def __init__(self, method: str, setting: Setting, seed: int):
        sizing = sizing_of(method, setting)
        self.setting, self.dice, self.seconds = setting, np.random.default_rng(seed), 0.0
        self.scheduler: Scheduler = (
            AsyncScheduler(sizing, max_staleness=0, max_inflight_groups=1)
            if setting.barrier
            else SyncScheduler(sizing, oversample_prompts=setting.tail)
        )
        self._samples = SAMPLES if setting.keep == "samples" else SAMPLES // GROUP_SIZE * sizing.group_size
        self._queue = deque[float]()
        self._seen: list[GroupLengths] = []
        self.sizes: list[int] = []
        self.stragglers: list[float] = []

    def open(self) -> tuple[int, int]:
        """(groups, size) of the next batch."""
        groups = self.scheduler.open_batch(self._samples, len(self._queue), self._seen)
        self.sizes.append(self.scheduler.group_size)
        return groups, self.scheduler.group_size

    def close(self, rewards: Sequence[Sequence[float]]) -> None:
        """The round was run, and trained: `rewards` of its groups."""
        groups, size = len(rewards), self.scheduler.group_size
        long = isinstance(self.scheduler, SyncScheduler) and self.scheduler.long
        started = groups if long else math.ceil(groups * self.setting.tail)
        fresh = self.dice.normal(0.0, self.setting.tau, started)
        prompts = np.array([self._queue.popleft() for _ in range(groups)]) if long else fresh
        logs = prompts[:, None] + self.dice.normal(0.0, self.setting.sigma, (started, size))
        lengths = np.clip(MEDIAN * np.exp(logs), 1, LONGEST).astype(int)
        order = np.argsort(lengths.max(1), kind="stable")
        kept, cut = lengths[order[:groups]], lengths[order[groups:]]
        end = int(kept.sum() if self.setting.barrier else kept.max())
        steps = int(kept.max(1).sum()) if self.setting.barrier else end
        decoded = kept.sum() + np.minimum(cut, end).sum()
        self.seconds += STEP * steps + PER_RESPONSE * decoded + PER_TOKEN * kept.sum()
        self._queue.extend(prompts[np.sort(order[groups:])].tolist())
        self._see(kept, cut, end, rewards)

    def hear(self, products: NDArray[Any], groups: int) -> None:
        """Products of the parts of the batch's gradient, as the learner measures them."""
        size, noise = self.sizes[-1], NoiseEstimates()
        noise.note(products, groups // 2, groups, size)
        self.scheduler.sizing.note_gradient(messages.GradientNoise(size, *noise.metrics().values()))

    def _see(self, kept: NDArray[Any], cut: NDArray[Any], end: int, rewards: Sequence[Sequence[float]]) -> None:
        self.stragglers.append(float(np.mean(kept.max(1) > RATIO * np.median(kept, 1))))
        whole = (False,) * kept.shape[1]
        pairs = zip(kept.tolist(), rewards, strict=True)
        self._seen = [GroupLengths(tuple(row), whole, True, tuple(earned), self.seconds) for row, earned in pairs]
        for row in cut.tolist():
            self._seen.append(GroupLengths(tuple(min(each, end) for each in row), tuple(each > end for each in row)))


def train(cells: Sequence[Cell], setting: Setting, steps: int, every: int) -> list[dict[str, Any]]:
    """Each cell's `curve` (step, seconds, held-out reward), its group size, its share of groups with a straggler."""
    seeds = [cell.seed for cell in cells]
    stack = Stack(gated(seeds, TASK), torch.tensor([cell.rate for cell in cells]))
    rounds = [Rounds(cell.algorithm, setting, cell.seed) for cell in cells]
    draws, test = [Draws([seed]) for seed in seeds], Draws([seed + 500_000 for seed in seeds])
    curves: list[list[tuple[float, ...]]] = [[] for _ in cells]
    for step in range(1, steps + 1):
        alike: dict[tuple[int, int], list[int]] = {}
        for place, each in enumerate(rounds):
            alike.setdefault(each.open(), []).append(place)
        gradient = torch.zeros_like(stack.flat)
        for (groups, size), places in alike.items():
            task = replace(TASK, prompts=groups, samples=size)
            parts, rewards = policy_gradient(stack, places, task, [draws[place] for place in places])
            gradient[places] = parts.sum(1)
            products = (parts.double() @ parts.double().mT).numpy()
            for place, earned, heard in zip(places, rewards.tolist(), products, strict=True):
                rounds[place].close(earned)
                rounds[place].hear(heard, groups)
        stack.step(gradient)
        if step % every == 0:
            found = held_out(stack.views(stack.flat), TASK, test, GLANCED)
            for curve, each, reward in zip(curves, rounds, found, strict=True):
                curve.append((step, each.seconds, reward))
    return [
        {"curve": curve, "size": float(np.mean(each.sizes)), "stragglers": float(np.mean(each.stragglers))}
        for curve, each in zip(curves, rounds, strict=True)
    ]


def policy_gradient(
    stack: Stack, places: Sequence[int], task: Task, draws: Sequence[Draws]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the learners at these places, whose batches have one shape: gradients [l, 3, numbers] of the parts of
    `learners.gradient_noise`, and rewards [l, P, G]."""
    leaf = stack.flat[places].clone().requires_grad_()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.cat([each(*shape) for each in draws])

    prompts, answers, _, rewards = roll_out(stack.views(leaf.detach()), task, drawn, 0.0)
    each = distributions(stack.views(leaf), prompts, answers)
    chosen, tokens = each.gather(-1, answers[..., None])[..., 0], float(answers[0].numel())
    advantages = (rewards - rewards.mean(-1, keepdim=True))[..., None]
    losses = -(advantages * chosen + ENTROPY_BONUS * -(each.exp() * each).sum(-1)) / tokens
    some, few = task.prompts // 2, task.samples // 2  # samples of a prompt are in no order
    sums = [losses[:, :some, :few].sum(), losses[:, :some, few:].sum(), losses[:, some:].sum()]
    return torch.stack([torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in sums], 1), rewards


def mean_over(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """Held-out reward, averaged over the first `seconds`; it begins where a guess would be."""
    x, y = [0.0, *(entry[1] for entry in curve)], [TASK.vocabulary**-TASK.length, *(entry[2] for entry in curve)]
    grid = np.linspace(0.0, seconds, 400)
    return float(np.interp(grid, x, y).mean())


def with_means(rows: Sequence[dict[str, Any]], horizon: float) -> list[dict[str, Any]]:
    """`mean` and `lost`, which is 1 - mean; `seconds` of all steps, `equal`, the reward after them."""
    found = []
    for row in rows:
        mean, last = mean_over(row["curve"], horizon), row["curve"][-1]
        found.append(row | {"mean": mean, "lost": 1.0 - mean, "seconds": last[1], "equal": last[2]})
    return found


def measure(cells: Sequence[Cell], setting: Setting, steps: int, every: int) -> list[dict[str, Any]]:
    rows = train(cells, setting, steps, every)
    return with_means(rows, min(row["curve"][-1][1] for row in rows))


def best_static(rows: Sequence[Row], condition: str, most: float = 1.0) -> str:
    """Of those with at most this share of stragglers, by the mean of the fresh seeds: a choice in its own favour."""

    def mean(name: str, number: str) -> float:
        return float(np.mean(values(rows, condition, name, number)))

    holding = [name for name in METHODS[: len(SIZES)] if mean(name, "stragglers") <= most]
    return max(holding, key=lambda name: mean(name, "mean"))


def values(rows: Sequence[Row], condition: str, method: str, number: str) -> list[float]:
    found = [r for r in rows if (r["condition"], r["algorithm"], r["phase"]) == (condition, method, "fresh")]
    return [r[number] for r in sorted(found, key=lambda r: r["seed"])]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Title → table: one per number, and SAGC against the best static size."""
    conditions = list(dict.fromkeys(r["condition"] for r in rows))
    found = {}
    for title, number, digits in TOLD:
        cells = [
            [method, *(bootstrap(values(rows, c, method, number)).text(digits) for c in conditions)]
            for method in METHODS
        ]
        found[title] = markdown_table(["groups", *conditions], cells)
    found["Against the best static size of all"] = against(rows, conditions, 1.0)
    found["Against the best static size that holds the budget"] = against(rows, conditions, BUDGET + TOLERANCE)
    return found


def against(rows: Sequence[Row], conditions: Sequence[str], most: float) -> str:
    """By the reward averaged over equal seconds, paired by seed; p is Holm's within a condition."""
    lines = []
    for condition in conditions:
        best = best_static(rows, condition, most)
        before = values(rows, condition, best, "mean")
        pairs = [paired(before, values(rows, condition, name, "mean")) for name in METHODS[len(SIZES) :]]
        said = [
            f"{one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}] p={p:.2g}"
            for one, p in zip(pairs, holm([one.p for one in pairs]), strict=True)
        ]
        size, share = (float(np.mean(values(rows, condition, "sagc", name))) for name in ("size", "stragglers"))
        best_share = float(np.mean(values(rows, condition, best, "stragglers")))
        static = f"{best.split()[1]}: {float(np.mean(before)):.3f}, {best_share:.2f}"
        lines.append([condition, static, *said, f"{size:.0f}, {share:.3f}"])
    head = ["batch keeps, rounds", "best static size: reward, stragglers", "sagc minus it", "sagc_plain minus it"]
    return markdown_table([*head, "sagc: samples per group, stragglers"], lines)


def read(results: Path) -> list[Row]:
    """`results.csv`. Raises OSError, ValueError."""
    return kept.read(results, COLUMNS, texts=COLUMNS[:3])


def figure(rows: Sequence[Row]) -> Plot:
    conditions = list(dict.fromkeys(r["condition"] for r in rows))
    panels = {c: {"": [point(name, values(rows, c, name, "mean")) for name in METHODS]} for c in conditions}
    note = "Token reversal in virtual time; log-normal lengths, learning rate tuned for each."
    return Plot("rows", FINDING, panels, x="held-out reward, averaged over equal seconds", note=note)


def main(options: argparse.Namespace) -> None:
    prepare()
    steps, every, tuning, fresh = (20, 5, 1, 2) if options.quick else (STEPS, 10, 2, 10)
    study = Study(options.out, METHODS, RATES, tuple(range(tuning)), tuple(range(100, 100 + fresh)), tuned_by="lost")
    measured: list[Row] = []
    for condition, setting in SETTINGS.items():
        told = {"setting": repr(setting), "steps": steps}
        measured += study.run(condition, partial(measure, setting=setting, steps=steps, every=every), told)
    results = options.out / "results.csv"
    kept.write(results, COLUMNS, measured)
    rows = read(results)
    tell(options.out, *(f"{title}\n\n{table}" for title, table in tables(rows).items()))
    keep(figure(rows), options.out / "sagc.png")
    if options.publish:
        kept.publish(results, "sagc")


if __name__ == "__main__":
    main(OPTIONS)
