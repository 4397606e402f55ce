"""What every role process does at its start and end: arguments, log, signals, rendezvous, clear errors.

A role is started as `python -m ROOM.main --run DIR --name NAME`; it reads `DIR/config.yaml`, logs to its standard
error (the launcher sends that to `DIR/logs/NAME.log`), ends on SIGTERM, and never outlives the process that started
it. Roles find one another through small files in `DIR/rendezvous`, so no port has to be agreed on.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.bus import BusError
from areal_like.config import ConfigError, load_resolved

EXIT_USER_ERROR = 2
"""A role ends with this when starting it again would not help: bad input, full disk, port in use."""


@dataclass(frozen=True, slots=True)
class Role:
    """This process: its name, the run's folder, the folder for local sockets, and the run's config."""

    name: str
    run: Path
    sockets: Path
    config: Any

    def endpoint(self, service: str) -> str:
        """Where this role binds `service`: a file for ipc, the configured host and port for tcp."""
        buffer = self.config.buffer
        if buffer.transport == "tcp":
            return f"tcp://{buffer.host}:{buffer.port if service == 'buffer' else 0}"
        return f"ipc://{self.sockets}/{service}"

    def offer(self, service: str, endpoint: str) -> None:
        """Tell the others where a service is (written beside and renamed, so never read half)."""
        folder = self.run / "rendezvous"
        folder.mkdir(exist_ok=True)
        beside = folder / f".{service}.{os.getpid()}"
        beside.write_text(json.dumps({"endpoint": endpoint, "pid": os.getpid()}))
        beside.replace(folder / f"{service}.json")

    def find(self, service: str) -> str:
        """The endpoint of a service, waited for. Raises BusError after `launcher.ready_timeout` seconds."""
        path = self.run / "rendezvous" / f"{service}.json"
        deadline = time.monotonic() + float(self.config.launcher.get("ready_timeout", 120.0))
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                return json.loads(path.read_text())["endpoint"]
            time.sleep(0.02)
        raise BusError(f"{self.name} waited in vain for the {service} to start: see {self.run}/logs/{service}.log")


def _end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies (elsewhere the launcher's own clean-up has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _terminate(signum: int, frame: Any) -> None:
    raise SystemExit(0)


def run_role(main: Callable[[Role], None]) -> None:
    """Set the process up, call `main(role)`, and turn errors that a user can mend into one line and an exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--sockets", type=Path, default=Path())
    args = parser.parse_args()
    _end_with_parent()
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {args.name} %(levelname)s %(message)s"
    )
    try:
        main(Role(args.name, args.run, args.sockets, load_resolved(args.run / "config.yaml")))
    except (ConfigError, BusError, OSError, ValueError) as error:
        logging.exception("ending after an error")
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
