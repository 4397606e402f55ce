"""Starts a plan as processes of this machine. Each leads a process group, so that its own children end with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from areal_like.launch import forks
from areal_like.launch.children import Children
from areal_like.launch.group import ProcessGroup, spawn
from areal_like.launch.outcome import nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.restarts import RestartLimits
from areal_like.launch.sockets import SocketFolder, sweep


class LocalLauncher:
    """`limits`: how often actors restart. `ready_timeout`: seconds that roles wait for one another at the start."""

    ACROSS_HOSTS = False
    ONE_PROCESS = False

    def __init__(self, run: Path, limits: RestartLimits, *, ready_timeout: Annotated[float, "(0, 1e7]"] = 120.0):
        self.ready_timeout = ready_timeout
        self.here = Here(run)
        self.running = Children(run, limits, self.here.spawn)
        self.sockets: SocketFolder | None = None

    def submission(self, roles: list[RoleSpec]) -> None:
        return None

    def placement(self, roles: list[RoleSpec]) -> str:
        return ""

    def start(self, roles: list[RoleSpec], check: Callable[[], None] = nothing) -> None:
        # Paths of Unix sockets are limited to about 100 characters, so they can't live in the run folder.
        sweep()
        self.sockets = SocketFolder()
        self.here.arguments, self.here.check = ("--sockets", str(self.sockets.path)), check
        self.running.start(roles)

    def stop(self) -> None:
        """End every process. Leaves no socket file."""
        self.running.end()
        self.here.close()
        if self.sockets:
            self.sockets.remove()


class Here:
    """Starts roles on this machine. Roles with a model are forked from a process that has imported torch, and all are
    where runs share such a process. Only the first of them waits for these imports, and calls `check` meanwhile. All
    roles get `arguments`."""

    def __init__(self, run: Path, *arguments: str):
        self._run, self.arguments, self.check = run, arguments, nothing
        self._forks: forks.Forks | None = None

    def spawn(self, role: RoleSpec, name: str, *first: str) -> ProcessGroup | forks.Forked:
        """Start a role with the arguments `first` before all others."""
        log = self._run / "logs" / f"{name}.log"
        arguments = [
            *first,
            "--name",
            name,
            "--run",
            str(self._run.resolve()),
            *self.arguments,
            "--starter",
            str(os.getpid()),
        ]
        shared = forks.VARIABLE in os.environ and not role.gpus  # CUDA forbids forks
        if forks.AVAILABLE and (role.imports_torch or shared):
            self._forks = self._forks or forks.Forks(self._run)
            try:
                return self._forks.start(role.module, arguments, role.threads, log, self.check, role.devices)
            except forks.ForksGone:  # its forks end with it, and are reported; this role starts without a fork server
                self.close()
        return spawn([sys.executable, "-m", role.module, *arguments], role.threads, log, role.devices)

    def close(self) -> None:
        if self._forks:
            self._forks.close()
            self._forks = None
