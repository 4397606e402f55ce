"""What the controller knows, told: gauges for a train step's metrics, the status for people, and who waits for whom.

Reads only. The controller asks for these when it serves a batch, answers a `status` message, or notices a stall.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from buffer.replay import Stage

if TYPE_CHECKING:
    from buffer.controller import Controller


def levels(controller: Controller, now: float) -> dict[str, Any]:
    """Gauges of this moment, for the metrics of a train step."""
    stages = {stage: len(controller.replay.in_stage(stage)) for stage in Stage}
    found: dict[str, Any] = {f"buffer/{stage.value}": n for stage, n in stages.items()}
    ledger = controller.replay.ledger()
    found |= {f"ledger/{key}": ledger[key] for key in ("admitted", "trained", "active")}
    for kind in ("filtered", "dropped"):
        found |= {f"ledger/{kind}/{reason}": n for reason, n in ledger[kind].items()}
    found |= {"buffer/bytes": controller.replay.bytes, "seconds": controller.age(now)}
    if math.isfinite(controller.replay.bound.max_staleness):
        found["staleness/bound"] = int(controller.replay.bound.max_staleness)
    return found | controller.gauges.rates


def status(controller: Controller) -> dict[str, Any]:
    """Everything a person wants to know, as plain data."""
    now, bound = time.monotonic(), controller.replay.bound.max_staleness
    return {
        "started": controller.started_at is not None,
        "seconds": controller.age(now),
        "trained_seconds": controller.gauges.trained_seconds,
        "version": controller.version,
        "steps": controller.steps,
        "ledger": controller.replay.ledger(),
        "staleness_max": controller.replay.staleness_max,
        "staleness_bound": bound if math.isfinite(bound) else None,
        "staleness_mean": controller.gauges.staleness_mean,
        "duplicates": controller.replay.duplicates,
        "refused": controller.router.refused,
        "evaluations": controller.gauges.evaluations,
        "actors": {
            actor.name: {"version": actor.version, "running": len(actor.running), "stats": actor.stats}
            for actor in controller.fleet
        },
        "waits": waits(controller),
        **levels(controller, now),
    }


def waits(controller: Controller) -> list[str]:
    """Who waits for whom, in words."""
    if controller.finishing:
        return [] if controller.evaluation.finished else ["the end waits for the last evaluation"]
    if controller.started_at is None:
        to_come = controller.expected_actors - sum(actor.version >= 0 for actor in controller.fleet)
        who = ["the learner"] if controller.learner is None or controller.version < 0 else []
        who += [f"{to_come} actor{'s' * (to_come > 1)}"] if to_come > 0 else []
        return [f"the start waits for {' and '.join(who)}"]
    blocked = controller.outbox.blocked
    lines = [f"everybody waits for the journal's disk: {blocked}"] if blocked else []
    if controller.failures.count:
        lines.append(f"{controller.failures.count} groups failed in a row, the last: {controller.failures.last}")
    if controller.wanted:
        missing = [
            entry for entry in controller.replay.entries.values() if entry.stage in (Stage.RUNNING, Stage.QUEUED)
        ]
        owners = sorted({entry.actor or "no actor" for entry in missing})
        waiting = len(controller.replay.in_stage(Stage.WAITING))
        lines.append(
            f"learner waits for batch {controller.wanted.body['index']}: {waiting} groups wait, "
            f"{len(missing)} run on {', '.join(owners) or 'nobody'}"
        )
    for actor in controller.fleet:
        if not actor.running:
            reason = "weights" if actor.version < controller.version else "the learner (staleness bound)"
            lines.append(f"{actor.name} waits for {reason}")
    return lines
