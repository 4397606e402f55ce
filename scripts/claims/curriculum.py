"""What do samplers and filters of prompts save?

`python -m scripts.claims.curriculum [--seeds N] [--quick] [--out FOLDER] [--publish]`

The buffer's own code draws, filters and serves (`buffer.replay`, rounds of 16 groups of 8 samples); the policy is a
table, so that a run takes a second. A prompt is 1 to 6 digits, and its answer a secret permutation of each place's
digit. The policy has a softmax per place and digit: short prompts teach what long ones need. Right means the whole
answer: at the start a prompt of n digits is answered by chance once in 10^n. Updates are REINFORCE with the group's
mean as baseline, at three learning rates: at the highest a right answer is learned at once, at the lowest it takes
many. Counted are samples that were rolled out, filtered ones included, until the expected share of right answers to
unseen prompts of all lengths is .9.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from .studies import publishable

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = publishable(__doc__, "curriculum")
    parser.add_argument("--seeds", type=int, default=5)
    OPTIONS = parser.parse_args()

import numpy as np

from areal_like.wire.groups import make_head
from buffer import filters, policies, samplers
from buffer.events import Event, Push
from buffer.journal import Record
from buffer.payloads import Payload
from buffer.prompts import PromptCursor
from buffer.replay import Filter, Replay
from buffer.results import EASY, HARD, RIGHT, Results
from buffer.samplers import Sampler
from buffer.staleness import Bound

from ..analysis.intervals import markdown_table
from ..ledger import Books
from . import kept
from .studies import Row, tell

DIGITS, LONGEST, PROMPTS = 10, 6, 240
GROUPS, SAMPLES = 16, 8
TARGET, STEPS = 0.9, 1500
RATES = (10.0, 100.0, 1000.0)
BIAS = ("hard", "right", "easy")
COLUMNS = ("arm", "rate", "seed", "samples", "reward", *BIAS, "teach")
"""Of `results.csv`; `samples` is inf for a run that never reached the target."""
TITLE = "Samples to a reward"


class Arm(NamedTuple):
    """A sampler (None: the order of the seed) and a filter."""

    sampler: Sampler | None = None
    group_filter: Filter = filters.none


ARMS = {
    "in_order": Arm(),
    "in_order, zero_variance (DAPO)": Arm(group_filter=filters.zero_variance),
    "in_order, retire_at 1": Arm(partial(samplers.in_order, retire_at=1.0)),
    "pass_rate_pools": Arm(partial(samplers.pass_rate_pools)),
    "thompson": Arm(partial(samplers.thompson)),
    "thompson, zero_variance": Arm(partial(samplers.thompson), filters.zero_variance),
}


@dataclass
class World:
    """The prompts, the right answers, and the policy: logits float64 (place, digit, answer)."""

    seed: int
    logits: np.ndarray = field(init=False)
    probabilities: np.ndarray = field(init=False)
    ends: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        dice = np.random.default_rng([self.seed, 7])
        self.lengths = dice.integers(1, LONGEST + 1, PROMPTS)
        self.digits = dice.integers(DIGITS, size=(PROMPTS, LONGEST))
        self.right = np.array([dice.permutation(DIGITS) for _ in range(LONGEST)])  # (place, digit) → answer
        self.logits = np.zeros((LONGEST, DIGITS, DIGITS))
        self.dice = dice
        self.forward()

    def forward(self) -> None:
        """Compute the probabilities of the present logits."""
        powers = np.exp(self.logits - self.logits.max(axis=-1, keepdims=True))
        self.probabilities = powers / powers.sum(axis=-1, keepdims=True)
        self.ends = self.probabilities.cumsum(axis=-1)

    def answers(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Sampled answers int64 (SAMPLES, length) and their rewards float64 (SAMPLES,)."""
        places = np.arange(self.lengths[row])
        digits = self.digits[row, places]
        ends = self.ends[places, digits]
        said = (self.dice.random((SAMPLES, len(places), 1)) > ends).sum(axis=-1).clip(max=DIGITS - 1)
        hits = said == self.right[places, digits]
        return said, hits.all(axis=1).astype(float)

    def learn(self, groups: list[tuple[int, np.ndarray, np.ndarray]], rate: float) -> None:
        """One step of REINFORCE on (row, answers, rewards) of each group, divided by the batch's samples."""
        gradient = np.zeros_like(self.logits)
        for row, answers, earned in groups:
            places = np.arange(self.lengths[row])
            digits, advantages = self.digits[row, places], earned - earned.mean()
            chosen = (answers[:, :, None] == np.arange(DIGITS)) * advantages[:, None, None]
            gradient[places, digits] += chosen.sum(axis=0) - advantages.sum() * self.probabilities[places, digits]
        self.logits += rate * gradient / (len(groups) * SAMPLES)
        self.forward()

    def reward(self) -> float:
        """The expected share of right answers to new prompts, over all lengths: exact, not sampled."""
        hit = np.take_along_axis(self.probabilities, self.right[:, :, None], axis=-1).mean(axis=(1, 2))
        return float(np.cumprod(hit).mean())


class Run(NamedTuple):
    """Samples rolled out until the target (inf: never), the last reward, and the record."""

    samples: float
    reward: float
    records: list[Record]


def run(arm: Arm, seed: int, rate: float, steps: int = STEPS) -> Run:
    """Rounds until the target, or `steps` of them."""
    world, records = World(seed), list[Record]()
    results = Results() if arm.sampler else None
    replay = Replay(Bound(0, GROUPS), partial(policies.in_order), group_filter=arm.group_filter, results=results)

    def record(event: Event, payload: Payload) -> Payload:
        records.append(Record(event))
        return payload

    replay.record, rolled_out = record, 0
    prompts = PromptCursor(PROMPTS, seed, 0, arm.sampler, results)
    for batch in range(steps):
        if world.reward() >= TARGET:
            return Run(rolled_out * SAMPLES, world.reward(), records)
        said: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        replay.open_batch(GROUPS, None)
        while replay.room(batch) > 0 and rolled_out < (batch + 1) * GROUPS * 50:
            group_id, row, _ = prompts.next()
            replay.admit(group_id, row, SAMPLES, SAMPLES, "actor", batch, 0.0)
            said[group_id] = world.answers(row)
            rows = [(1, int(world.lengths[row]), 0, 1, float(reward)) for reward in said[group_id][1]]
            head = make_head(group_id, rows, [(batch, int(world.lengths[row]))] * SAMPLES, {batch: "table"})
            replay.push(head, b"", batch, 0.0)
            rolled_out += 1
        served = replay.serve(batch)
        if not served:
            break  # nearly all groups are filtered
        world.learn([(entry.row, *said[entry.id]) for entry in served], rate)
        replay.finish(batch)
    return Run(math.inf, world.reward(), records)


def bias_of(records: list[Record]) -> dict[str, float]:
    """Draws of hard, right and easy prompts over uniform ones (NaN where there are none); the share `teach` of
    rolled-out groups that can teach, because their rewards differ."""
    books = Books()
    books.read(records)
    found = books.difficulty.of[""]
    kinds = zip(BIAS, (HARD, RIGHT, EASY), strict=True)
    ratios = {name: found.drawn[n] / found.uniform[n] if found.uniform[n] else math.nan for name, n in kinds}
    heads = [each.event.head for each in records if isinstance(each.event, Push)]
    return ratios | {"teach": sum(len(set(head.rewards)) > 1 for head in heads) / len(heads)}


def measured(
    seeds: int, arms: Mapping[str, Arm] = ARMS, rates: Sequence[float] = RATES, steps: int = STEPS
) -> list[Row]:
    """A row per run."""
    found: list[Row] = []
    for (name, arm), rate, seed in product(arms.items(), rates, range(seeds)):
        one = run(arm, seed, rate, steps)
        numbers = {"samples": one.samples, "reward": one.reward} | bias_of(one.records)
        found.append({"arm": name, "rate": rate, "seed": seed} | numbers)
    return found


def table(rows: Sequence[Row]) -> str:
    """Thousands of samples until the target, median [least, most], by rate; at the lowest rate the mean bias of draws
    and the share of groups that teach."""
    rates = sorted({row["rate"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == name]
        cells = [_middle([row["samples"] / 1000 for row in mine if row["rate"] == rate]) for rate in rates]
        low = [row for row in mine if row["rate"] == rates[0]]
        bias = " / ".join(f"{fmean(row[kind] for row in low):.2f}" for kind in BIAS)
        lines.append([f"`{name}`", *cells, bias, f"{fmean(row['teach'] for row in low):.0%}"])
    bias = f"drawn / uniform, {' / '.join(BIAS)} (rate {rates[0]:g})"
    return markdown_table(["prompts", *(f"rate {rate:g}" for rate in rates), bias, "teach"], lines)


def _middle(values: Sequence[float]) -> str:
    return f"{median(values):.1f} [{min(values):.1f}, {max(values):.1f}]"


def tables(results: Path) -> dict[str, str]:
    """Title → table of `results.csv`. Raises OSError, ValueError."""
    return {TITLE: table(kept.read(results, COLUMNS, texts=("arm",)))}


def main(options: argparse.Namespace) -> None:
    results = options.out / "results.csv"
    seeds = 2 if options.quick else options.seeds
    kept.write(results, COLUMNS, measured(seeds))
    tell(options.out, *tables(results).values())
    if options.publish:
        kept.publish(results, "curriculum")


if __name__ == "__main__":
    main(OPTIONS)
