"""Who gets which lease: training groups within the bound and the actors' credits, and held-out prompts beside them."""

from __future__ import annotations

import heapq

from areal_like.types import Lease
from buffer.entries import Stage
from buffer.fleet import Actor
from buffer.partials import Partial
from buffer.run_state import RunState
from buffer.schedulers import View

Granted = tuple[Lease, Partial | None, list[int]]
"""A lease, what an earlier one has left of its group, and which samples of that it carries."""


def evaluate(state: RunState) -> None:
    """Leases of held-out prompts, if a round is under way."""
    if state.started_at is None:
        return
    if not state.finishing and state.version == state.replay.bound.batch_version(state.steps):
        state.evaluation.start_if_due(state.version, state.steps)
    state.evaluation.tick()
    if not state.evaluation.has_rows:
        return
    to_come = state.evaluation.without_share([actor.name for actor in state.fleet])
    for actor in state.fleet:
        leases = state.evaluation.leases(actor.name, actor.version, to_come)
        if leases:
            to_come -= 1
            _send_leases(state, actor, [(lease, None, []) for lease in leases])


def admit(state: RunState, now: float) -> None:
    """Hand out leases, one at a time to the actor that holds the fewest."""
    if state.started_at is None or state.finishing or state.outbox.blocked:
        return
    queued = state.replay.count(Stage.QUEUED)
    to_start = state.replay.room(state.version) + queued
    if not to_start:
        return
    planned: dict[str, list[Granted]] = {}
    share, running = state.fleet.fair_share(to_start), sum(len(actor.running) for actor in state.fleet)
    candidates = [(len(actor.running), place, actor) for place, actor in enumerate(state.fleet) if actor.version >= 0]
    heapq.heapify(candidates)
    while candidates:
        held, place, actor = candidates[0]
        granted = None
        if held < share and actor.takes(state.scheduler.sizing.largest):
            granted = _next_lease(state, actor, running, queued > 0, now)
        if granted is None:
            heapq.heappop(candidates)
            continue
        heapq.heapreplace(candidates, (held + 1, place, actor))
        running += 1
        actor.running.add(granted[0].group_id)
        actor.leased += granted[0].launch
        planned.setdefault(actor.name, []).append(granted)
    for name, all_granted in planned.items():
        _send_leases(state, state.fleet.by_name[name], all_granted)


def _next_lease(state: RunState, actor: Actor, running: int, any_queued: bool, now: float) -> Granted | None:
    entry = state.replay.queued_for(actor.version) if any_queued else None
    carried: dict[int, int] = {}
    if entry:
        carried = state.replay.assign(entry, actor.name, actor.version)
    elif _bytes_to_come(state) > state.max_bytes and state.replay.slots.next >= _slots_wanted(state):
        # Never the slots that the learner waits for: its batch is what frees memory.
        state.replay.slots.check_memory(state.max_bytes)
        return None
    else:
        view = View(
            room=int(state.replay.room(actor.version) > 0),
            running=running,
            admitted_slots=state.replay.admitted_slots,
            trained_batches=state.steps,
            groups_per_batch=state.replay.bound.groups_per_batch,
        )
        plans = state.scheduler.admit(view)
        if not plans:
            return None
        group_id, row = state.prompts.next()
        plan, held = plans[0], actor.version
        entry = state.replay.admit(group_id, row, plan.launch, plan.need, actor.name, held, now)
    lease = Lease(entry.id, entry.row, "train", entry.launch, entry.need)
    return lease, entry.partial, sorted(carried)


def _bytes_to_come(state: RunState) -> int:
    """Payloads that are held, and those of groups that run: taken to be as large as the largest one so far."""
    return state.replay.bytes + state.largest_payload * state.replay.count(Stage.RUNNING)


def _slots_wanted(state: RunState) -> int:
    """The slots below this belong to the batch that the learner waits for, or to earlier ones."""
    return (state.wanted.body["index"] + 1) * state.replay.bound.groups_per_batch if state.wanted else 0


def _send_leases(state: RunState, actor: Actor, all_granted: list[Granted]) -> None:
    partials = [(partial, carried) for _, partial, carried in all_granted if partial]
    leases, metas = [lease for lease, _, _ in all_granted], [[partial.meta, carried] for partial, carried in partials]
    body = {"leases": leases, "partials": metas}
    state.router.send(actor.peer, "lease", body, [partial.payload for partial, _ in partials])
