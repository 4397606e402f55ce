"""The buffer against a raw ZeroMQ proxy, multiprocessing and Ray: `python -m scripts.bench.buffer [--json FILE]`.

Four producer processes, what is measured, one consumer process; groups of 8 trajectories of 12 KB. Ours is the real
buffer process with its ledger, staleness bound and acknowledgements, and light actors and a light learner that speak
the real protocol. The contenders take turns, and a ratio is the median of the ratios of the rounds, since absolute
rates move with whatever else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.bench import buffer_paths as paths

RATIOS = {
    "tcp_over_raw_zmq": ("buffer tcp", "raw zmq tcp", 0.7),
    "tcp_over_ray_queue": ("buffer tcp", "ray queue", 10.0),
    "tcp_over_mp_queue": ("buffer tcp", "mp queue", 2.0),
    "same_host_over_tcp": ("buffer ipc", "buffer tcp", 1.2),
    "memory_over_off": ("buffer tcp, journal memory", "buffer tcp", None),
    "fsync_over_off": ("buffer tcp, journal fsync", "buffer tcp", 0.6),
}
"""metric: (path, path it is divided by, what is aimed for)."""

Path_ = Callable[[], AbstractContextManager[Connection]]


def contenders(seconds: float, folder: Path, delays: Connection) -> dict[str, Path_]:
    none, _ = paths.processes.Pipe(duplex=False)
    del none
    _, unheard = paths.processes.Pipe(duplex=False)
    found: dict[str, Path_] = {
        "raw zmq tcp": partial(paths.raw_zmq, "tcp", seconds),
        "raw zmq ipc": partial(paths.raw_zmq, "ipc", seconds),
        "buffer tcp": partial(paths.our_buffer, "tcp", "off", seconds, folder, delays),
    }
    return found


def main() -> None:
    pass


if __name__ == "__main__":
    main()
