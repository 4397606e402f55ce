"""Many actors connected at once: `python -m scripts.bench.connections [--actors 10000] [--json FILE]`.

The real buffer process, thousands of idle actors that have said hello (sockets in a few processes), and four actors and
a learner that work. Shows the buffer's memory per idle actor, the time to admit them all, and how much they slow down
batches when weights are published every half second.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from areal_like.run.process import allow_many_files
from areal_like.wire.bus import routing_id
from areal_like.wire.client import LearnerClient
from areal_like.wire.frames import encode
from areal_like.wire.messages import Hello, Manifest

from ..console import output
from . import buffer_paths as paths
from .figures import bench_parser

PROCESSES = 4
STEP_SECONDS = 0.5
STEPS = 10


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def idle_actors(endpoint: str, first: int, count: int, welcomed: Connection) -> None:
    """`count` actors that say hello, then only read messages."""
    allow_many_files()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)
    actors = []
    for number in range(first, first + count):
        actor = context.socket(zmq.DEALER)
        actor.setsockopt(zmq.ROUTING_ID, routing_id(f"idle-{number}"))
        actor.connect(endpoint)
        actor.send_multipart(encode(Hello("actor", f"idle-{number}", os.getpid(), 8)))
        actors.append(actor)
    for actor in actors:
        actor.recv_multipart()
    welcomed.send(count)
    while True:
        for actor in actors:
            with contextlib.suppress(zmq.Again):
                while True:
                    actor.recv_multipart(zmq.DONTWAIT)
        time.sleep(1)


def slow_learner(endpoint: str, results: Connection) -> None:
    """Takes a batch each half second; reports the mean seconds from request to arrival."""
    client = LearnerClient(endpoint)
    client.hello()
    client.published(Manifest(0, "digest"))
    waited = []
    for index in range(STEPS):
        asked = time.perf_counter()
        client.want(index, index)
        client.batch()
        waited.append(time.perf_counter() - asked)
        client.trained(index)
        client.published(Manifest(index + 1, "digest"))
        time.sleep(STEP_SECONDS)
    results.send(sum(waited[1:]) / (STEPS - 1))
    time.sleep(3600)


@contextlib.contextmanager
def connected(endpoint: str, actors: int) -> Iterator[float]:
    """Idle actors in a few processes; gives the seconds until all were welcomed."""
    incoming, outgoing = paths.processes.Pipe(duplex=False)
    each, begin = actors // PROCESSES, time.perf_counter()
    shares = [(idle_actors, (endpoint, place * each, each, outgoing)) for place in range(PROCESSES)]
    with paths.started(*shares):
        for _ in shares:
            if not incoming.poll(300):
                sys.exit("not all actors were welcomed within 300 s")
            incoming.recv()
        yield time.perf_counter() - begin


def wait_for_a_batch(endpoint: str) -> float:
    """Seconds; four actors and the learner work for a few steps."""
    incoming, outgoing = paths.processes.Pipe(duplex=False)
    _, unheard = paths.processes.Pipe(duplex=False)
    actors = [(paths.light_actor, (endpoint, f"actor-{i}", unheard)) for i in range(paths.PRODUCERS)]
    with paths.started(*actors, (slow_learner, (endpoint, outgoing))):
        if not incoming.poll(300):
            sys.exit("the learner got no batches")
        return incoming.recv()


def measure(actors: int, transport: str, folder: Path) -> dict[str, float]:
    with paths.buffer_process(transport, "off", folder, "buffer.heartbeat_timeout=3600") as (endpoint, pid):
        before = resident_bytes(pid)
        if not actors:
            return {"batch_wait_ms_alone": 1000 * wait_for_a_batch(endpoint)}
        with connected(endpoint, actors) as seconds:
            time.sleep(1)
            each = (resident_bytes(pid) - before) / actors
            wait = wait_for_a_batch(endpoint)
    return {"idle_actor_kb": each / 1e3, "connect_seconds": seconds, "batch_wait_ms": 1000 * wait}


def main() -> None:
    parser = bench_parser("connections", __doc__)
    parser.add_argument("--actors", type=int, default=10_000)
    parser.add_argument("--transport", choices=["tcp", "ipc"], default="tcp")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        metrics = measure(0, args.transport, Path(folder)) | measure(args.actors, args.transport, Path(folder))
    for name, value in metrics.items():
        print(f"{name:20} {value:8.1f}")
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    main()
