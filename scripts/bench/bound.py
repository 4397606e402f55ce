"""Simulates what the hard staleness bound costs, in cases where a rule that counts groups breaks its own bound.

`python -m scripts.bench.bound [--batches N] [--json FILE]`

The buffer's own parts (replay, scheduler, policies) under a virtual clock: no sockets, no processes. A train step
takes 1; the learner asks for batch k+1 as it starts on batch k; weights are published and applied at the end of a
step, in flight. Actors roll out 32 groups at once. Batches of 16, bound 1.

stragglers   0.75 steps per group, every 16th takes 16 times as long
rejections   half of the groups are rejected by the filter when they finish
uneven       rollouts of 0.5 to 2.5 step lengths

"count" is AReaL's rule (arXiv 2505.24298, eq. 3): at most (bound + version + 1) · 16 groups accepted or running, oldest
first among the finished. "none" has no bound at all. Throughput is relative to "none", in batches per time. With
`requeue`, groups that take longer than the bound start again and again, until all others wait for them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from areal_like.wire.groups import make_head
from buffer.filters import zero_variance
from buffer.policies import Waiting, fifo, in_order, priority, windowed
from buffer.replay import Replay
from buffer.schedulers import AsyncScheduler, Round, View
from buffer.sizing import Fixed
from buffer.staleness import Bound
from buffer.store import LEASED

from ..console import output
from .figures import bench_parser

GROUPS_PER_BATCH = 16
CONCURRENT = 32
BOUND = 1
STALENESS_POLICIES = ("wait", "drop", "requeue", "mask_tokens")


def longest(group: Waiting) -> int:
    """A user's priority: long answers first."""
    assert group.head is not None
    return group.head.lengths[0]


POLICIES: dict[str, Callable[..., tuple[int, ...]]] = {
    "in_order": in_order,
    "fifo": fifo,
    "windowed": windowed,
    "priority": partial(priority, key="scripts.bench.bound:longest"),
}


@dataclass(frozen=True)
class Scenario:
    """`duration`: group id → steps that its rollout takes; `dull`: is it rejected?"""

    duration: Callable[[int], float]
    dull: Callable[[int], bool] = lambda group_id: False


def _noise(group_id: int) -> float:
    return float(np.random.default_rng([7, group_id]).random())


SCENARIOS = {
    "stragglers": Scenario(lambda group_id: 0.75 * (16 if group_id % 16 == 0 else 1)),
    "rejections": Scenario(
        lambda group_id: 0.4 + 0.2 * _noise(group_id), dull=lambda group_id: _noise(-group_id % 9973) < 0.5
    ),
    "uneven": Scenario(lambda group_id: 0.5 + 2 * _noise(group_id)),
}


@dataclass
class Outcome:
    time: float = 0.0
    batches: int = 0
    staleness: list[int] = field(default_factory=list)
    dropped: int = 0
    requeued: int = 0

    @property
    def rate(self) -> float:
        return self.batches / self.time


class Deadlock(RuntimeError):
    """Nothing runs, nothing can start, and no batch can be served."""


def no_rounds() -> Round:
    raise AssertionError("asynchronous scheduling does not ask for rounds")


class OurBuffer:
    """The buffer's parts, driven as the controller drives them."""

    def __init__(self, bound: float, policy: str, staleness_policy: str):
        self.replay = Replay(Bound(bound, GROUPS_PER_BATCH), POLICIES[policy], staleness_policy, zero_variance)
        self.scheduler = AsyncScheduler(Fixed(), max_staleness=bound, max_inflight_groups=CONCURRENT)
        self.next_id = 0

    def start(self, version: int, trained: int) -> int | None:
        """The next group to roll out, on weights of `version`."""
        replay = self.replay
        running = replay.store.count(*LEASED)
        entry = replay.queued_for(version) if running < CONCURRENT else None
        if entry:
            replay.assign(entry, "actor", version)
            return entry.id
        view = View(replay.room(version), running, 0, no_rounds)
        if not self.scheduler.admit(view):
            return None
        self.next_id += 1
        return replay.admit(self.next_id - 1, 0, 8, 8, "actor", version, 0.0).id

    def finished(self, group_id: int, began: int, version: int, length: int, dull: bool) -> None:
        runs = [(began, length - 1), (version, 1)] if version > began else [(began, length)]
        rewards = (1.0, 1.0) if dull else (0.0, 1.0)
        rows = [(1, length, 0, len(runs), reward) for reward in rewards]
        self.replay.push(make_head(group_id, rows, runs * 2, dict.fromkeys((began, version), "")), b"", version, 0.0)

    def revoked(self) -> list[int]:
        cancels = self.replay.take_cancels()
        for _, group_id, hand_back in cancels:
            if hand_back:
                self.replay.hand_back(group_id, None)
        return [group_id for _, group_id, _ in cancels]

    def serve(self, batch: int) -> list[int] | None:
        """Staleness of each group of a batch, if there is one: of its tokens that are trained."""
        entries, allowed = self.replay.serve(batch), self.replay.oldest_allowed(batch)
        return [batch - (entry.oldest_trained(allowed) or 0) for entry in entries] if entries else None

    def trained(self, batch: int) -> None:
        self.replay.finish(batch)

    def tell(self, outcome: Outcome) -> None:
        outcome.dropped, outcome.requeued = self.replay.store.dropped["stale"], self.replay.store.requeued


class CountingBuffer:
    """AReaL's admission and consumption, for comparison."""

    def __init__(self) -> None:
        self.accepted = self.running = self.next_id = 0
        self.done: list[tuple[int, int]] = []

    def start(self, version: int, trained: int) -> int | None:
        capacity = (BOUND + version + 1) * GROUPS_PER_BATCH - (self.accepted + self.running)
        if min(capacity, CONCURRENT - self.running) <= 0:
            return None
        self.running += 1
        self.next_id += 1
        return self.next_id - 1

    def finished(self, group_id: int, began: int, version: int, length: int, dull: bool) -> None:
        self.running -= 1
        if not dull:
            self.accepted += 1
            heapq.heappush(self.done, (group_id, began))

    def revoked(self) -> list[int]:
        return []

    def serve(self, batch: int) -> list[int] | None:
        if len(self.done) < GROUPS_PER_BATCH:
            return None
        return [batch - heapq.heappop(self.done)[1] for _ in range(GROUPS_PER_BATCH)]

    def trained(self, batch: int) -> None:
        pass

    def tell(self, outcome: Outcome) -> None:
        pass


def simulate(buffer: OurBuffer | CountingBuffer, scenario: Scenario, batches: int) -> Outcome:
    """Simulate until `batches` are trained. Raises Deadlock."""
    outcome, now, version = Outcome(), 0.0, 0
    running: dict[int, tuple[float, int]] = {}  # group → (end, version that it began with)
    step_ends, in_training, asked = np.inf, -1, 0
    ready: list[int] | None = None
    while outcome.batches < batches:
        ready = ready or buffer.serve(asked)
        for group_id in buffer.revoked():
            running.pop(group_id, None)
        if ready and in_training < 0:
            in_training, step_ends = asked, now + 1.0
            outcome.staleness += ready
            asked, ready = asked + 1, None
            continue
        while (begun := buffer.start(version, outcome.batches)) is not None:
            running[begun] = now + scenario.duration(begun), version
        first = min(running, key=lambda each: running[each][0], default=None)
        group_ends = running[first][0] if first is not None else np.inf
        now = min(group_ends, step_ends)
        if np.isinf(now):
            raise Deadlock(f"after {outcome.batches} batches")
        if step_ends <= group_ends:
            buffer.trained(in_training)
            version, in_training, step_ends = version + 1, -1, np.inf
            outcome.batches, outcome.time = outcome.batches + 1, now
        elif first is not None:
            _, began = running.pop(first)
            length = max(2, round(100 * scenario.duration(first)))
            buffer.finished(first, began, version, length, scenario.dull(first))
    buffer.tell(outcome)
    return outcome


def rules() -> dict[str, Callable[[], OurBuffer | CountingBuffer]]:
    """Label → the buffer with that name."""
    found: dict[str, Callable[[], Any]] = {
        "none": lambda: OurBuffer(float("inf"), "fifo", "drop"),
        "count (AReaL)": CountingBuffer,
        "in_order": lambda: OurBuffer(BOUND, "in_order", "drop"),
    }
    for policy in ("fifo", "windowed", "priority"):
        for staleness_policy in STALENESS_POLICIES:
            found[f"{policy}, {staleness_policy}"] = partial(OurBuffer, BOUND, policy, staleness_policy)
    return found


COLUMNS = ("rule", "throughput", "staleness max", "mean", "over the bound", "dropped", "requeued")


def main() -> None:
    parser = bench_parser("bound", __doc__)
    parser.add_argument("--batches", type=int, default=200)
    args = parser.parse_args()
    console = output.console()
    metrics: dict[str, float] = {}
    for name, scenario in SCENARIOS.items():
        table = output.table(f"{name}, bound {BOUND}, {args.batches} batches", *COLUMNS)
        unbounded = 0.0
        for label, make in rules().items():
            outcome = simulate(make(), scenario, args.batches)
            unbounded = unbounded or outcome.rate
            over = float(np.mean(np.array(outcome.staleness) > BOUND))
            values = [outcome.rate / unbounded, max(outcome.staleness), float(np.mean(outcome.staleness)), over]
            table.add_row(
                label, f"{values[0]:.2f}", f"{values[1]}", f"{values[2]:.2f}", f"{over:.0%}",
                f"{outcome.dropped}", f"{outcome.requeued}",
            )  # fmt: skip
            key = f"{name}/{label.replace(', ', '_').replace(' (AReaL)', '')}"
            metrics |= {f"{key}/throughput": values[0], f"{key}/staleness_max": values[1], f"{key}/over_bound": over}
        console.print(table)
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    main()
