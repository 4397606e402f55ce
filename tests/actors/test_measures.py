"""Metrics that actors report about engines and weights, under their names."""

from __future__ import annotations

import asyncio

from actors.engines.timed_engine import TimedEngine
from actors.measures import of_engine, of_weights
from buffer.fleet import Fleet


class Engine(TimedEngine):
    """An engine with a metric of its own."""

    METRICS = {"drafts": "mean:own/drafts"}  # noqa: RUF012

    def stats(self) -> dict[str, float]:
        busy = {"busy_seconds": 6.0, "apply_seconds": 3.0, "updates": 2.0, "pause_seconds": 1.0, "pauses": 0.0}
        return super().stats() | busy | {"drafts": 4.0, "nobody's": 1.0}


def test_an_engine_brings_metrics_of_its_own_and_quotients_are_of_all_that_was_counted() -> None:
    asyncio.run(quotients_of_all())


async def quotients_of_all() -> None:
    fleet, engine = Fleet(), Engine()
    weights = {"fetch_seconds": 8.0, "replica_seconds": 0.0, "weight_bytes": 5.0}
    for name, wall in (("actor-0", 8.0), ("actor-1", 16.0)):
        actor = fleet.join(name, name.encode(), 1, 0.0)
        fleet.note_stats(actor, of_engine(engine, wall) | of_weights(weights, 2.0))
    assert fleet.metrics() == {
        "rollout/sampled_tokens": 0.0, "rollout/updates": 4.0, "rollout/running": 0.0, "rollout/waiting": 0.0,
        "rollout/idle_share": 0.5, "rollout/update_apply_seconds": 1.5, "rollout/update_pause_seconds": 0.0,
        "rollout/update_fetch_seconds": 4.0, "rollout/update_replica_seconds": 0.0,
        "rollout/weight_bytes": 10.0, "own/drafts": 4.0,
    }  # fmt: skip
    assert of_engine(engine, 0.0)["whole:rollout/idle_share"] == 0.0, "it has had no lease"
