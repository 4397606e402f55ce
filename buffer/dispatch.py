"""What the buffer hands out: leases to actors, within the bound and their credits, and batches to the learner."""

from __future__ import annotations

import logging
import math
from functools import partial

from areal_like.types import Lease
from areal_like.wire import messages
from areal_like.wire.frames import Frame
from areal_like.wire.groups import pack_heads
from buffer.actor import Actor
from buffer.events import Forget
from buffer.injection import may_train
from buffer.partial_group import PartialGroup
from buffer.payloads import JournalError, load
from buffer.run_state import RunState
from buffer.schedulers import GroupPlan, Round, View
from buffer.status import levels
from buffer.store import LEASED, UNFINISHED, Entry, Stage

log = logging.getLogger(__name__)
Granted = tuple[Lease, PartialGroup | None, list[int]]
"""A lease, the partial group that an earlier lease left, and the samples of it that this lease carries."""


def evaluate(state: RunState, now: float) -> None:
    """Hand out held-out prompts, if a round is under way."""
    if state.phase.started_at is None:
        return
    if not state.phase.finishing and state.weights.version == state.replay.bound.batch_version(state.learner.steps):
        state.evaluation.start_if_due(state.weights.version, state.learner.steps)
    state.evaluation.tick()
    if not state.evaluation.has_rows:
        return
    actors = state.fleet.for_heldout(now)
    to_come = state.evaluation.without_share([actor.name for actor in actors])
    for actor in actors:
        leases = state.evaluation.leases(actor.name, actor.version, to_come, now)
        if leases:
            to_come -= 1
            send_leases(state, actor, [(lease, None, []) for lease in leases])


def admit(state: RunState, now: float) -> None:
    """Hand out leases, one at a time, always to the actor with the fewest groups."""
    if state.phase.started_at is None or state.phase.finishing or state.outbox.blocked:
        return
    if not (to_start := _to_start(state)):
        return
    queued, running = state.store.count(Stage.QUEUED), state.store.count(*LEASED)
    planned: dict[str, list[Granted]] = {}
    fleet, ready, barred = state.fleet, state.fleet.ready, state.fleet.barred(now)
    share = fleet.fair_share(to_start + running + len(state.hedges.pairs), len(fleet) - len(barred))
    least = state.scheduler.launch
    _note_size(state, least)
    if queued:
        for size in {entry.to_run for entry in state.store.of(Stage.QUEUED)}:
            _note_size(state, size)
            least = min(least, size)
    ready.begin(least, fleet, barred)
    while (actor := ready.first()) and len(actor.running) < share:
        granted = _next_lease(state, actor, running, queued > 0, now)
        if granted is None:
            continue
        running += 1
        actor.lease(granted[0].group_id, granted[0].launch, now)
        planned.setdefault(actor.name, []).append(granted)
    for name, all_granted in planned.items():
        send_leases(state, state.fleet.by_name[name], all_granted)


def _note_size(state: RunState, sequences: int) -> None:
    """Leases of this many sequences are possible now. If that is new, tell the actors. The minimum never rises: an
    actor that hears a larger one could fail to report free slots."""
    fleet = state.fleet
    if sequences < fleet.room or sequences % fleet.step:
        fleet.room, fleet.step = min(fleet.room, sequences), math.gcd(fleet.step, sequences)
        for actor in fleet:
            state.tell_room(actor.peer)


def _to_start(state: RunState) -> float:
    """How many groups may get a lease now. The number is kept until something happens to groups, batches or weights."""
    facts = state.store.changes, state.weights.version, state.learner.steps, state.phase.stopping
    known, found = state.to_start
    if known != facts:
        view = _view(state, state.weights.version, state.store.count(*LEASED))
        found = view.room + state.store.count(Stage.QUEUED) + state.scheduler.wants_redundant(view)
        facts = state.store.changes, *facts[1:]  # the view may have opened a batch
        state.to_start = facts, found
    return found


def _next_lease(state: RunState, actor: Actor, running: int, any_queued: bool, now: float) -> Granted | None:
    """None: this actor gets nothing more in this turn. Unless it lacks room, or a group failed on it, the other actors
    with the same weights get nothing more either."""
    ready = state.fleet.ready
    entry = _next_queued(state, actor, now) if any_queued else None
    sequences = entry.to_run if entry else state.scheduler.launch
    if not actor.takes(sequences):
        ready.has_no_room(actor, sequences)
        return None
    if entry:
        carried = state.replay.assign(entry, actor.name, actor.version)
    elif plan := _next_plan(state, actor, running):
        entry, carried = _start(state, actor, plan, now)
    elif any_queued and state.replay.queued_for(actor.version):
        ready.skip(actor)  # what failed on this one may go to others
        return None
    else:
        ready.skip_version(actor.version)
        return None
    lease = Lease(entry.id, entry.row, "train", entry.launch, entry.need)
    return lease, entry.partial, sorted(carried)


def _next_plan(state: RunState, actor: Actor, running: int) -> GroupPlan | None:
    """What to start on an actor that has room. Only the actor's version matters."""
    if state.phase.stopping and not _completes_a_batch(state):
        return None
    to_come = state.store.bytes + state.largest_payload * running  # each running group as large as the largest so far
    if to_come > state.max_bytes:
        wanted = state.replay.bound.batches.first(state.learner.wanted.index + 1) if state.learner.wanted else 0
        if state.store.slots.next >= wanted:  # slots that the learner waits for are never stopped: they free memory
            state.store.slots.check_memory(state.max_bytes)
            return None
    return state.scheduler.admit(_view(state, actor.version, running))


def _next_queued(state: RunState, actor: Actor, now: float) -> Entry | None:
    """The queued group for this actor. A group that failed on it goes to another actor with weights as new, if any."""
    entry = state.replay.queued_for(actor.version)
    if entry is None or entry.failed_on != actor.name:
        return entry
    others = (each for each in state.fleet.at_work(now) if each is not actor)
    if not any(each.version >= actor.version for each in others):
        return entry
    return state.replay.queued_for(actor.version, not_on=actor.name)


def _start(state: RunState, actor: Actor, plan: GroupPlan, now: float) -> tuple[Entry, dict[int, int]]:
    """Start the group of a plan: returns it, RUNNING, and the samples that its lease carries."""
    replay = state.replay
    entry = state.store.first(Stage.DEFERRED) if plan.deferred else None
    if entry is not None:
        replay.readmit(entry, plan.launch, plan.need)
        return entry, replay.assign(entry, actor.name, actor.version)
    group_id, row, task = state.prompts.next()
    held = actor.name, actor.version, now
    return replay.admit(group_id, row, plan.launch, plan.need, *held, plan.redundant, task), {}


def _open_batch(state: RunState) -> None:
    """Fix the size of a batch's groups before the first of them starts."""
    replay, scheduler = state.replay, state.scheduler
    batches = replay.bound.batches
    batch = batches.of(state.store.slots.next)
    while batches.opened <= batch and scheduler.ready_to_open(batches.opened, state.learner.steps):
        if batches.opened < batch:  # slots of these are in use, but no event opened them: all have the usual size
            replay.open_batch(batches.usual, None)
            continue
        least, seen = _least_groups(state, batch), state.gauges.take_seen()
        groups = scheduler.open_batch(state.samples_per_batch, replay.deferred, seen, least)
        replay.open_batch(groups, scheduler.state_dict())
        state.gauges.note_decision(batch, scheduler.metrics() | {"rounds/deferred": replay.deferred})
        if state.store.results:
            state.gauges.note_decision(batch, state.store.results.metrics())


def _least_groups(state: RunState, batch: int) -> int:
    """The smallest size of this batch with which all deferred and redundant groups are trained before the data ends."""
    if state.last_batch is None or state.last_batch <= batch:
        return 0
    waiting = state.store.count(Stage.DEFERRED) + len(state.store.redundant)
    return math.ceil(waiting / (state.last_batch - batch))


def _view(state: RunState, version: int, running: int) -> View:
    """What the scheduler may know, for an actor that holds `version`. First opens the batch of the next slot, if that
    is allowed."""
    replay = state.replay
    room = replay.room(version)
    if room > 0 and state.store.slots.next >= replay.bound.batches.end:
        _open_batch(state)
        room = replay.room(version)
    in_flight = running + state.store.count(Stage.QUEUED)  # started, and the next to get a lease
    return View(room, in_flight, state.store.count(Stage.DEFERRED), partial(_round, state, version))


def _round(state: RunState, version: int) -> Round:
    store, batches = state.store, state.replay.bound.batches
    unfinished = store.count(*UNFINISHED) - len(store.redundant)
    to_come = math.inf
    lasts = [last for last in (state.last_batch, _drains_to(state)) if last is not None]
    if lasts:
        to_come = (min(lasts) - state.learner.steps) * batches.size(state.learner.steps) - len(store.entries)
    left = batches.first(state.learner.steps + 1) - store.slots.used
    return Round(
        left,
        unfinished,
        len(store.redundant),
        to_come,
        version >= state.replay.bound.batch_version(state.learner.steps),
    )


def send_leases(state: RunState, actor: Actor, all_granted: list[Granted]) -> None:
    heads, payloads = [], []
    for lease, left, carried in all_granted:
        if left is None:
            continue
        try:
            payloads.append(load(left.payload))
            heads.append((left.head, carried))
        except JournalError as error:
            log.error("group %d starts again from its prompt: %s", lease.group_id, error)
            state.replay.commit(Forget(lease.group_id))
    state.router.send(actor.peer, messages.Lease([lease for lease, _, _ in all_granted], heads), payloads)


def revoke(state: RunState) -> None:
    """Cancel leases of groups that became too old, or that another actor has finished. For some that became too old,
    ask the actor for the samples, for people to read."""
    state.end_hedges()
    for name, group_id, hand_back in state.replay.take_cancels():
        if actor := state.fleet.by_name.get(name):
            if not hand_back:
                actor.running.pop(group_id, None)
                state.fleet.ready.touch(actor)
            asks = state.samples.awaits(group_id, name)
            state.router.send(actor.peer, messages.Cancel([group_id], hand_back or asks))


def _drains_to(state: RunState) -> int | None:
    """If the run drains: the first batch that will not be trained. Active groups fill the batches before it; new
    groups complete the last of these. Computed each time, since batch sizes may change."""
    if state.phase.stopping != "drain":
        return None
    batches = state.replay.bound.batches
    return batches.of(batches.first(state.learner.steps) + len(state.store.entries) - 1) + 1


def _completes_a_batch(state: RunState) -> bool:
    """If the run drains: does the next slot belong to a batch that is still trained?"""
    last = _drains_to(state)
    return last is not None and state.store.slots.next < state.replay.bound.batches.first(last)


def _can_serve(state: RunState, batch: int) -> bool:
    """If the run drains: may this batch still come? Not if it is beyond the last batch, or no group is in progress."""
    last = _drains_to(state)
    under_way = state.store.count(*UNFINISHED)
    return last is not None and batch < last and (under_way > 0 or _completes_a_batch(state))


# ---- batches --------------------------------------------------------------------------------------------------------


def serve(state: RunState, now: float) -> None:
    """Send the batch that the learner waits for, once it is complete, and ranks their shares."""
    if state.shares.wanted:
        state.shares.answer(state.outbox)
    if state.learner.wanted is None or state.learner.peer is None:
        return
    index, version = state.learner.wanted.index, state.learner.wanted.version
    if index in state.shares.served:  # the message with the batch was lost
        state.learner.wanted = None
        state.outbox.put(state.learner.peer, *state.shares.served[index].share(0))
        return
    if state.phase.stopping == "now" and index % state.replay.bound.interval == 0:
        _tell_to_stop(state)
        return
    ready = may_train(state.replay, index)
    entries = state.replay.serve(index, as_finished=state.learner.parts is not None) if ready else []
    revoke(state)
    frames = _frames(state, entries, index)
    if not frames:
        if ready:
            _serve_part(state, index, version)
        if state.phase.stopping == "drain" and not _can_serve(state, index):
            _tell_to_stop(state)
        return
    state.learner.wanted = None
    state.phase.progress_at = now
    state.gauges.measure_rates(now)
    allowed = state.replay.oldest_allowed(index)
    info = levels(state, now) | state.gauges.batch_info(entries, version, allowed, now)
    info |= state.gauges.decision(index)
    heads, actors = [entry.head for entry in entries if entry.head], [entry.pushed_by for entry in entries]
    batch = messages.Batch(index, version, allowed, actors, pack_heads(heads), info, state.learner.redo)
    served = state.shares.put(batch, heads, frames)
    state.outbox.put(state.learner.peer, *served.share(0))
    state.shares.answer(state.outbox)


def _serve_part(state: RunState, index: int, version: int) -> None:
    """Send the groups of the wanted batch that are ready, so that the learner can compute gradients early. They stay
    WAITING: they are served, and recorded, with the whole batch."""
    begin = state.learner.parts
    if begin is None or state.learner.peer is None:
        return
    facts = index, begin, state.store.changes
    if facts == state.learner.parts_by:
        return
    state.learner.parts_by = facts
    entries = state.replay.finished_of(index)[begin:]
    if frames := _frames(state, entries):
        allowed = state.replay.oldest_allowed(index)
        table = pack_heads([each.head for each in entries if each.head])
        actors = [each.pushed_by for each in entries]
        state.outbox.put(state.learner.peer, messages.Part(index, version, allowed, actors, table, begin), frames)
        state.learner.parts = begin + len(entries)


def _frames(state: RunState, entries: list[Entry], batch: int | None = None) -> list[Frame]:
    """The payloads of groups that go out together; `batch` if they are SERVED. Empty if the journal has lost one
    payload: that group is rolled out again, and the others wait for it."""
    frames, lost = [], []
    for entry in entries:
        try:
            frames.append(load(entry.payload))
        except JournalError as error:
            log.error("group %d will be rolled out again: %s", entry.id, error)
            lost.append(entry.id)
    if lost and batch is not None:
        state.replay.unserve(batch)
    for group_id in lost:
        state.replay.requeue(group_id)
    return [] if lost else frames


def _tell_to_stop(state: RunState) -> None:
    if state.learner.peer:
        state.learner.wanted = None  # if this message is lost, the learner asks again
        state.router.send(state.learner.peer, messages.Stop(drain=state.phase.stopping == "drain"))
