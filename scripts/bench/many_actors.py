"""The control plane at scale: `python -m scripts.bench.many_actors [--actors 256] [--groups 50] [--json FILE]`.

The real buffer process, hundreds of actors (light ones, in a few processes) that each hold a lease and take seconds for
a group, log-normally distributed, and a learner that trains `--groups` groups a second. The actors could roll out 1.5
times as many. Shows the share of time in which the learner waits for a batch, and the buffer's processor time.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from areal_like.wire.client import LearnerClient
from areal_like.wire.messages import Heartbeat, Manifest

from ..console import output
from . import buffer_paths as paths
from .figures import bench_parser

PROCESSES = 4
GROUPS_PER_BATCH = 64
MAX_STALENESS = 16
"""In versions: 17 batches may be in flight, 22 s of training. Only one group in 10,000 takes longer, so the learner
does not wait for slow groups whose place the bound reserves."""
SPARE_SPEED = 1.5
SIGMA = 0.6
"""Sigma of the log-normal time that a group takes: p99 over median is 4."""
WARMUP_STEPS = 30
"""After these the queue is as long as the bound allows."""


class SlowActor(paths.LightActor):
    """An actor that takes `seconds` on average for each group."""

    def __init__(self, endpoint: str, name: str, seconds: float, slots: int):
        super().__init__(endpoint, name, slots)
        self.dice = random.Random(name)
        self.mean = math.log(seconds) - SIGMA**2 / 2
        self.due: list[tuple[float, int]] = []

    def lease(self, ids: list[int]) -> None:
        now = time.monotonic()
        for group_id in ids:
            heapq.heappush(self.due, (now + self.dice.lognormvariate(self.mean, SIGMA), group_id))

    def hear(self) -> None:
        while received := self.dealer.receive(0):
            self._on(received.message)

    def push_what_is_done(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            self._push([heapq.heappop(self.due)[1]])


def actors_process(endpoint: str, first: int, count: int, seconds: float) -> None:
    """`count` actors, one group at a time each."""
    actors = [SlowActor(endpoint, f"actor-{first + i}", seconds, paths.GROUP_SIZE) for i in range(count)]
    poller = zmq.Poller()
    by_socket = {actor.dealer.socket: actor for actor in actors}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    heard = time.monotonic()
    while True:
        soon = min((actor.due[0][0] for actor in actors if actor.due), default=math.inf)
        for socket, _ in poller.poll(max(0, int(1000 * min(0.5, soon - time.monotonic())))):
            by_socket[socket].hear()
        now = time.monotonic()
        for actor in actors:
            actor.push_what_is_done(now)
            if now - heard > 5.0:
                actor.dealer.send(Heartbeat({}, {}, {}))
        heard = now if now - heard > 5.0 else heard


def learner_process(endpoint: str, step_seconds: float, steps: int, results: Connection) -> None:
    """Trains a batch in `step_seconds`, and asks for the next one meanwhile, as the real one does."""
    client = LearnerClient(endpoint)
    client.hello()
    client.published(Manifest(0, "digest"))
    client.want(0, 0)
    waited, begin = 0.0, 0.0
    for index in range(WARMUP_STEPS + steps):
        if index == WARMUP_STEPS:
            results.send("warm")
            waited, begin = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch, _ = client.batch()
        waited += time.perf_counter() - asked
        oldest = min(min(group.digests) for group in batch.groups)
        assert index - oldest <= MAX_STALENESS, "the bound was broken"
        client.want(index + 1, index + 1)
        time.sleep(step_seconds)
        client.trained(index)
        client.published(Manifest(index + 1, "digest"))
    results.send((waited, time.perf_counter() - begin))
    time.sleep(3600)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(actors: int, groups: float, steps: int, folder: Path) -> dict[str, float]:
    incoming, outgoing = paths.processes.Pipe(duplex=False)
    seconds, each = actors / (SPARE_SPEED * groups), actors // PROCESSES
    knobs = [f"groups_per_batch={GROUPS_PER_BATCH}", f"scheduler.max_staleness={MAX_STALENESS}"]
    with paths.buffer_process("tcp", "memory", folder, *knobs, f"actors.count={PROCESSES * each}") as (endpoint, pid):
        shares = [(actors_process, (endpoint, place * each, each, seconds)) for place in range(PROCESSES)]
        with paths.started(*shares, (learner_process, (endpoint, GROUPS_PER_BATCH / groups, steps, outgoing))):
            if not incoming.poll(300):
                sys.exit("the learner got no batches for 300 s")
            incoming.recv()
            before = processor_seconds(pid)
            if not incoming.poll(300 + 10 * steps * GROUPS_PER_BATCH / groups):
                sys.exit("the learner did not finish")
            waited, took = incoming.recv()
            used = processor_seconds(pid) - before
    return {
        "actors": float(PROCESSES * each),
        "groups_per_second": steps * GROUPS_PER_BATCH / took,
        "learner_wait_percent": 100 * waited / took,
        "buffer_cpu_percent": 100 * used / took,
        "buffer_cpu_us_per_group": 1e6 * used / (steps * GROUPS_PER_BATCH),
    }


def main() -> None:
    parser = bench_parser("many_actors", __doc__)
    parser.add_argument("--actors", type=int, default=256)
    parser.add_argument("--groups", type=float, default=50.0, help="groups per second that the learner trains")
    parser.add_argument("--steps", type=int, default=40, help="train steps that are measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        metrics = measure(args.actors, args.groups, args.steps, Path(folder))
    for name, value in metrics.items():
        print(f"{name:24} {value:8.2f}")
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    main()
