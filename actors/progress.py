"""Which leases make progress: the heartbeat reports it, so that the buffer can give a hung lease to another actor.

A lease moves when one of its samples gets a token, an answer or a score, and also while a sample may be silent:

    it waits for a place in the engine     as long as the engine makes tokens for others
    its verifier or its agent is at work   these have time limits of their own (`rewards.timeout`, `workflow.timeout`)
    the engine has no `progress`           as long as the call is open: such an engine has to watch itself
"""

from collections.abc import Iterable, Mapping
from typing import Any

from actors.recorder import Recorder

MOST_REPORTED = 500
"""Leases per heartbeat: more would not fit into the message. The others come with the next one."""

Named = tuple[str, Recorder]
"""The name of a sample's requests, and its calls."""


class Progress:
    """Compares leases from time to time, and returns those that have moved since the last look."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._made = -1.0
        self._marks: dict[Any, tuple[int, int]] = {}

    def moved(self, leases: Mapping[Any, Iterable[Named]]) -> dict[Any, int]:
        """Lease → its tokens from this actor, for `MOST_REPORTED` leases that have moved, longest unreported first."""
        so_far: Mapping[str, int] | None = getattr(self._engine, "progress", lambda: None)()
        made = self._engine.stats().get("tokens", 0.0)
        engine_moves, self._made = made != self._made, made
        found: dict[Any, int] = {}
        marks = {key: mark for key, mark in self._marks.items() if key in leases}
        for key in [*(key for key in leases if key not in marks), *marks]:
            samples = list(leases[key])
            mark = _mark(samples, so_far or {})
            legitimate = any(_may_be_silent(name, each, so_far, engine_moves) for name, each in samples)
            if (mark != marks.get(key) or legitimate) and len(found) < MOST_REPORTED:
                found[key] = mark[0]
                marks.pop(key, None)  # told last: to the end
                marks[key] = mark
        self._marks = marks
        return found


def _mark(samples: list[Named], so_far: Mapping[str, int]) -> tuple[int, int]:
    """Tokens, and answers of the engine and the verifier."""
    tokens = sum(each.tokens + (so_far.get(name, 0) if each.waits_for_engine else 0) for name, each in samples)
    return tokens, sum(each.answers for _, each in samples)


def _may_be_silent(name: str, sample: Recorder, so_far: Mapping[str, int] | None, engine_moves: bool) -> bool:
    if sample.waits_for_engine:
        return so_far is None or (name not in so_far and engine_moves)
    return sample.is_limited
