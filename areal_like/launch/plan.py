"""Placement as data: which processes a run consists of. Every launcher starts from the same plan."""

from dataclasses import dataclass
from pathlib import Path

from areal_like.config.placement import KEY, Devices, needs_of, place
from areal_like.config.registry import marks
from areal_like.config.run_config import Config, actors_of, learner_threads, ranks_of, select
from areal_like.config.schema import Spec


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One process, started as `python -m MODULE`. `essential`: the run ends when it ends. `imports_torch`: it has a
    model on the CPU, so it is forked (CUDA forbids forks). `gpus`: how many it computes on. `devices`: those of this
    machine that it sees; None: as its starter does."""

    name: str
    module: str
    threads: int
    essential: bool
    imports_torch: bool = False
    gpus: int = 0
    devices: Devices | None = None

    def arguments(self, run: Path, name: str) -> list[str]:
        return ["--name", name, "--run", str(run.resolve())]


def plan(config: Config) -> list[RoleSpec]:
    """The processes of a run, in order of their start. A replay has no actors."""
    count = 0 if config.replay else actors_of(config)
    engine, learner = has_model("engine", config.engine), has_model("learner", config.learner)
    needs = needs_of(config)
    placed = place(select(config, KEY), needs, None)
    on_ranks = placed.ranks if placed else (None,) * needs.ranks
    on_actors = placed.actors if placed else (None,) * count
    threads, gpus = config.actors.threads or 1, needs.per_actor or 0
    actors = [
        RoleSpec(f"actor-{i}", "actors.main", threads, False, engine, gpus or len(devices or ()), devices)
        for i, devices in enumerate(on_actors)
    ]
    ranks = [
        RoleSpec(
            f"learner-{rank}" if rank else "learner",
            "learners.follower" if rank else "learners.main",
            learner_threads(config),
            True,
            learner,
            1 if needs.on_device else len(on_ranks[rank] or ()),
            on_ranks[rank],
        )
        # The other ranks come first: so the starter sees a dead rank before the learner that fails without it.
        for rank in [*range(1, ranks_of(config)), 0]
    ]
    buffer = RoleSpec("buffer", "buffer.main", 1, True, devices=() if placed else None)
    return [buffer, *ranks, *actors]


def has_model(kind: str, spec: Spec) -> bool:
    """Will the component import torch, without CUDA?"""
    return "needs_model" in marks(kind, spec.name) and spec.get("device", "cpu") == "cpu"


def describe(roles: list[RoleSpec]) -> str:
    lines = [f"{'role':<12}{'module':<20}{'threads':<9}{'GPUs':<6}when it dies"]
    for role in roles:
        fate = "the run ends" if role.essential else "it is started again, within limits"
        gpus = ",".join(map(str, role.devices)) if role.devices else f"any {role.gpus}" if role.gpus else "-"
        lines.append(f"{role.name:<12}{role.module:<20}{role.threads:<9}{gpus:<6}{fate}")
    return "\n".join(lines)
