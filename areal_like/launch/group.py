"""Starts a role as a process of this machine that leads a process group. Imports little, as Ray's hosts import it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from areal_like.places import python_path

if TYPE_CHECKING:
    from areal_like.config.placement import Devices

ORDER = "CUDA_DEVICE_ORDER"
"""Meaning of device numbers. CUDA's own default is the fastest first."""


class ProcessGroup(subprocess.Popen[bytes]):
    def end(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def spawn(command: list[str], threads: int, log: Path, devices: Devices | None = None) -> ProcessGroup:
    """Start a role's command; its output is appended to `log`."""
    with log.open("ab") as output, blocked(signal.SIGUSR1):
        return ProcessGroup(
            command,
            # Keep the working folder: the user's paths and modules are relative to where the run was started.
            cwd=Path.cwd(),
            env=environment(threads, devices),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in the terminal reaches only the starter, which ends the others
        )


@contextlib.contextmanager
def blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in a process started here, until that process is ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def environment(threads: int, devices: Devices | None = None) -> dict[str, str]:
    """The environment of a role's process. It sees `devices` only (None: those of the starter). Its OpenMP threads
    sleep while they wait, unless the user's environment sets otherwise: roles share cores. Raises ConfigError."""
    own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    own["PYTHONPATH"] = python_path()
    usual = {"OMP_WAIT_POLICY": "PASSIVE"}
    if devices is not None:
        from areal_like.config.placement import VISIBLE, visible

        own[VISIBLE] = visible(devices, os.environ.get(VISIBLE))
        usual[ORDER] = "PCI_BUS_ID"
    return usual | os.environ | own
