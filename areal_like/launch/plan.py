"""Placement as data: which processes a run consists of. Every launcher starts from the same plan."""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.config import Config, actors_of, learner_threads, ranks_of
from areal_like.launch.restarts import Limits
from areal_like.registry import marks
from areal_like.schema import Spec


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One process, started as `python -m MODULE`. `essential`: the run ends when it ends. `imports_torch`: it has a
    model on the CPU, so it starts faster as a fork of a process that has imported torch; CUDA forbids forks."""

    name: str
    module: str
    threads: int
    essential: bool
    imports_torch: bool = False


def plan(config: Config) -> list[RoleSpec]:
    """The processes of a run, in order of their start. A replay has no actors: all its data is recorded."""
    threads, count = config.actors.threads or 1, 0 if config.replay else actors_of(config)
    engine, learner = has_model("engine", config.engine), has_model("learner", config.learner)
    actors = [RoleSpec(f"actor-{i}", "actors.main", threads, False, engine) for i in range(count)]
    # The other ranks come first: so the starter sees a dead rank before the learner that fails without it.
    own = learner_threads(config)
    ranks = [
        RoleSpec(f"learner-{rank}", "learners.follower", own, True, learner) for rank in range(1, ranks_of(config))
    ]
    core = [
        RoleSpec("buffer", "buffer.main", 1, True),
        *ranks,
        RoleSpec("learner", "learners.main", own, True, learner),
    ]
    return [*core, *actors]


def has_model(kind: str, spec: Spec) -> bool:
    """Will the component import torch, without CUDA? Answers without an import of it."""
    return "needs_model" in marks(kind, spec.name) and spec.get("device", "cpu") == "cpu"


def limits(config: Config) -> Limits:
    """How often actors are restarted."""
    actors = config.actors
    return Limits(actors.max_restarts, actors.restart_window, actors.min_alive)


def describe(roles: list[RoleSpec]) -> str:
    """A table for people."""
    lines = [f"{'role':<12}{'module':<16}{'threads':<9}when it dies"]
    for role in roles:
        fate = "the run ends" if role.essential else "it is started again, within limits"
        lines.append(f"{role.name:<12}{role.module:<16}{role.threads:<9}{fate}")
    return "\n".join(lines)
