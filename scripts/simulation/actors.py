"""Modelled actors: they take leases, decode in simulated time (`actors.engines.decode_clock`), verify, push.

What an actor tells the buffer, and when, is what `actors.worker` tells it; whatever the buffer decides is decided by
the production code. Tokens are all 0: only their number counts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from statistics import NormalDist
from struct import Struct

import numpy as np

from actors import measures
from actors.engines.decode_clock import DecodeClock, Load, TimedRequest
from actors.engines.lengths import AnswerLengths
from areal_like.run.spans import Busy, Spans
from areal_like.sampling import stream_key, uniform
from areal_like.types import Completion, Finish, Lease, PartialSample, Runs
from areal_like.wire import messages
from areal_like.wire.columns import FINISHES
from areal_like.wire.frames import Payloads
from areal_like.wire.groups import Head
from areal_like.wire.messages import Message
from areal_like.wire.partials import decode_partial, encode_partial

from .cores import Cores, Process
from .costs import Costs
from .draws import RIGHT, Draws
from .pushes import hand_over
from .timeline import SimulatedRouter, Timeline

_HELDOUT, _VERIFY, _TURNS, _TOOL = 1, 3, 4, 5
"""Names of random streams."""
_NORMAL = NormalDist()
MAX_GROUPS_PER_PUSH = 64


@lru_cache
def _rows(samples: int) -> Struct:
    """So many `ROW`s: numpy takes several times as long for a few."""
    return Struct("<" + samples * "iihhid")


class Prompts:
    """What of a task matters here. `of(split, row)`: tokens of its prompt, a hash of it, the longest answer."""

    def __init__(self, of: Callable[[str, int], tuple[int, int, int]], right: float):
        self.of = lru_cache(1 << 16)(of)
        self._right = right
        self.chance = lru_cache(1 << 16)(self._chance)

    def _chance(self, digest: int) -> float:
        """The chance of a right answer to a prompt: uniform around the mean, as far as it can be."""
        width = min(self._right, 1.0 - self._right)
        return self._right + (2.0 * uniform(stream_key(RIGHT, digest)) - 1.0) * width


@dataclass(eq=False, slots=True)
class _Sample(TimedRequest):
    """`before`: runs that an earlier lease has left. `ends`: tokens at the ends of its turns, but for those behind it.
    `late`: its verification overran its time."""

    group: _Group = None  # type: ignore[assignment]
    index: int = 0
    key: int = 0
    before: Sequence[tuple[int, int]] = ()
    right: bool = False
    finish: Finish = "abort"
    open: bool = True  # it occupies a place of its actor
    ends: Sequence[int] = ()
    late: bool = False

    @property
    def all_runs(self) -> Runs:
        before, runs = self.before, self.runs
        if not before:
            return runs
        if runs and before[-1][0] == runs[0][0]:
            return [*before[:-1], (before[-1][0], before[-1][1] + runs[0][1]), *runs[1:]]
        return [*before, *runs]


@dataclass(eq=False, slots=True)
class _Group:
    lease: Lease
    prompt: int
    chance: float
    began: float
    digests: dict[int, str]
    samples: list[_Sample] = field(default_factory=list)
    good: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class World:
    """What all actors of a run share. `seed`: of the run; `most`: longest answer (None: as the task says); `cores`:
    where actors take their turns (None: those take no time); `verify_within`: most seconds of a verification; `quits`:
    called with an actor that the buffer has told to quit."""

    timeline: Timeline
    router: SimulatedRouter
    costs: Costs
    prompts: Prompts
    seed: int
    most: int | None
    lengths: AnswerLengths
    cores: Cores | None
    verify_within: float = math.inf
    quits: Callable[[SimulatedActor], None] = lambda actor: None
    draws: Draws = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", Draws(self.seed, self.lengths))


class SimulatedActor:
    """`update`: seconds from an announcement until the weights are there. `spans`: where it says when it works."""

    hears: Collection[type[Message]] = (
        messages.Lease,
        messages.Announce,
        messages.Cancel,
        messages.Room,
        messages.Quit,
    )

    def __init__(self, name: str, world: World, update: float = 0.0, spans: Spans | None = None):
        self.name, self.peer = name, name.encode()
        self.timeline, self.router, self.costs = world.timeline, world.router, world.costs
        self.world, engine = world, world.costs.engine
        self.engine = DecodeClock(
            engine.cost, engine.slots, kv_tokens=engine.kv_tokens or math.inf, interruptible=engine.interruptible
        )
        self.engine.version = -1
        self.spans, self.started_at = spans, math.inf
        self._update, self._seed = update, world.seed
        self._groups: dict[int, _Group] = {}
        self._digests: dict[int, str] = {}
        self._newest: messages.Manifest | None = None
        self._fetching = False
        written, clock = spans or Spans(), self.timeline.clock
        self._generating, self._evaluating = Busy(written, "generate", clock), Busy(written, "evaluate", clock)
        self._leased = self._ended = self._told_ended = 0
        self._room = self._step = 1
        self.dead = self._hangs = False
        self._heldout: set[int] = set()
        self._answered, self._timeouts, self._tells_timeouts_at = 0, 0, 0.0
        self._ready: list[_Group] = []
        self._planned = math.inf
        self._ended_call = self._decoded
        cores = world.cores
        self._process = Process(cores, self._advance, self._tell_now, self._send) if cores else None
        follows = cores or self.costs.verifier.median or self.costs.answers.turns.most > 1
        self._nothing_follows = not follows  # when a sequence is decoded
        self.router.peers[self.peer] = self

    def hello(self) -> None:
        self._say(messages.Hello("actor", self.name, 1, self.costs.engine.slots))

    def report(self) -> None:
        """A heartbeat with what was measured so far."""
        if self.dead:
            return
        self._note_spans()
        wall = max(0.0, self.timeline.now - self.started_at)
        if not self._hangs:
            self.engine.advance(self.timeline.now)
            self._tell()
        stats = dict[str, float | str](measures.of_engine(_Measured(self.engine, self.costs.engine.busy), wall))
        if self.costs.verifier.median:
            stats |= {"sum:rewards/answered": float(self._answered), "sum:rewards/timeouts": float(self._timeouts)}
        groups, heldout = ((), ()) if self._hangs else (self._groups, self._heldout)
        self._say(messages.Heartbeat(stats, dict.fromkeys(groups, 0), dict.fromkeys(heldout, 0)))

    def idled(self) -> tuple[float, float]:
        """Seconds since the first lease without work, and all; none of a dead process."""
        if self.dead:
            return 0.0, 0.0
        if not self._hangs:
            self.engine.advance(self.timeline.now)
        wall = max(0.0, self.timeline.now - self.started_at)
        return wall - _Measured(self.engine, self.costs.engine.busy).stats()["busy_seconds"] if wall else 0.0, wall

    def slow(self, factor: float) -> None:
        """From now on all that the engine computes takes so many times as long."""
        if not self.dead and not self._hangs:
            self.engine.advance(self.timeline.now)
            self.engine.price(self.costs.engine.cost.slower(factor))
            self._tell()

    def die(self) -> None:
        """Nothing more is heard from this process."""
        self._note_spans()
        self.dead, self.spans = True, None
        self._groups.clear()
        if self._process:
            self._process.stop()

    def hang(self) -> None:
        """From now on it says that it lives, and does nothing else."""
        self._note_spans()
        self._hangs = True
        if self._process:
            self._process.stop()

    def leave(self) -> None:
        """As at SIGTERM: hand all groups back, and end."""
        if self._process:
            self._process.tell()
        self._cancel(list(self._groups), hand_back=True, leaving=True)
        self.die()

    def _say(self, message: Message, payloads: Payloads = ()) -> None:
        if self._process and self._process.handles:
            self._process.hold(message, payloads)
        else:
            self._send(message, payloads)

    def _send(self, message: Message, payloads: Payloads) -> None:
        if not self.dead:
            self.router.say(self.peer, message, payloads)

    def _due(self, call: Callable[..., object], *arguments: object) -> None:
        """Make this call in this process's next turn: at once, if those take no time."""
        if self._process:
            self._process.due(call, *arguments)
        else:
            call(*arguments)

    # ---- the engine's clock -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.dead or self._hangs:
            return
        self.engine.advance(self.timeline.now)

    def _plan(self) -> None:
        due = self.engine.due_for(self._matters()) if self._nothing_follows else self.engine.due()
        if due != self._planned:
            self._planned = due
            if due < math.inf:
                self.timeline.at(due, self._wake, due)

    def _matters(self) -> Callable[[TimedRequest], bool]:
        """Is the end of a sample, asked of one after the other, something that the buffer hears of?"""
        missing, left = self._wanted - self._free_slots, dict[_Group, int]()

        def matters(request: TimedRequest) -> bool:
            nonlocal missing
            group: _Group = request.group  # type: ignore[attr-defined]
            missing -= 1
            if missing <= 0 or group.lease.split != "train":
                return True
            left[group] = to_come = (left[group] if group in left else group.lease.need - len(group.good)) - 1
            return to_come <= 0

        return matters

    @property
    def _free_slots(self) -> int:
        return self.engine.slots - self._leased + self._ended

    @property
    def _wanted(self) -> int:
        """With so many free slots there is something new to tell the buffer, as `actors.worker` does."""
        known = self._free_slots - (self._ended - self._told_ended)
        return max(self._room, (known // self._step + 1) * self._step)

    def _wake(self, due: float) -> None:
        if due == self._planned:  # else something has come between
            self._planned = math.inf
            self._advance()
            self._tell()

    # ---- messages ---------------------------------------------------------------------------------------------------

    def receive(self, message: Message, payloads: Payloads) -> None:
        if isinstance(message, messages.Quit):
            self.world.quits(self)
        if not self.dead and not self._hangs:
            self._due(self._handle, message, payloads)

    def _handle(self, message: Message, payloads: Payloads) -> None:
        match message:
            case messages.Lease():
                self._start(message, payloads)
            case messages.Announce():
                self._newest = message.manifest
                self._digests[message.manifest.version] = message.manifest.digest
                self._fetch()
                return  # nothing else has changed
            case messages.Cancel():
                self._cancel(message.ids, message.hand_back)
            case messages.Room():
                self._room, self._step = message.sequences, message.step
        self._tell()

    def _tell(self) -> None:
        if self.dead or self._hangs:
            return
        if not self._process:
            self._tell_now()
        elif not self._process.handles:  # else its turn tells
            self._plan()

    def _tell_now(self) -> None:
        """Tell the buffer, once for all that happened at this time, of freed places and of finished groups; and plan
        when to look again."""
        if self._told_ended != self._ended:
            free = self._free_slots
            if free == self.engine.slots or free >= self._wanted:
                self._told_ended = self._ended
                self._say(messages.Credit(self._ended))
        if self._ready:
            self._push()
        self._plan()

    def _fetch(self) -> None:
        newest = self._newest
        if self._fetching or newest is None or newest.version <= self.engine.version:
            return
        self._fetching = True
        self.timeline.after(self._update, self._due, self._load, newest)

    def _load(self, manifest: messages.Manifest) -> None:
        if self.dead or self._hangs:
            return
        begin = self.timeline.now
        self.engine.advance(begin)
        applied = partial(self._due, self._applied, manifest, begin)
        self.engine.load(Load(manifest.version, begin, lambda: None, applied))
        self._advance()
        self._tell()

    def _applied(self, manifest: messages.Manifest, begin: float) -> None:
        if self.spans and not self.dead:
            self.spans.add("update", begin, self.timeline.now)
        self._fetching = False
        self._say(messages.Applied(manifest.version, manifest.digest))
        self._fetch()

    def _cancel(self, ids: Iterable[int], hand_back: bool, leaving: bool = False) -> None:
        self._advance()  # what has ended by now is pushed
        groups = [group for group in map(self._groups.get, ids) if group]
        for group in groups:
            del self._groups[group.lease.group_id]
        self._abort([sample for group in groups for sample in group.samples])  # at once: nobody takes their slots
        if hand_back:
            encoded = [self._partial(group) for group in groups]
            kept = [each for each in encoded if each]
            ids = [group.lease.group_id for group in groups]
            self._say(messages.HandBack(ids, [head for head, _ in kept], leaving), [part for _, part in kept])
        for group in groups:
            group.samples = []

    def _partial(self, group: _Group) -> tuple[messages.PartialHead, bytearray] | None:
        """What was sampled, as an actor records it: a call per sample."""
        found = {}
        for sample in group.samples:
            if runs := sample.all_runs:
                count = sum(n for _, n in runs)
                tokens, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
                call = Completion(tokens, logprobs, runs, sample.finish)
                found[sample.index] = PartialSample({(0, 0): call})
        return encode_partial(group.lease.group_id, found, group.digests | self._digests)

    # ---- groups -----------------------------------------------------------------------------------------------------

    def _start(self, message: messages.Lease, payloads: Payloads) -> None:
        now = self.timeline.now
        self.started_at = min(self.started_at, now)
        pairs = zip(message.partials, payloads, strict=True)
        carried = {head.id: decode_partial(head, payload, usable) for (head, usable), payload in pairs}
        for lease in message.leases:
            tokens, digest, longest = self.world.prompts.of(lease.split, lease.row)
            group = _Group(lease, tokens, self.world.prompts.chance(digest), now, {})
            if lease.split != "train":
                self._heldout.add(lease.group_id)
                key = stream_key(self._seed, _HELDOUT, lease.row, lease.sample)
                right = uniform(stream_key(key, RIGHT)) < group.chance
                self._add(group, 0, key, right, self.world.lengths.of(digest, key), longest, ())
                continue
            left = carried.get(lease.group_id)
            if left:
                group.digests = left.digests
            self._groups[lease.group_id] = group
            keys, draws, chances = self.world.draws.of(lease.group_id, lease.launch)
            lengths = self.world.lengths.drawn(digest, draws[: lease.launch])
            for index, whole in enumerate(lengths):
                begun = left.samples.get(index) if left else None
                before = [run for call in begun.calls.values() for run in call.runs] if begun else ()
                self._add(group, index, keys[index], chances[index] < group.chance, whole, longest, before)
        self._advance()

    def _add(
        self,
        group: _Group,
        index: int,
        key: int,
        right: bool,
        whole: int,
        longest: int,
        before: Sequence[tuple[int, int]],
    ) -> None:
        """Begin a sample of `whole` tokens, or go on with one."""
        most = self.world.most or longest
        now = self.timeline.now if self._process is None else self._process.begins()
        if self.costs.answers.drift != 1.0:
            whole = self.costs.answers.drifted(whole, self.engine.version)
        made = sum([n for _, n in before]) if before else 0
        length, given = min(whole, most) - made, group.prompt + made
        sample = _Sample("", length, whole <= most, now, self._ended_call, given)
        sample.group, sample.index, sample.key, sample.right, sample.before = group, index, key, right, before
        if group.lease.split == "train":
            group.samples.append(sample)
            self._leased += 1
        self._busy_with(sample).enter()
        if self.costs.answers.turns.most > 1 and length > 0:
            self._take_turns(sample, made, made + length)
        elif length > 0:
            self.engine.submit(sample)
        else:  # it was complete, but not yet verified
            sample.finish = "stop" if sample.stops else "length"
            self.timeline.at(now, self._due, self._finish, sample)

    def _take_turns(self, sample: _Sample, made: int, whole: int) -> None:
        """Begin the next of its turns, of `whole` tokens in all; `made` of them stand. A tool is called again if its
        result was not there yet."""
        turns = self.costs.answers.turns
        count = turns.least + int(uniform(stream_key(sample.key, _TURNS)) * (turns.most - turns.least + 1))
        ends = [whole * turn // count for turn in range(1, count)]
        behind = [end for end in ends if 0 < end <= made]
        sample.ends = [*(end for end in ends if end > made), whole]
        sample.prompt += turns.tokens * len(behind)
        sample.length = sample.ends[0] - made
        if made in behind:
            sample.prompt -= turns.tokens
            self._call_tool(sample)
        else:
            self.engine.submit(sample)

    def _call_tool(self, sample: _Sample) -> None:
        turns = self.costs.answers.turns
        draw = uniform(stream_key(sample.key, _TOOL, len(sample.ends)))
        seconds = turns.tool * math.exp(turns.sigma * _NORMAL.inv_cdf(max(draw, 2.0**-53)))
        self.timeline.after(seconds, self._due, self._go_on, sample)

    def _go_on(self, sample: _Sample) -> None:
        """The tool has answered: the next turn."""
        if self.dead or self._hangs or not sample.open:
            return
        sample.prompt += self.costs.answers.turns.tokens
        sample.length = sample.ends[0] - sum(n for _, n in sample.before)
        sample.arrival = self.timeline.now
        self.engine.submit(sample)
        self._advance()
        self._tell()

    def _finish(self, sample: _Sample) -> None:
        if self._process:
            self._process.ended()
        self._verify(sample)
        self._tell()

    def _decoded(self, request: TimedRequest, finish: Finish) -> None:
        assert isinstance(request, _Sample)
        request.finish = finish
        if finish == "abort":
            return
        if self._nothing_follows:
            self._sampled(request)
            return
        if len(request.ends) > 1:
            request.ends = request.ends[1:]
            self._due(self._call_tool, request)
            return
        self._due(self._verify if self._process is None else self._finish, request)

    def _verify(self, sample: _Sample) -> None:
        verifier = self.costs.verifier
        if not verifier.median:
            self._sampled(sample)
            return
        spread = verifier.sigma * _NORMAL.inv_cdf(max(uniform(stream_key(sample.key, _VERIFY)), 2.0**-53))
        seconds = verifier.median * math.exp(spread)
        sample.late = seconds > self.world.verify_within
        begin = self._process.seconds if self._process else 0.0  # in this turn, behind the samples before
        self.timeline.after(begin + min(seconds, self.world.verify_within), self._due, self._verified, sample)

    def _verified(self, sample: _Sample) -> None:
        self._answered += 1
        self._timeouts += sample.late
        self._sampled(sample)
        self._tell()
        if sample.late and self.timeline.now >= self._tells_timeouts_at:
            self._tells_timeouts_at = self.timeline.now + self.costs.failures.heartbeat
            self.report()

    def _is_right(self, sample: _Sample) -> bool:
        return sample.right and not sample.late

    def _sampled(self, sample: _Sample) -> None:
        if not sample.open or self.dead or self._hangs:
            return  # it was cut, or its lease has ended
        group = sample.group
        self._close(sample)
        if group.lease.split != "train":
            self._heldout.discard(group.lease.group_id)
            runs, right = sample.all_runs, self._is_right(sample)
            ages = min(version for version, _ in runs), max(version for version, _ in runs)
            length = sum(n for _, n in runs)
            self._say(messages.Evaluated(group.lease.group_id, float(right), *ages, length, None))
            return
        group.good.append(sample.index)
        if len(group.good) == group.lease.need:
            del self._groups[group.lease.group_id]
            if len(group.good) < len(group.samples):
                self._leave_out(group)
            self._ready.append(group)

    def _leave_out(self, group: _Group) -> None:
        rest = [sample for sample in group.samples if sample.index not in group.good]
        self._abort(rest)
        cut = sorted(length for sample in rest if (length := sum(n for _, n in sample.all_runs)))
        self._say(messages.LeftOut(group.lease.group_id, cut, []))

    def _abort(self, samples: list[_Sample]) -> None:
        running = [sample for sample in samples if sample.open]
        for sample in running:
            self._close(sample)
        self.engine.abort(running, self.timeline.now)

    def _close(self, sample: _Sample) -> None:
        sample.open = False
        self._ended += sample.group.lease.split == "train"
        self._busy_with(sample).leave()

    def _busy_with(self, sample: _Sample) -> Busy:
        return self._generating if sample.group.lease.split == "train" else self._evaluating

    def _note_spans(self) -> None:
        """Write down what was worked on so far, as `actors.worker` does."""
        if not self._hangs:
            self._generating.so_far()
            self._evaluating.so_far()

    def _push(self) -> None:
        ready, self._ready = self._ready, []
        for start in range(0, len(ready), MAX_GROUPS_PER_PUSH):
            heads = [self._head(group) for group in ready[start : start + MAX_GROUPS_PER_PUSH]]
            self._say(hand_over(heads), [zeros(head.size) for head in heads])

    def _head(self, group: _Group) -> Head:
        """That of a finished group, whose samples are forgotten."""
        good, prompt, rows, runs = sorted(group.good), group.prompt, list[float](), list[int]()
        samples, group.samples = group.samples, []  # they refer to the group, and no collector looks for cycles
        tokens = 0
        for index in good:
            sample = samples[index]
            mine, length = sample.runs, sample.made
            if sample.before:
                mine, length = sample.all_runs, length + sum([n for _, n in sample.before])
            rows += (prompt, length, FINISHES.index(sample.finish), 0, len(mine), self._is_right(sample))
            for run in mine:
                runs += run
            tokens += length
        versions = set(runs[::2])
        digests = {each: self._digests.get(each) or group.digests[each] for each in versions}
        return Head(
            group.lease.group_id,
            len(good),
            self.timeline.now - group.began,
            digests,
            _rows(len(good)).pack(*rows),
            array("i", runs).tobytes(),
            4 * prompt * len(good) + 9 * tokens,
            min(versions),
            max(versions),
            tokens,
        )


class _Measured:
    """An engine's totals, as `actors.measures` asks for them."""

    def __init__(self, clock: DecodeClock, busy: float):
        self._clock, self._busy = clock, busy

    def stats(self) -> dict[str, float]:
        clock, busy = self._clock, self._busy * self._clock.totals["busy_seconds"]
        now = {"running": float(len(clock.running)), "waiting": float(len(clock.waiting))}
        return {**clock.totals, **now, "busy_seconds": busy}


_zeros = bytes(1 << 20)


def zeros(size: int) -> memoryview:
    """A payload of so many bytes; all share their memory."""
    global _zeros
    if size > len(_zeros):
        _zeros = bytes(2 * size)
    return memoryview(_zeros)[:size]
