"""Reports of the buffer: gauges for a train step's metrics, the status for people, and who waits for whom.

Reads only. The controller uses these when it serves a batch, answers a `status` message, or notices a stall.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from buffer.fleet import MOST_REFUSED
from buffer.store import REPORTED_STAGES, UNFINISHED, Stage

if TYPE_CHECKING:
    from buffer.run_state import RunState


def levels(state: RunState, now: float) -> dict[str, object]:
    """The present gauges, for the metrics of a train step."""
    store = state.store
    found: dict[str, object] = {f"buffer/{name}": store.count(*stages) for name, stages in REPORTED_STAGES.items()}
    found |= {"ledger/admitted": store.admitted, "ledger/trained": store.trained, "ledger/active": len(store.entries)}
    found |= {f"ledger/filtered/{reason}": n for reason, n in store.filtered.items()}
    found |= {f"ledger/dropped/{reason}": n for reason, n in store.dropped.items()}
    for task, counts in store.tasks.items():
        found |= {f"ledger_of/{task}/{fate.replace(': ', '/')}": n for fate, n in counts.items()}
    found |= {f"refused/{column}": n for column, n in state.gauges.refused.items()}
    found |= {"buffer/bytes": state.store.bytes, "buffer/max_bytes": state.max_bytes, "seconds": state.age(now)}
    found |= {"rollout/lease_timeouts": state.gauges.lease_timeouts, "rollout/hedges": state.hedges.made}
    if math.isfinite(state.replay.bound.max_staleness):
        found["staleness/bound"] = int(state.replay.bound.max_staleness)
    found["rollout/actors"] = len(state.fleet)
    return state.fleet.metrics() | state.gauges.rates | found  # metrics of actors can't replace the buffer's own


def status(state: RunState) -> dict[str, object]:
    """The status for people, as plain data."""
    now, bound = state.clock(), state.replay.bound.max_staleness
    return {
        **levels(state, now),
        "started": state.phase.started_at is not None,
        "stopping": state.phase.stopping,
        "seconds": state.age(now),
        "trained_seconds": state.gauges.trained_seconds,
        "version": state.weights.version,
        "steps": state.learner.steps,
        "ledger": state.store.ledger(),
        "staleness_max": state.store.staleness_max,
        "staleness_bound": bound if math.isfinite(bound) else None,
        "since_step": state.gauges.since_step,  # the next three count from this step of a resume
        "staleness_mean": state.gauges.staleness_mean,
        "duplicates": state.replay.duplicates,
        "resumed": state.store.resumed,
        "refused": state.router.refused,
        "evaluations": state.gauges.evaluations,
        "actors": {actor.name: actor.report(now) for actor in state.fleet},
        "left_out": state.left_out,
        "waits": waits(state),
    }


def waits(state: RunState) -> list[str]:
    """Who waits for whom, in words."""
    if state.phase.finishing:
        return [] if state.evaluation.finished else ["the end waits for the last evaluation"]
    if state.phase.started_at is None:
        to_come = state.expected_actors - sum(actor.version >= 0 for actor in state.fleet)
        who = ["the learner"] if state.learner.peer is None or state.weights.version < 0 else []
        who += [f"{to_come} actor{'s' * (to_come > 1)}"] if to_come > 0 else []
        return [f"the start waits for {' and '.join(who)}", *_engine_notes(state)]
    blocked = state.outbox.blocked
    lines = [f"all processes wait for the journal's disk: {blocked}"] if blocked else []
    if state.failures.count:
        lines.append(f"{state.failures.count} groups failed in a row, the last: {state.failures.last}")
    if state.learner.wanted:
        missing = state.store.of(*UNFINISHED)
        owners = sorted({entry.actor or "no actor" for entry in missing})
        waiting = state.store.count(Stage.WAITING)
        running = f"{len(missing)} run on {', '.join(owners)}" if missing else "no group is running"
        lines.append(f"learner waits for batch {state.learner.wanted.index}: {waiting} groups are ready, {running}")
    lines += _engine_notes(state)
    for actor in state.fleet:
        if actor.refused >= MOST_REFUSED:
            lines.append(f"{actor.name} gets no leases: {actor.refused} groups of it in a row were refused")
        elif not actor.running and actor.engine == "serving":
            idle = (
                "waits for weights"
                if actor.version < state.weights.version
                else "waits for the learner (staleness bound)"
            )
            lines.append(f"{actor.name} {idle}")
    return lines


def _engine_notes(state: RunState) -> list[str]:
    return [f"{actor.name}: {actor.engine_note}" for actor in state.fleet if actor.engine_note]
