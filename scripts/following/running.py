"""Runs in progress: finds the buffer of a run folder and talks to it, for `status`, `stop` and `join`."""

import argparse
import json
import shlex
import socket
from pathlib import Path
from typing import Any

from areal_like.config import run_config as configs
from areal_like.config.run_config import Config, ConfigError
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG, RENDEZVOUS, SUMMARY, config_file, is_going_on
from areal_like.wire.bus import is_loopback
from areal_like.wire.supervisor_client import SupervisorClient

PATIENCE = 10.0
"""Seconds that the buffer has to answer; it needs 0.2 s at most, unless its disk hangs."""


class NotRunning(ConfigError):
    """The run has no buffer now, or none that answers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="a folder of keys (default: the run's own)")


class Running:
    """The buffer of a run in `folder`; `keys` (None: the run's own). Raises ConfigError (out of reach), NotRunning."""

    def __init__(self, folder: Path, keys: Path | None = None):
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{folder} is no run folder ({CONFIG} is missing)")
        self.folder = folder
        self.config: Config = configs.load_resolved(config_file(folder))
        if keys:
            self.config = configs.replace(self.config, "security.key_folder", str(keys.resolve()))
        offered = self.rendezvous()
        if offered is None or not is_going_on(folder):
            raise NotRunning(f"{folder}: its buffer is not running: {how_it_ended(folder)}")
        _check_host(offered)
        self.offered = offered
        self.client = SupervisorClient(offered["endpoint"], self.config.security.key_folder)
        self._rows, self._row = MetricsFollower(folder / "metrics.jsonl"), dict[str, Any]()

    def rendezvous(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / RENDEZVOUS / "buffer.json").read_bytes())
        except FileNotFoundError:
            return None

    def is_there(self) -> bool:
        """Has the buffer neither ended nor been replaced by that of a resume?"""
        return self.rendezvous() == self.offered

    def report(self) -> dict[str, Any]:
        """The buffer's status. Raises NotRunning if it does not answer, or if a resume has replaced it."""
        if (report := self.client.report(PATIENCE, is_there=self.is_there)) is not None:
            return report
        if not self.is_there():
            raise NotRunning(f"{self.folder}: its buffer has ended meanwhile; ask again")
        raise NotRunning(
            f"{self.folder}: the buffer has not answered for {PATIENCE:.0f} s: it was killed, or its host is down "
            f"(its log: {self.folder}/logs)"
        )

    def look(self) -> dict[str, Any]:
        """`{"report": the buffer's status, "step": the newest row of metrics}`. Raises NotRunning."""
        for row in self._rows.new_rows():
            self._row = row
        return {"report": self.report(), "step": self._row}

    def close(self) -> None:
        self.client.close()


def how_it_ended(folder: Path) -> str:
    """How a run that is not running now ended, or the last train step that it made."""
    if (folder / SUMMARY).exists():
        return "it has ended"
    rows = MetricsFollower(folder / "metrics.jsonl").new_rows()
    far = f"it ended without a summary after train step {rows[-1]['step']}" if rows else "it has made no train step"
    return f"{far}; its logs: {folder}/logs; to continue: the same command with {shlex.quote(f'resume={folder}')}"


def _check_host(offered: dict[str, Any]) -> None:
    """Raises ConfigError if this is not the buffer's machine, and it listens on a local socket or on loopback only."""
    endpoint, host = offered["endpoint"], offered["host"]
    near = not endpoint.startswith("tcp://") or is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0])
    if near and host != socket.gethostname():
        raise ConfigError(
            f"the run's buffer can be reached on {host} only ({endpoint}): start the run with launcher=slurm, or with "
            "buffer.host=node, to reach it from other machines"
        )
