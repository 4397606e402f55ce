"""Placement as data: which processes a run consists of. Every launcher starts from the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_like.config import learner_threads, ranks_of


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One process: `module` is started with `python -m`; `essential` ones end the run when they end."""

    name: str
    module: str
    threads: int
    essential: bool


def plan(config: Any) -> list[RoleSpec]:
    """The processes of a run, in the order in which they are started. A replay has no actors: all is recorded."""
    threads, count = config.actors.threads, 0 if config.replay else config.actors.count
    actors = [RoleSpec(f"actor-{i}", "actors.main", threads, False) for i in range(count)]
    # The other ranks come first, so that one that has died is seen before the learner that has lost it.
    own = learner_threads(config)
    ranks = [RoleSpec(f"learner-{rank}", "learners.rank", own, True) for rank in range(1, ranks_of(config))]
    core = [RoleSpec("buffer", "buffer.main", 1, True), *ranks, RoleSpec("learner", "learners.main", own, True)]
    return [*core, *actors]


def describe(roles: list[RoleSpec]) -> str:
    """A table for people."""
    lines = [f"{'role':<12}{'module':<16}{'threads':<9}when it dies"]
    for role in roles:
        fate = "the run ends" if role.essential else "it is started again"
        lines.append(f"{role.name:<12}{role.module:<16}{role.threads:<9}{fate}")
    return "\n".join(lines)
