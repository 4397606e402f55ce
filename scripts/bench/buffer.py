"""The buffer against a raw ZeroMQ proxy, multiprocessing and Ray: `python -m scripts.bench.buffer [--json FILE]`.

Four producer processes, the measured path, one consumer process; groups of 8 trajectories of 12 KB. Ours is the real
buffer process with its ledger, staleness bound and acknowledgements; light actors and a light learner speak the real
protocol. The contenders take turns, and a ratio is the median over rounds of the ratio within a round, since absolute
rates depend on the machine's other load.

A queue of Python objects carries a group as a list of dicts of arrays.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.console import Console

from ..console import output
from . import buffer_paths as paths
from .figures import bench_parser

OURS = "buffer tcp"
RATIOS = {
    "tcp_over_raw_zmq": (OURS, "raw zmq tcp", "0.7"),
    "tcp_over_ray_queue": (OURS, "ray queue", "10"),
    "tcp_over_mp_queue": (OURS, "mp queue", "2"),
    "same_host_over_tcp": ("buffer ipc", OURS, "-"),
    "memory_over_off": ("buffer tcp, journal=memory", OURS, "-"),
    "fsync_over_off": ("buffer tcp, journal=fsync", OURS, "0.6"),
}
"""metric: (path, path to divide by, bar)."""

RunPath = Callable[[], AbstractContextManager[Connection]]


class Delays:
    """Seconds from push to acknowledgement, reported by the actors of one path."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def pipe(self) -> Connection:
        """One actor's own pipe for its report, since an actor may be killed in the middle of a write."""
        incoming, outgoing = paths.processes.Pipe(duplex=False)
        threading.Thread(target=self._collect, args=(incoming,), daemon=True).start()
        return outgoing

    def _collect(self, incoming: Connection) -> None:
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                self.seconds += incoming.recv()


def contenders(seconds: float, folder: Path, loaded: Delays, others: Delays) -> dict[str, RunPath]:
    """label → its starter. `loaded` gets the delays of our buffer over TCP, `others` all others."""

    def ours(transport: str, journal: str, delays: Delays) -> RunPath:
        return partial(paths.our_buffer, transport, journal, seconds, folder, delays.pipe)

    found: dict[str, RunPath] = {
        "raw zmq tcp": partial(paths.raw_zmq, seconds),
        OURS: ours("tcp", "off", loaded),
        "buffer tcp, journal=fsync": ours("tcp", "fsync", others),
        "buffer tcp, journal=memory": ours("tcp", "memory", others),
        "buffer ipc": ours("ipc", "off", others),
        "mp queue": partial(paths.mp_queue, seconds, paths.make_arrays()),
    }
    if importlib.util.find_spec("ray"):
        found["ray queue"] = partial(paths.ray_queue, seconds)
    return found


def measure(label: str, path: RunPath) -> float:
    """Trajectories per second."""
    with path() as results:
        if not results.poll(120):
            sys.exit(f"{label}: nothing arrived within 120 s")
        return results.recv()


def ratio(rates: dict[str, list[float]], path: str, other: str) -> float | None:
    """The median over rounds; None if one of the two was not measured."""
    if path not in rates or other not in rates:
        return None
    return statistics.median(a / b for a, b in zip(rates[path], rates[other], strict=True))


def tables(rates: dict[str, list[float]], metrics: dict[str, float], console: Console) -> None:
    table = output.table("trajectories of 12 KB per second", "path", "median", "lowest", "highest", "over raw zmq tcp")
    for label, values in rates.items():
        numbers = [f"{number:,.0f}" for number in (statistics.median(values), min(values), max(values))]
        table.add_row(label, *numbers, f"{ratio(rates, label, 'raw zmq tcp'):.2f}")
    console.print(table)
    table = output.table("ratios", "metric", "median", "aimed for")
    for name, (_, _, aim) in RATIOS.items():
        if name in metrics:
            table.add_row(name, f"{metrics[name]:.2f}", aim)
    console.print(table)
    if "ray queue" not in rates:
        console.print("ray is not installed: not compared")
    console.print(f"push to acknowledgement under full load, {OURS}: p99 {metrics['ack_p99_ms']:.1f} ms")


def main() -> None:
    parser = bench_parser("buffer", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often every contender is measured")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per measurement, after a warm-up")
    parser.add_argument("--dir", type=Path, help="where the journal is written (default: the temporary folder)")
    args = parser.parse_args()
    console = output.console()
    loaded, others = Delays(), Delays()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.dir) as folder:
        runs = contenders(args.seconds, Path(folder), loaded, others)
        rates: dict[str, list[float]] = {label: [] for label in runs}
        for turn in range(args.rounds):
            console.print(f"  round {turn + 1} of {args.rounds} ...", highlight=False)
            for label, path in runs.items():
                rates[label].append(measure(label, path))
    ratios = {name: ratio(rates, path, other) for name, (path, other, _) in RATIOS.items()}
    metrics = {name: value for name, value in ratios.items() if value is not None}
    metrics["ack_p99_ms"] = 1000 * float(np.percentile(loaded.seconds, 99))
    metrics["trajectories_per_second"] = statistics.median(rates[OURS])
    tables(rates, metrics, console)
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    main()
