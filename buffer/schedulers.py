"""When to start which groups. Schedulers do no I/O and read no clock; the buffer asks, they answer.

All modes use the same buffer. A scheduler sets how stale a group may become (`max_staleness`: admission enforces this
bound), how large the groups of a batch are, and, given a `View`, what to start now. It may start *redundant* groups:
more than a batch has places (`buffer.store`). To write your own, inherit from `Scheduler` and name the class in the
config as `module:Name`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from buffer.sizing import GroupLengths, Sizing


class GroupPlan(NamedTuple):
    """Start `launch` samples of one prompt; the first `need` that finish make the group. `deferred`: take the prompt
    that has waited longest in the queue, not a new one. `redundant`: the group gets no place of its own."""

    launch: int
    need: int
    deferred: bool = False
    redundant: bool = False


class Round(NamedTuple):
    """How far the round is, in groups, for schedulers that start no group of a later batch. `left`: places of the next
    batch to train that no group has yet. `unfinished`: places whose group is not ready. `redundant`: groups without a
    place. `fresh`: new prompts until the end of the data (0 or below: none). `current`: does the actor in question hold
    the newest weights?"""

    left: int
    unfinished: int
    redundant: int
    fresh: float
    current: bool


class View(NamedTuple):
    """What a scheduler may know, all in groups. `room`: how many the bound allows now, on the weights of the actor in
    question. `running`: in flight, on an actor or requeued. `deferred`: in the queue. `round`: call it only if the
    scheduler works in rounds; it costs more than all the rest, and every lease makes a view."""

    room: float
    running: int
    deferred: int
    round: Callable[[], Round]


class Scheduler:
    """What all schedulers share. `sizing`: see `buffer.sizing`. `oversample_responses`: samples started per sample
    needed.

    The journal keeps `state_dict` for each opened batch; `load_state_dict` gets it back after a crash.
    """

    max_staleness: float = 0
    remembered: tuple[str, ...] = ("group_size", "launch")

    def __init__(self, sizing: Sizing, oversample_responses: float = 1.0):
        self.sizing, self.oversample_responses = sizing, oversample_responses
        self.group_size = sizing.group_size
        self.launch = math.ceil(self.group_size * oversample_responses)

    def ready_to_open(self, batch: int, trained_batches: int) -> bool:
        """May the first group of `batch` start, apart from the bound?"""
        return True

    def open_batch(self, samples: int, deferred: int, seen: Sequence[GroupLengths], least: int = 0) -> int:
        """The number of groups of the next batch, which has `samples` samples. `deferred`: groups in the queue. `seen`:
        lengths of groups that ended since the last batch was opened. `least`: with fewer groups, part of the queue
        would remain at the end of the data."""
        size = self.sizing.next_size(seen)
        if samples // size < least:
            size = max((each for each in self.sizing.sizes if samples // each >= least), default=size)
        self.group_size, self.launch = size, math.ceil(size * self.oversample_responses)
        return samples // size

    def admit(self, view: View) -> GroupPlan | None:
        """The next group to start on an actor with room for `launch` sequences; None: start none now."""
        raise NotImplementedError

    def wants_redundant(self, view: View) -> int:
        """How many redundant groups to start once all places are taken."""
        return 0

    def metrics(self) -> dict[str, float]:
        """Metrics that explain the newest batch."""
        size = {"sizing/group_size": float(self.group_size)} if len(self.sizing.sizes) > 1 else {}
        return self.sizing.metrics() | size

    def state_dict(self) -> object:
        """The state as plain data; None: no state."""
        sizing = self.sizing.state_dict()
        if sizing is None and self.remembered is Scheduler.remembered:
            return None
        return {"sizing": sizing} | {name: getattr(self, name) for name in self.remembered}

    def load_state_dict(self, state: Any) -> None:
        for name in self.remembered:
            setattr(self, name, state.get(name, getattr(self, name)))
        if state["sizing"] is not None:
            self.sizing.load_state_dict(state["sizing"])


class AsyncScheduler(Scheduler):
    """Start a group whenever there is room: generation and training overlap.

    `max_staleness` is in versions (inf: unbounded). `max_inflight_groups`: most groups rolled out at once.
    `oversample_responses`: samples started per sample needed; the first to finish make the group. Short answers are
    then trained too often.
    """

    def __init__(
        self,
        sizing: Sizing,
        *,
        max_staleness: Annotated[float, "[0, inf]"] = 1,
        max_inflight_groups: Annotated[int, "[1, inf)"] | None = None,
        oversample_responses: Annotated[float, "[1, inf)"] = 1.0,
    ):
        super().__init__(sizing, oversample_responses)
        if math.isfinite(max_staleness) and max_staleness != int(max_staleness):
            raise ValueError(f"scheduler.max_staleness: got {max_staleness}, expected a whole number, or inf")
        self.max_staleness = max_staleness
        self.max_inflight_groups = max_inflight_groups

    def admit(self, view: View) -> GroupPlan | None:
        capped = self.max_inflight_groups is not None and view.running >= self.max_inflight_groups
        return None if capped or view.room < 1 else GroupPlan(self.launch, self.group_size, view.deferred > 0)


class SyncScheduler(Scheduler):
    """Rounds: the groups of batch k start once batch k−1 is trained, on its weights. With over-provisioning this is
    tail batching of RollPacker (arXiv 2509.21009, section 4.1).

    A *short* round starts `oversample_prompts` · P groups for P places. The first P that are done, reward included, are
    kept; the others are cut at once and go to the queue. When the queue holds P or more, the next round is *long*: it
    takes P groups of the queue, first in, first out, and nothing else. So each prompt is trained once, and at the end
    of the data rounds empty the queue. We differ from the paper: `oversample_responses` is 1 by default,
    since closing a group at its first responses favours short answers *within* a prompt; it applies in short rounds.

    A group that was cut starts again on the weights of its new round: strictly on-policy. With `max_staleness` above 0
    and `partial_rollout: resume` it continues from tokens that are up to `max_staleness` versions old, off-policy.
    """

    def __init__(
        self,
        sizing: Sizing,
        *,
        oversample_prompts: Annotated[float, "[1, inf)"] = 1.0,
        oversample_responses: Annotated[float, "[1, inf)"] = 1.0,
        max_staleness: Annotated[float, "[0, inf)"] = 0,
    ):
        super().__init__(sizing, oversample_responses)
        self.oversample_prompts = oversample_prompts
        if max_staleness != int(max_staleness) or (max_staleness and oversample_prompts == 1):
            raise ValueError(
                f"scheduler.max_staleness={max_staleness}: mode=sync allows 0 only. A larger bound needs "
                "scheduler.oversample_prompts above 1, whose cut groups continue later; for stale data use mode=async"
            )
        self.max_staleness = max_staleness
        self.groups, self.long = 0, False
        if oversample_prompts > 1:
            self.remembered = (*self.remembered, "groups", "long")

    def ready_to_open(self, batch: int, trained_batches: int) -> bool:
        return batch <= trained_batches

    def open_batch(self, samples: int, deferred: int, seen: Sequence[GroupLengths], least: int = 0) -> int:
        self.groups = super().open_batch(samples, deferred, seen, least)
        self.long = deferred >= self.groups
        if self.long:
            self.launch = self.group_size
        return self.groups

    def admit(self, view: View) -> GroupPlan | None:
        now = view.round()
        if not now.current or (now.fresh < 1 and not view.deferred):
            return None
        if self.long and now.redundant and not view.deferred:
            return None  # actors have yet to hand back the rest of the queue
        if view.room >= 1 and now.left > 0:
            from_queue = view.deferred > 0 and (self.long or now.fresh < 1)
            return GroupPlan(self.launch, self.group_size, from_queue)
        return GroupPlan(self.launch, self.group_size, redundant=True) if self._redundant_wanted(now) else None

    def wants_redundant(self, view: View) -> int:
        now = view.round()
        to_start = max(now.left, 0)  # these start first, the redundant ones right after
        after = now._replace(left=0, unfinished=now.unfinished + to_start, fresh=now.fresh - to_start)
        return self._redundant_wanted(after)

    def _redundant_wanted(self, now: Round) -> int:
        if self.long or not now.unfinished or now.left > 0:
            return 0
        redundant = math.ceil(self.oversample_prompts * self.groups) - self.groups
        return max(0, int(min(redundant - now.redundant, now.fresh)))

    def metrics(self) -> dict[str, float]:
        found = {"rounds/long": float(self.long)} if self.oversample_prompts > 1 else {}
        return super().metrics() | found
