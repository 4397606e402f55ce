"""An actor's numbers in its heartbeats, as `HOW:METRIC`: `sum` adds up the counts of processes since their start, also
of ended ones; of `part` and `whole`, two such sums, the metric is part ÷ whole; `now` adds up over the present actors;
`mean` and `max` are over those of them that report it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from areal_like.types import Sample

ENGINE = {
    "tokens": "sum:rollout/sampled_tokens",
    "updates": "sum:rollout/updates",
    "running": "now:rollout/running",
    "waiting": "now:rollout/waiting",
}
"""Keys of `Engine.stats`, and their metrics; an engine's own `METRICS` are more of these."""
FETCHING = ("fetch_seconds", "replica_seconds")
AGENT_METRICS = ("turns", "turns_left_out", "refused", "fields_ignored", "crashes")
"""Answers; those outside of the trained conversation; requests refused; sampling fields ignored; samples lost."""
AGENTS: Counter[str] = Counter()
"""Totals of this process's agents."""
TURNS: Counter[str] = Counter()
"""Totals of this process's trained samples that have several turns or could have (`multi_turn`, `agent`)."""
FAILED = "error"
"""The result of a failed tool call begins with this."""


def note_turns(sample: Sample, turns: int, calls: int, errors: int) -> None:
    """Count a trained sample: its `turns`, and its tool `calls` with the `errors` among them."""
    tokens = int(sample.loss_mask.sum())
    TURNS.update(samples=1, turns=turns, tokens=tokens, contexts=len(sample.contexts), calls=calls, errors=errors)


def of_turns() -> dict[str, float]:
    """Metrics of agents and of samples with several turns; none without any."""
    found = {f"sum:agents/{name}": float(AGENTS[name]) for name in AGENT_METRICS} if AGENTS else {}
    if TURNS:
        found |= quotient("turns/per_sample", TURNS["turns"], TURNS["samples"])
        found |= quotient("turns/contexts_per_sample", TURNS["contexts"], TURNS["samples"])
        found |= quotient("turns/tokens_per_turn", TURNS["tokens"], TURNS["turns"])
        found |= quotient("turns/tool_calls_per_sample", TURNS["calls"], TURNS["samples"])
        found |= quotient("turns/tool_error_share", TURNS["errors"], TURNS["calls"])
    return found


def of_engine(engine: Any, wall: float) -> dict[str, float]:
    """`wall` seconds have passed since the actor's first lease (0: none yet)."""
    stats, named = engine.stats(), ENGINE | getattr(engine, "METRICS", {})
    found = {key: stats[name] for name, key in named.items() if name in stats}
    found |= quotient("rollout/idle_share", max(0.0, wall - stats.get("busy_seconds", 0.0)), wall)
    found |= quotient("rollout/update_apply_seconds", stats.get("apply_seconds", 0.0), stats.get("updates", 0.0))
    return found | quotient("rollout/update_pause_seconds", stats.get("pause_seconds", 0.0), stats.get("pauses", 0.0))


def of_weights(stats: Mapping[str, float], updates: float) -> dict[str, float]:
    """`Subscriber.stats` over the engine's `updates` updates."""
    found = {f"sum:rollout/{name}": value for name, value in stats.items() if name not in FETCHING}
    for name in FETCHING:
        found |= quotient(f"rollout/update_{name}", stats[name], updates)
    return found


def quotient(metric: str, part: float, whole: float) -> dict[str, float]:
    return {f"part:{metric}": float(part), f"whole:{metric}": float(whole)}
