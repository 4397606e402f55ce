"""Modelled actors: they take leases, decode in simulated time (`actors.engines.decode_clock`), verify, push.

An actor sends the buffer the messages that `actors.worker` sends. Tokens are all 0: only their number counts.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from actors.engines.decode_clock import DecodeClock, Load, TimedRequest, normal
from areal_like.sampling import stream_key, uniform
from areal_like.types import Finish, Lease
from areal_like.wire import messages
from areal_like.wire.actor_client import MAX_GROUPS_PER_PUSH
from areal_like.wire.frames import Payloads
from areal_like.wire.groups import FINISHES, ROW
from areal_like.wire.messages import Message

from .costs import Costs
from .timeline import SimulatedRouter

HELDOUT, RIGHT, VERIFY = 1, 2, 3
"""Names of random streams."""
_BYTES = memoryview(bytearray(1 << 28))
_BYTES[-1] = 1
"""All payloads are its ends: virtual memory, of which only the last byte is written, a token of a loss mask."""
PromptOf = Callable[[str, int], tuple[int, int, int]]
"""(split, row) → tokens of the prompt, a hash of it, tokens of the longest answer."""


@dataclass(eq=False, slots=True)
class _Sample(TimedRequest):
    """`open`: it occupies a slot of its actor."""

    group: _Group = None  # type: ignore[assignment]
    index: int = 0
    key: int = 0
    right: bool = False
    finish: Finish = "abort"
    open: bool = True


@dataclass(eq=False, slots=True)
class _Group:
    """`prompt`, `hash` and `longest`: of its prompt (`PromptOf`)."""

    lease: Lease
    prompt: int
    hash: int
    longest: int
    began: float
    samples: list[_Sample] = field(default_factory=list)
    good: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class World:
    """Shared by all actors of a run. `seed`: of the run; `dice`: of the jitter."""

    router: SimulatedRouter
    costs: Costs
    prompt_of: PromptOf
    seed: int
    dice: random.Random

    def pace(self) -> float:
        """A factor of durations: 1 on average, with a relative standard deviation of `jitter` (gamma distribution)."""
        if not (jitter := self.costs.sample.jitter):
            return 1.0
        return self.dice.gammavariate(jitter**-2, jitter**2)


class SimulatedActor:
    """Works in turns: waits `wake` seconds when a call is due, works, sends. `update`: seconds until weights come."""

    def __init__(self, name: str, world: World, update: float):
        self.name, self.peer, self.world, self._update = name, name.encode(), world, update
        self.timeline, engine = world.router.timeline, world.costs.engine
        self.engine = DecodeClock(engine.cost, engine.slots, interruptible=engine.interruptible)
        self.engine.version = -1
        self._lengths = world.costs.answers.lengths
        self._first_lease = math.inf
        self._groups: dict[int, _Group] = {}
        self._digests: dict[int, str] = {}
        self._fetching = False
        self._active = self._ended = self._reported = 0  # samples of training groups
        self._smallest = engine.slots  # samples of the smallest lease so far
        self._ready: list[_Group] = []
        self._planned = math.inf
        self._asleep, self._pace, self._worked = True, 1.0, 0.0  # seconds of work in this turn
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._unsent: list[tuple[Message, Payloads]] = []
        world.router.peers[self.peer] = self

    def hello(self) -> None:
        self.world.router.say(self.peer, messages.Hello("actor", self.name, 1, self.engine.slots))

    def idled(self) -> tuple[float, float]:
        """Seconds without work since the first lease, and all seconds since then."""
        if self._first_lease == math.inf:
            return 0.0, 0.0
        self.engine.advance(self.timeline.now)
        wall = self.timeline.now - self._first_lease
        return wall - self.engine.totals["busy_seconds"], wall

    def receive(self, message: Message, payloads: Payloads) -> None:
        match message:
            case messages.Lease():
                self._due(self._start, message)
            case messages.Announce(manifest):
                self._digests[manifest.version] = manifest.digest
                self._due(self._fetch)
            case messages.Cancel(ids, hand_back):
                self._due(self._cancel, ids, hand_back)

    def _due(self, call: Callable[..., object], *arguments: object) -> None:
        self._calls.append((call, arguments))
        if self._asleep:
            self._asleep = False
            self.timeline.after(self.world.costs.sample.wake * self.world.pace(), self._turn)

    def _say(self, message: Message, payloads: Payloads = ()) -> None:
        self._unsent.append((message, payloads))

    def _work(self, seconds: float) -> float:
        self._worked += self._pace * seconds
        return self.timeline.now + self._worked

    def _turn(self) -> None:
        """Make the calls that are due; report freed slots, as `actors.worker` does, and finished groups."""
        self._pace, self._worked = self.world.pace(), 0.0
        calls, self._calls = self._calls, []
        self.engine.advance(self.timeline.now)
        for call, arguments in calls:
            call(*arguments)
        free = self.engine.slots - self._active
        known = free - (self._ended - self._reported)
        if known < free and (not self._active or free // self._smallest > known // self._smallest):
            self._reported = self._ended
            self._say(messages.Credit(self._ended))
        ready, self._ready = self._ready, []
        for start in range(0, len(ready), MAX_GROUPS_PER_PUSH):
            self._push(ready[start : start + MAX_GROUPS_PER_PUSH])
        self._plan()
        self.timeline.after(self._worked, self._end_turn)

    def _end_turn(self) -> None:
        unsent, self._unsent = self._unsent, []
        for message, payloads in unsent:
            self.world.router.say(self.peer, message, payloads)
        self._asleep = not self._calls
        if self._calls:
            self._turn()

    def _plan(self) -> None:
        due = self.engine.due()
        if due != self._planned:
            self._planned = due
            if due < math.inf:
                self.timeline.at(due, self._wake, due)

    def _wake(self, due: float) -> None:
        if due == self._planned:  # else something has come between
            self._planned = math.inf
            self.engine.advance(self.timeline.now)
            self._plan()

    def _fetch(self) -> None:
        newest = max(self._digests)
        if not self._fetching and newest > self.engine.version:
            self._fetching = True
            self.timeline.after(self._update, self._due, self._load, newest)

    def _load(self, version: int) -> None:
        self.engine.load(Load(version, self.timeline.now, partial(self._due, self._applied, version)))
        self.engine.advance(self.timeline.now)

    def _applied(self, version: int) -> None:
        self._fetching = False
        self._say(messages.Applied(version, self._digests[version]))
        self._fetch()

    def _start(self, message: messages.Lease) -> None:
        self._first_lease = min(self._first_lease, self.timeline.now)
        for lease in message.leases:
            group = _Group(lease, *self.world.prompt_of(lease.split, lease.row), self.timeline.now)
            if lease.split != "train":
                self._add(group, 0, stream_key(self.world.seed, HELDOUT, lease.row, lease.sample))
                continue
            self._groups[lease.group_id] = group
            self._smallest = min(self._smallest, lease.launch)
            self._active += lease.launch
            for index in range(lease.launch):
                group.samples.append(self._add(group, index, stream_key(self.world.seed, lease.group_id, index)))
        self.engine.advance(self.timeline.now)

    def _add(self, group: _Group, index: int, key: int) -> _Sample:
        whole, begins = self._lengths.of(group.hash, key), self._work(self.world.costs.sample.begin)
        right = uniform(stream_key(key, RIGHT)) < _chance(self.world.costs.answers.right, group.hash)
        length, stops = min(whole, group.longest), whole <= group.longest
        sample = _Sample("", length, stops, begins, self._decoded, group.prompt)
        sample.group, sample.index, sample.key, sample.right = group, index, key, right
        self.engine.waiting.append(sample)
        return sample

    def _decoded(self, request: TimedRequest, finish: Finish) -> None:
        assert isinstance(request, _Sample)
        request.finish = finish
        if finish != "abort":
            self._due(self._verify, request)

    def _verify(self, sample: _Sample) -> None:
        self._work(self.world.costs.sample.actor)
        verifier = self.world.costs.verifier
        if verifier.median:
            spread = verifier.sigma * normal(uniform(stream_key(sample.key, VERIFY)))
            seconds = self._worked + verifier.median * math.exp(spread)
            self.timeline.after(seconds, self._due, self._sampled, sample)
        else:
            self._sampled(sample)

    def _sampled(self, sample: _Sample) -> None:
        if not sample.open:
            return  # it was cut, or its lease has ended
        group, runs = sample.group, sample.runs
        self._close([sample])
        if group.lease.split != "train":
            versions, counts = zip(*runs, strict=True)
            facts = float(sample.right), min(versions), max(versions), sum(counts)
            table, payloads = self._packed([(group, [sample])])
            self._say(messages.Evaluated(group.lease.group_id, *facts, table), payloads)
            return
        group.good.append(sample.index)
        if len(group.good) == group.lease.need:
            del self._groups[group.lease.group_id]
            if rest := [each for each in group.samples if each.open]:
                self._close(rest)
                cut = sorted(length for each in rest if (length := each.made))
                self._say(messages.LeftOut(group.lease.group_id, cut, []))
            self._ready.append(group)

    def _close(self, samples: list[_Sample]) -> None:
        for sample in samples:
            sample.open = False
            if sample.group.lease.split == "train":
                self._ended += 1
                self._active -= 1
        self.engine.abort(samples, self.timeline.now)

    def _cancel(self, ids: Iterable[int], hand_back: bool) -> None:
        groups = [self._groups.pop(each) for each in ids if each in self._groups]
        self._close([sample for group in groups for sample in group.samples if sample.open])
        if hand_back:
            self._say(messages.HandBack({group.lease.group_id: _lengths(group) for group in groups}, False))
        for group in groups:
            group.samples = []  # they refer to the group, and no garbage collector runs

    def _push(self, groups: list[_Group]) -> None:
        table, payloads = self._packed([(each, [each.samples[i] for i in sorted(each.good)]) for each in groups])
        for each in groups:
            each.samples = []
        self._say(messages.Push(table), payloads)

    def _packed(self, groups: list[tuple[_Group, list[_Sample]]]) -> tuple[messages.Table, list[memoryview]]:
        table, rows, payloads = messages.Table([], b"", b"", {}), list[tuple[float, ...]](), list[memoryview]()
        runs = array("i")
        for group, samples in groups:
            tokens = 0
            for place, sample in enumerate(samples):
                mine, length = sample.runs, sample.made
                rows.append(
                    (0 if place else group.prompt, length, FINISHES.index(sample.finish), 0, len(mine), sample.right)
                )
                tokens += length
                for version, count in mine:
                    runs.extend((version, count))
                    table.digests[version] = self._digests[version]
            table.groups.append((group.lease.group_id, len(samples), self.timeline.now - group.began))
            payloads.append(_BYTES[-4 * group.prompt - 9 * tokens :])
        table.rows, table.runs = np.array(rows, ROW).tobytes(), runs.tobytes()
        return table, payloads


def _lengths(group: _Group) -> messages.Lengths:
    return [(each.made, each.index not in group.good) for each in group.samples if each.made]


@lru_cache(1 << 16)
def _chance(right: float, digest: int) -> float:
    """Of a right answer to a prompt: uniform around the mean, as far as it can be."""
    return right + (2.0 * uniform(stream_key(RIGHT, digest)) - 1.0) * min(right, 1.0 - right)
