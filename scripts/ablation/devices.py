"""Devices (GPUs) for runs at a time on one machine: each has as many as its placement needs, which no other sees.

A run counts devices from 0 among those that it may see (`config.placement`). So it is started with its own in
CUDA_VISIBLE_DEVICES, and its config stays as it is. One run at a time sees all devices. Slurm and Ray choose devices
themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from areal_like.config import run_config as configs
from areal_like.config.placement import KEY, VISIBLE, Devices, needs_of, place, visible
from areal_like.config.registry import resolve
from areal_like.config.run_config import Config, ConfigError
from areal_like.machine import has_gpu

from ..starting.gpus import gpus_here


class DevicePool:
    """`count` devices of this machine, for runs to take. `inherited`: this process's CUDA_VISIBLE_DEVICES."""

    def __init__(self, count: int, inherited: str | None = None):
        self._free, self._inherited = list(range(count)), inherited

    def take(self, config: Config) -> Devices | None:
        """Devices of a run, until `give_back`; () for one that needs none, None where too few are free now."""
        count = wanted(config)
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return tuple(taken)

    def give_back(self, devices: Devices) -> None:
        self._free = sorted([*self._free, *devices])

    def environment(self, devices: Devices) -> dict[str, str]:
        """What a run with these devices has in its environment."""
        return {VISIBLE: visible(devices, self._inherited)} if devices else {}


def wanted(config: Config) -> int:
    """Devices of this machine that a run needs to itself. Raises ConfigError for a placement that can't be."""
    launcher, needs = resolve("launcher", config.launcher["name"]), needs_of(config, has_gpu())
    if launcher.ACROSS_HOSTS or not needs.total:
        return 0
    if launcher.ONE_PROCESS:
        return 1
    spec = configs.select(config, KEY)
    if not isinstance(spec, Mapping) or not (placement := place(spec, needs, None)):
        return needs.total
    return 1 + max((max(each) for each in (*placement.ranks, *placement.actors) if each), default=-1)


def pool_for(parallel: int, stages: Iterable[Iterable[Config]]) -> DevicePool | None:
    """Devices for `parallel` runs of a stage at a time; None where they need none, or one run at a time may see all.
    Raises ConfigError where those of a stage that need most do not fit side by side."""
    if parallel == 1:
        return None
    most = max((sorted(map(wanted, stage), reverse=True)[:parallel] for stage in stages), key=sum, default=[])
    if not sum(most):
        return None
    count = gpus_here().count
    if sum(most) > count:
        fitting = max((n for n in range(1, parallel) if sum(most[:n]) <= count), default=0)
        hint = f"--parallel {fitting}, or " if fitting else ""
        raise ConfigError(
            f"--parallel {parallel}: runs at the same time need {' + '.join(map(str, most))} devices of "
            f"{count}: {hint}let the processes of a run share devices: {KEY}={{learner: [0], actors: [0], share: true}}"
        )
    return DevicePool(count, os.environ.get(VISIBLE))
