"""Starts a plan as processes of this machine. Each leads a process group, so that its own children end with it."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from areal_like.launch.children import Children, Launcher, RestartLimits
from areal_like.launch.forks import Forked
from areal_like.launch.group import ProcessGroup, environment, spawn
from areal_like.launch.outcome import nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.sockets import SocketFolder, sweep


class LocalLauncher(Launcher):
    """`limits`: how often actors restart. `ready_timeout`: seconds that roles wait for one another at the start."""

    def __init__(self, run: Path, limits: RestartLimits, *, ready_timeout: Annotated[float, "(0, 1e7]"] = 120.0):
        self.ready_timeout = ready_timeout
        self.running = Children(run, limits, self.spawn)
        self.sockets: SocketFolder | None = None
        self._check = nothing

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        sweep()
        self.sockets = SocketFolder()
        self._check = check
        self.running.start(roles, check)

    def spawn(self, role: RoleSpec, name: str) -> ProcessGroup | Forked:
        assert self.sockets
        return spawn_role(self.running.run, role, name, "--sockets", str(self.sockets.path), check=self._check)

    def stop(self) -> None:
        self.running.end()
        if self.sockets:
            self.sockets.remove()


def spawn_role(
    run: Path, role: RoleSpec, name: str, *arguments: str, check: Callable[[], None] = nothing
) -> ProcessGroup | Forked:
    """Start a role on this machine. One with a model on the CPU is forked; so are all CPU roles of a forked run."""
    log = run / "logs" / f"{name}.log"
    own = [*role.arguments(run, name), *arguments, "--starter", str(os.getpid())]
    if not role.gpus and (role.imports_torch or multiprocessing.parent_process()):
        variables = environment(role.threads, role.devices)
        return Forked(role.module, own, variables, log, block=[signal.SIGUSR1], check=check)
    return spawn([sys.executable, "-m", role.module, *own], role.threads, log, role.devices)
