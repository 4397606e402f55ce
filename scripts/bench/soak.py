"""Does the buffer's memory grow? `python -m scripts.bench.soak [--trajectories 2000000] [--json FILE]`.

Millions of trajectories of 12 KB pass one real buffer process; its resident memory is read all the time. The first
tenth is warm-up. Growth compares the median of the last tenth with that of the second one. Peak values are shown, too,
since data in flight varies by MBs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from areal_like.run.process import prepare_memory
from areal_like.wire.client import LearnerClient
from areal_like.wire.messages import Manifest

from ..console import output
from . import buffer_paths as paths
from .connections import resident_bytes
from .figures import bench_parser

BATCHES_PER_CHECKPOINT = 100
PARTS = 10


def learner(endpoint: str, results: Connection) -> None:
    """Trains until it is killed, with some checkpoints; reports the number of trajectories after each batch."""
    prepare_memory()
    client, index, taken = LearnerClient(endpoint), 0, 0
    client.hello()
    client.published(Manifest(0, "digest"))
    client.want(0, 0)
    while True:
        batch, _ = client.batch()
        index += 1
        client.want(index, index)
        client.trained(index - 1)
        client.published(Manifest(index, "digest"))
        if index % BATCHES_PER_CHECKPOINT == 0:
            client.checkpointed(index)
        taken += len(batch.samples)
        results.send(taken)


def soak(trajectories: int, transport: str, journal: str, folder: Path) -> list[tuple[int, int]]:
    """(trajectories so far, resident bytes of the buffer) after each batch."""
    incoming, outgoing = paths.processes.Pipe(duplex=False)
    delays, unread = paths.processes.Pipe(duplex=False)
    seen, told = [(0, 0)], time.monotonic()
    with paths.buffer_process(transport, journal, folder) as (endpoint, pid):
        actors = [(paths.light_actor, (endpoint, f"actor-{place}", unread)) for place in range(paths.PRODUCERS)]
        with paths.started(*actors, (learner, (endpoint, outgoing))):
            while seen[-1][0] < trajectories:
                if not incoming.poll(120):
                    sys.exit(f"nothing arrived for 120 s; the buffer's log: {(folder / 'buffer.log').read_text()}")
                seen.append((incoming.recv(), resident_bytes(pid)))
                while delays.poll(0):
                    delays.recv()
                if time.monotonic() - told > 5:
                    told = time.monotonic()
                    print(f"  {seen[-1][0]:,} trajectories, {seen[-1][1] / 1e6:.1f} MB", flush=True)
    return seen[1:]


def by_part(seen: list[tuple[int, int]], trajectories: int) -> list[list[int]]:
    """The readings of each tenth of the run."""
    parts: list[list[int]] = [[] for _ in range(PARTS)]
    for taken, resident in seen:
        parts[min(PARTS - 1, taken * PARTS // trajectories)].append(resident)
    return parts


def main() -> None:
    parser = bench_parser("soak", __doc__)
    parser.add_argument("--trajectories", type=int, default=2_000_000)
    parser.add_argument("--transport", choices=["tcp", "ipc"], default="tcp")
    parser.add_argument("--journal", choices=["off", "memory", "fsync"], default="memory")
    parser.add_argument("--dir", type=Path, help="where the journal is written (default: the temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.dir) as folder:
        parts = by_part(soak(args.trajectories, args.transport, args.journal, Path(folder)), args.trajectories)
    if not all(parts):
        parser.error(f"--trajectories {args.trajectories} is over too soon for a reading in each tenth of the run")
    table = output.table("the buffer's resident memory, MB", "part of the run", "median", "lowest", "highest")
    for place, readings in enumerate(parts, 1):
        numbers = (statistics.median(readings), min(readings), max(readings))
        table.add_row(f"{place} of {PARTS}", *(f"{number / 1e6:.1f}" for number in numbers))
    output.console().print(table)
    growth = statistics.median(parts[-1]) / statistics.median(parts[1]) - 1
    print(f"growth after warm-up: {growth:+.2%} (aimed for: below 2 %)")
    output.write_json(args.json, {"rss_growth": growth})


if __name__ == "__main__":
    main()
