"""When to start which groups. Schedulers do no I/O and read no clock; the buffer asks, they answer.

All modes run through the same buffer. A scheduler says how stale a group may become (`max_staleness`: the bound that
admission enforces), how large the groups of a batch are, and, asked with a `View`, what to start now. Your own one is a
class that inherits from `Scheduler`; `module:Name` names it in a config.

A scheduler may start *redundant* groups: more than there are places in a batch. The buffer sees to the rest, whatever
the scheduler (`buffer.store`): the first to finish get the places, the others are recalled at once and wait in a queue,
first in, first out, for `GroupPlan(deferred=True)`. Nothing is lost: their prompts are trained in a later batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from buffer.sizing import Lengths, Sizing


class GroupPlan(NamedTuple):
    """Start `launch` samples of one prompt; the first `need` that finish make the group. `deferred`: the prompt is that
    which waits longest in the queue, not a new one; `redundant`: the group gets no place of its own."""

    launch: int
    need: int
    deferred: bool = False
    redundant: bool = False


class Round(NamedTuple):
    """How far the round is, in groups. `left`: places of the batch that is trained next which nobody has got yet;
    `unfinished`: places given out in which nothing is ready yet; `redundant`: running without a place; `fresh`: new
    prompts until the end of the data (0 or below: none). `current`: the actor in question holds the newest weights."""

    left: int
    unfinished: int
    redundant: int
    fresh: float
    current: bool


class View(NamedTuple):
    """What a scheduler may know, all in groups. `room`: that the bound allows now on the weights of the actor in
    question; `running`; `deferred`: in the queue. `round` is called by those who think in rounds: it costs more than
    all the rest, and a view is made for every lease."""

    room: float
    running: int
    deferred: int
    round: Callable[[], Round]


class Scheduler:
    """What all of them share. `sizing` see `buffer.sizing`.

    `state_dict` is written down whenever a batch is opened, and given back after a crash.
    """

    max_staleness: float = 0

    def __init__(self, sizing: Sizing):
        self.sizing = sizing
        self.group_size = sizing.group_size
        self.launch = self.group_size

    def ready_to_open(self, batch: int, trained_batches: int) -> bool:
        """May the first group of `batch` start, as far as it is not a matter of the bound?"""
        return True

    def open_batch(self, samples: int, deferred: int, seen: Sequence[Lengths], least: int = 0) -> int:
        """The next batch, of so many samples, is about to begin: how many groups has it? `deferred` are in the queue;
        `seen` are the lengths of all groups that have ended or were broken off since the batch before was opened. With
        fewer groups than `least` some of the queue would be left over at the end of the data, so where the sizing wants
        that, the largest of its sizes that will do is taken instead."""
        size = self.sizing.next_size(seen)
        if samples // size < least:
            size = max((each for each in self.sizing.sizes if samples // each >= least), default=size)
        self.group_size = self.launch = size
        return samples // size

    def admit(self, view: View) -> GroupPlan | None:
        """The next group to start on an actor with room for `launch` sequences. None: not now."""
        raise NotImplementedError

    def wants_redundant(self, view: View) -> int:
        """How many redundant groups to start as soon as all places have been given out."""
        return 0

    def warning(self) -> str:
        """What a person should be told before a run begins; empty: nothing."""
        return ""

    def metrics(self) -> dict[str, float]:
        """Why the newest batch is as it is."""
        size = {"sizing/group_size": float(self.group_size)} if len(self.sizing.sizes) > 1 else {}
        return self.sizing.metrics() | size

    def state_dict(self) -> object:
        """Plain data; None: there is nothing to be remembered."""
        sizing = self.sizing.state_dict()
        return None if sizing is None else {"sizing": sizing, "sizes": [self.group_size, self.launch]}

    def load_state_dict(self, state: Any) -> None:
        self.group_size, self.launch = state["sizes"]
        if state["sizing"] is not None:
            self.sizing.load_state_dict(state["sizing"])


class AsyncScheduler(Scheduler):
    """Start a group whenever there is room: generation and training overlap.

    `max_staleness` in versions (inf: unbounded); `max_inflight_groups` caps the groups being rolled out at once;
    `oversample_responses`: samples started per sample that makes a group: the first to finish do.
    """

    def __init__(
        self,
        sizing: Sizing,
        *,
        max_staleness: float = 1,
        max_inflight_groups: int | None = None,
        oversample_responses: float = 1.0,
    ):
        super().__init__(sizing)
        if max_staleness < 0 or (math.isfinite(max_staleness) and max_staleness != int(max_staleness)):
            raise ValueError(f"scheduler.max_staleness is a whole number of versions >= 0, or inf; not {max_staleness}")
        if max_inflight_groups is not None and max_inflight_groups < 1:
            raise ValueError("scheduler.max_inflight_groups must be at least 1")
        self.max_staleness = max_staleness
        self.max_inflight_groups = max_inflight_groups
        self.oversample_responses = _factor("oversample_responses", oversample_responses)
        self.launch = math.ceil(self.group_size * oversample_responses)

    def open_batch(self, samples: int, deferred: int, seen: Sequence[Lengths], least: int = 0) -> int:
        groups = super().open_batch(samples, deferred, seen, least)
        self.launch = math.ceil(self.group_size * self.oversample_responses)
        return groups

    def admit(self, view: View) -> GroupPlan | None:
        capped = self.max_inflight_groups is not None and view.running >= self.max_inflight_groups
        return None if capped or view.room < 1 else GroupPlan(self.launch, self.group_size, view.deferred > 0)


class SyncScheduler(Scheduler):
    """Rounds: the groups of batch k start once batch k−1 is trained, on its weights; with over-provisioning, tail
    batching of RollPacker (arXiv 2509.21009, section 4.1).

    A *short* round starts `oversample_prompts` · P groups for P places; the first P that are done, reward included, are
    kept, and the others are cut at once and go to the queue. When P or more are in the queue the next round is *long*:
    P of the queue, first in, first out, and nothing else. So prompts are only put in another order: each is trained
    once, and at the end of the data rounds take from the queue until it is empty. We differ from the paper in that
    `oversample_responses` is 1 by default: closing a group at its first responses is a bias towards short answers
    *within* a prompt. It applies in short rounds.

    What is cut begins anew on the weights of its round: strictly on-policy. With `max_staleness` above 0 and
    `partial_rollout: resume` it goes on from its tokens of up to so many versions ago, so training is no longer
    strictly on-policy; rounds begin on the newest weights all the same.
    """

    def __init__(
        self,
        sizing: Sizing,
        *,
        oversample_prompts: float = 1.0,
        oversample_responses: float = 1.0,
        max_staleness: float = 0,
    ):
        super().__init__(sizing)
        self.oversample_prompts = _factor("oversample_prompts", oversample_prompts)
        self.oversample_responses = _factor("oversample_responses", oversample_responses)
        if max_staleness < 0 or max_staleness != int(max_staleness) or (max_staleness and oversample_prompts == 1):
            raise ValueError(
                f"scheduler.max_staleness={max_staleness}: the sync scheduler is strictly on-policy (0), unless what "
                "oversample_prompts > 1 has cut is to go on from older tokens; for stale data use mode=async"
            )
        self.max_staleness = max_staleness
        self.groups = 0
        self.long = False
        self.launch = math.ceil(self.group_size * oversample_responses)

    def ready_to_open(self, batch: int, trained_batches: int) -> bool:
        return batch <= trained_batches

    def open_batch(self, samples: int, deferred: int, seen: Sequence[Lengths], least: int = 0) -> int:
        self.groups = super().open_batch(samples, deferred, seen, least)
        self.long = deferred >= self.groups
        self.launch = self.group_size if self.long else math.ceil(self.group_size * self.oversample_responses)
        return self.groups

    def admit(self, view: View) -> GroupPlan | None:
        now = view.round()
        if not now.current or (now.fresh < 1 and not view.deferred):
            return None
        if self.long and now.redundant and not view.deferred:
            return None  # the rest of the queue is on its way back from the actors
        if view.room >= 1 and now.left > 0:
            from_queue = view.deferred > 0 and (self.long or now.fresh < 1)
            return GroupPlan(self.launch, self.group_size, from_queue)
        return GroupPlan(self.launch, self.group_size, redundant=True) if self._redundant_wanted(now) else None

    def wants_redundant(self, view: View) -> int:
        now = view.round()
        to_start = max(now.left, 0)  # these come first, and then the redundant ones at once
        after = now._replace(left=0, unfinished=now.unfinished + to_start, fresh=now.fresh - to_start)
        return self._redundant_wanted(after)

    def _redundant_wanted(self, now: Round) -> int:
        if self.long or not now.unfinished or now.left > 0:
            return 0
        redundant = math.ceil(self.oversample_prompts * self.groups) - self.groups
        return max(0, int(min(redundant - now.redundant, now.fresh)))

    def warning(self) -> str:
        if not self.max_staleness:
            return ""
        return (
            f"scheduler.max_staleness={self.max_staleness}: what a round cuts goes on from tokens of up to so many "
            "versions ago (partial_rollout: resume), so training is no longer strictly on-policy"
        )

    def metrics(self) -> dict[str, float]:
        found = {"rounds/long": float(self.long)} if self.oversample_prompts > 1 else {}
        return super().metrics() | found

    def state_dict(self) -> object:
        if self.oversample_prompts == 1:
            return super().state_dict()
        sizes = [self.group_size, self.launch]
        return {"sizing": self.sizing.state_dict(), "sizes": sizes, "groups": self.groups, "long": self.long}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.groups, self.long = state.get("groups", 0), state.get("long", False)


def _factor(name: str, value: float) -> float:
    if not 1 <= value < math.inf:
        raise ValueError(f"scheduler.{name} is at least 1, not {value}")
    return value
