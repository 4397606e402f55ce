"""When to start which groups. Schedulers do no I/O and read no clock; the buffer asks, they answer.

All modes use the same buffer. A scheduler sets how stale a group may become (`max_staleness`: admission enforces this
bound), how large the groups of a batch are, and, given a `View`, what to start now. It may start *redundant* groups:
more than a batch has places (`buffer.store`). Your own inherits from `Scheduler`; the config has `module:Name`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from buffer.sizing import GroupLengths, Sizing


class GroupPlan(msgspec.Struct, frozen=True):
    """Start `launch` samples of one prompt; the first `need` that finish make the group. `deferred`: take the prompt
    that has waited longest in the queue, not a new one. `redundant`: the group gets no place of its own."""

    launch: int
    need: int
    deferred: bool = False
    redundant: bool = False


class Round(NamedTuple):
    """How far the round is, in groups, for schedulers that start no group of a later batch. `left`: places of the next
    batch without a group; `unfinished`: with one that is not ready. `redundant`: groups without a place. `fresh`: new
    prompts until the end of the data (0 or below: none). `current`: does the actor in question hold the newest
    weights?"""

    left: int
    unfinished: int
    redundant: int
    fresh: float
    current: bool


class View(msgspec.Struct, frozen=True):
    """What a scheduler may know, all in groups. `room`: how many the bound allows now, on the weights of the actor in
    question. `running`: in flight, on an actor or requeued. `deferred`: in the queue. `round`: costly, for schedulers
    that work in rounds."""

    room: float
    running: int
    deferred: int
    round: Callable[[], Round]


class Scheduler:
    """What all schedulers share. `sizing`: `buffer.sizing`. `oversample_responses`: samples started per sample needed.

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
    `oversample_responses`: samples started per sample needed; above 1 short answers are trained too often.
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
