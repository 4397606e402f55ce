"""The buffer against a raw ZeroMQ proxy, multiprocessing and Ray: `python -m scripts.bench.buffer [--json FILE]`.

Four producer processes, the measured path, one consumer process; every message, put or push carries whole groups of 8
trajectories of 12 KB (750 prompt tokens, 1,000 sampled ones with logprobs and loss mask). Ours is the real buffer
process with its ledger, staleness bound and acknowledgements, on TCP without keys (the queues have none); light actors
encode each group that they push, and a light learner takes batches. A queue of Python objects carries a group as a
list of dicts of arrays. The contenders take turns, and a ratio is the median over rounds of the ratio within a round,
since absolute rates depend on the machine's other load. A contender that does not answer is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from areal_like.config import run_config as configs
from areal_like.places import REPOSITORY
from areal_like.run.process import Role, prepare_memory, run_role
from areal_like.types import Group, Sample
from areal_like.wire import messages
from areal_like.wire.bus import Dealer
from areal_like.wire.client import LearnerClient
from areal_like.wire.groups import encode_group, pack_heads
from areal_like.wire.messages import Message

from ..console import output
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
GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 750, 1000
TRAJECTORY_BYTES = 4 * (PROMPT_TOKENS + RESPONSE_TOKENS) + 5 * RESPONSE_TOKENS
PRODUCERS, GROUPS_PER_BATCH, MAX_STALENESS = 4, 64, 2
GROUPS_PER_PUSH = 16
"""Most ready groups in one message (1.5 MB)."""
VOCABULARY = 150_000
WARMUP_SECONDS, LONGEST = 1.0, 120.0
"""Before a measurement; until a contender that has not answered is left out."""

processes = multiprocessing.get_context("fork")
Target = tuple[Callable[..., None], tuple[Any, ...]]


def rate(take: Callable[[], int], seconds: float) -> float:
    """Trajectories per second that `take` returns, after a warm-up."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < min(WARMUP_SECONDS, seconds):
        take()
    begin, taken = time.perf_counter(), 0
    while (now := time.perf_counter()) - begin < seconds:
        taken += take()
    return taken / (now - begin)


def measured(consumer: Target, *others: Target) -> float | None:
    """Run the processes until the consumer, whose last argument is a pipe, has sent its rate; None if it does not."""
    results, out = processes.Pipe(duplex=False)
    running = [processes.Process(target=target, args=args, daemon=True) for target, args in others]
    running.append(processes.Process(target=consumer[0], args=(*consumer[1], out)))
    for process in running:
        process.start()
    out.close()
    try:
        return float(results.recv()) if results.poll(LONGEST) else None
    except EOFError:  # the consumer failed
        return None
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.join()


# ---- our buffer -----------------------------------------------------------------------------------------------------


def make_group(version: int, digest: str) -> Group:
    """A group as an actor would push it."""
    random = np.random.default_rng(0)
    samples = [
        Sample(
            tokens=random.integers(0, VOCABULARY, PROMPT_TOKENS + RESPONSE_TOKENS).astype(np.int32),
            prompt_length=PROMPT_TOKENS,
            logprobs=-random.exponential(size=RESPONSE_TOKENS).astype(np.float32),
            loss_mask=np.ones(RESPONSE_TOKENS, bool),
            runs=[(version, RESPONSE_TOKENS)],
            reward=float(place),
            finish="stop",
        )
        for place in range(GROUP_SIZE)
    ]
    return Group(0, samples, {version: digest}, 1.0)


class OpenRole(Role):
    """The buffer on loopback TCP without keys. No run uses it."""

    def endpoint(self, service: str) -> str:
        tcp = self.config.buffer.transport == "tcp" and not self.keys
        return "tcp://127.0.0.1:0" if tcp else super().endpoint(service)


def open_main(role: Role) -> None:
    from buffer.main import main

    main(OpenRole(**{field.name: getattr(role, field.name) for field in dataclasses.fields(role)}))


class LightActor:
    """Speaks an actor's side of the protocol and has its groups ready: a lease is answered at once, after encoding.

    Waits for leases and announcements. `delays` are the seconds from push to acknowledgement.
    """

    def __init__(self, endpoint: str, name: str, slots: int = 2 * GROUPS_PER_BATCH * GROUP_SIZE):
        self.dealer = Dealer(endpoint, name, peer="buffer")
        self.group, self.ended = make_group(0, "digest"), 0
        self.ready: deque[int] = deque()
        self.sent: dict[int, float] = {}
        self.delays: list[float] = []
        self.dealer.send(messages.Hello("actor", name, os.getpid(), slots))

    def step(self) -> None:
        """Handle received messages, then push ready groups in as few messages as possible."""
        received = self.dealer.receive(1.0)
        while received:
            self._on(received.message)
            received = self.dealer.receive(0)
        while self.ready:
            self._push([self.ready.popleft() for _ in range(min(GROUPS_PER_PUSH, len(self.ready)))])

    def _on(self, message: Message) -> None:
        """Ignores all other messages."""
        match message:
            case messages.Announce(manifest):
                for sample in self.group.samples:
                    sample.runs = [(manifest.version, RESPONSE_TOKENS)]
                self.group.digests = {manifest.version: manifest.digest}
                self.dealer.send(messages.Applied(manifest.version, manifest.digest))
            case messages.Lease(leases):
                self.ready += [lease.group_id for lease in leases]
            case messages.Pushed(ids):
                now = time.perf_counter()
                self.delays += [now - self.sent.pop(group_id) for group_id in ids]
            case messages.Refused(reason):
                raise SystemExit(f"refused: {reason}")

    def _push(self, ids: list[int]) -> None:
        coded = [encode_group(dataclasses.replace(self.group, id=group_id)) for group_id in ids]
        self.sent.update(dict.fromkeys(ids, time.perf_counter()))
        self.ended += len(ids) * GROUP_SIZE
        self.dealer.send(messages.Push(pack_heads([head for head, _ in coded])), [payload for _, payload in coded])
        self.dealer.send(messages.Credit(self.ended))


def light_actor(endpoint: str, name: str, delays: Path) -> None:
    """An actor process; it appends its delays to a file, float64, from time to time."""
    prepare_memory()  # as real roles do
    actor, written = LightActor(endpoint, name), time.perf_counter()
    with delays.open("ab") as file:
        while True:
            actor.step()
            if time.perf_counter() - written > 0.25:
                np.array(actor.delays).tofile(file)
                actor.delays, written = [], time.perf_counter()


def light_learner(endpoint: str, seconds: float, results: Connection) -> None:
    """Takes batches as fast as they come, publishes a version after each."""
    prepare_memory()
    client, index = LearnerClient(endpoint), 0
    client.hello(VOCABULARY)
    client.published(messages.Manifest(0, "digest"))
    client.want(0, 0)

    def take() -> int:
        nonlocal index
        batch, _ = client.batch()
        oldest = min(min(group.digests) for group in batch.groups)
        assert batch.index == index and index - oldest <= MAX_STALENESS, "the bound was broken"
        index += 1
        client.want(index, index)
        client.trained(index - 1)
        client.published(messages.Manifest(index, "digest"))
        return len(batch.samples)

    results.send(rate(take, seconds))


@contextlib.contextmanager
def buffer_process(transport: str, journal: str, folder: Path) -> Iterator[str]:
    """The real buffer process; gives its endpoint."""
    with (
        tempfile.TemporaryDirectory(prefix="run-", dir=folder) as run,
        tempfile.TemporaryDirectory(dir="/tmp") as short,
    ):
        spec = [str(REPOSITORY / "configs/base.yaml"), f"buffer.transport={transport}", f"buffer.journal={journal}"]
        spec += [f"groups_per_batch={GROUPS_PER_BATCH}", f"actors.count={PRODUCERS}", "eval.prompts=0"]
        spec += [f"sizing.group_size={GROUP_SIZE}", f"scheduler.max_staleness={MAX_STALENESS}"]
        configs.save(configs.load(spec), Path(run) / "config.yaml")
        command = [sys.executable, "-m", "scripts.bench.buffer", "--run", run, "--name", "buffer", "--sockets", short]
        with (folder / "buffer.log").open("w") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stderr=log)
        try:
            offer = Path(run) / "rendezvous/buffer.json"
            while not offer.exists():
                if process.poll() is not None:
                    sys.exit((folder / "buffer.log").read_text())
                time.sleep(0.02)
            yield json.loads(offer.read_text())["endpoint"]
        finally:
            process.kill()
            process.wait()


def our_buffer(transport: str, journal: str, seconds: float, folder: Path, delays: Path) -> float | None:
    with buffer_process(transport, journal, folder) as endpoint:
        actors = [(light_actor, (endpoint, f"actor-{i}", delays)) for i in range(PRODUCERS)]
        return measured((light_learner, (endpoint, seconds)), *actors)


# ---- the others -----------------------------------------------------------------------------------------------------


def make_arrays() -> list[dict[str, np.ndarray]]:
    """A group as an object for a queue of Python objects."""
    samples = make_group(0, "digest").samples
    return [{"tokens": each.tokens, "logprobs": each.logprobs, "loss_mask": each.loss_mask} for each in samples]


def _socket(kind: int, endpoint: str, bind: bool = False) -> zmq.Socket[bytes]:
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    sock.set_hwm(32)
    sock.bind(endpoint) if bind else sock.connect(endpoint)
    return sock


def _raw_producer(endpoint: str) -> None:
    sock, message = _socket(zmq.PUSH, endpoint), os.urandom(GROUP_SIZE * TRAJECTORY_BYTES)
    while True:
        sock.send(message)


def _raw_proxy(front: str, back: str) -> None:
    zmq.proxy(_socket(zmq.PULL, front, bind=True), _socket(zmq.PUSH, back, bind=True))


def _raw_consumer(endpoint: str, seconds: float, results: Connection) -> None:
    sock = _socket(zmq.PULL, endpoint)
    results.send(rate(lambda: len(sock.recv()) // TRAJECTORY_BYTES, seconds))


def raw_zmq(seconds: float) -> float | None:
    """`zmq_proxy` in C between PUSH and PULL sockets on TCP: no header, codec, bookkeeping or acknowledgement."""
    with socket.socket() as one, socket.socket() as other:
        for sock in (one, other):
            sock.bind(("127.0.0.1", 0))
        front, back = (f"tcp://127.0.0.1:{sock.getsockname()[1]}" for sock in (one, other))
    return measured(
        (_raw_consumer, (back, seconds)), (_raw_proxy, (front, back)), *[(_raw_producer, (front,))] * PRODUCERS
    )


def _mp_producer(queue: Any, group: list[Any]) -> None:
    while True:
        queue.put(group)


def _mp_forward(source: Any, sink: Any) -> None:
    while True:
        sink.put(source.get())


def _queue_consumer(queue: Any, seconds: float, results: Connection) -> None:
    results.send(rate(lambda: len(queue.get()), seconds))


def mp_queue(seconds: float) -> float | None:
    """`multiprocessing.Queue` into a process and out of it, a group per put."""
    source, sink = processes.Queue(64), processes.Queue(64)
    producers = [(_mp_producer, (source, make_arrays()))] * PRODUCERS
    return measured((_queue_consumer, (sink, seconds)), (_mp_forward, (source, sink)), *producers)


def _ray_run(seconds: float, results: Connection) -> None:
    import ray
    from ray.util.queue import Queue

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=PRODUCERS + 2, **quiet)  # not a cluster that happens to run here
    queue, produce = Queue(64), ray.remote(num_cpus=1)(_mp_producer)
    for _ in range(PRODUCERS):
        produce.remote(queue, make_arrays())
    found = rate(lambda: len(queue.get()), seconds)
    ray.shutdown()
    results.send(found)


def contenders(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], float | None]]:
    """label → trajectories per second of one measurement; None if it did not answer."""
    found: dict[str, Callable[[], float | None]] = {"raw zmq tcp": partial(raw_zmq, args.seconds)}
    for label, transport, journal in (
        (OURS, "tcp", "off"),
        ("buffer tcp, journal=fsync", "tcp", "fsync"),
        ("buffer tcp, journal=memory", "tcp", "memory"),
        ("buffer ipc", "ipc", "off"),
    ):
        delays = folder / ("delays" if label == OURS else "other-delays")
        found[label] = partial(our_buffer, transport, journal, args.seconds, folder, delays)
    found["mp queue"] = partial(mp_queue, args.seconds)
    if importlib.util.find_spec("ray") and not args.without_ray:
        found["ray queue"] = partial(measured, (_ray_run, (args.seconds,)))
    return found


def ratio(rates: dict[str, list[float]], path: str, other: str) -> float:
    """The median over rounds."""
    return statistics.median(a / b for a, b in zip(rates[path], rates[other], strict=True))


def main() -> None:
    parser = bench_parser("buffer", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often every contender is measured")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per measurement, after a warm-up")
    parser.add_argument("--dir", type=Path, help="where the journal is written (default: the temporary folder)")
    parser.add_argument("--without-ray", action="store_true", help="leave Ray out (it is an extra)")
    args = parser.parse_args()
    console = output.console()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.dir) as name:
        runs = contenders(args, Path(name))
        rates: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(args.rounds):
            for label in [*rates]:
                if (found := runs[label]()) is None:
                    console.print(f"{label}: no answer; left out")
                    del rates[label]
                else:
                    rates[label].append(found)
        delays = np.fromfile(Path(name) / "delays")
    if OURS not in rates:
        sys.exit(1)
    table = output.table("trajectories of 12 KB per second", "path", "median", "lowest", "highest")
    for label, values in rates.items():
        table.add_row(label, *(f"{each:,.0f}" for each in (statistics.median(values), min(values), max(values))))
    console.print(table)
    table, metrics = output.table("ratios", "metric", "median", "aimed for"), dict[str, float]()
    for metric, (path, other, aim) in RATIOS.items():
        if path in rates and other in rates:
            metrics[metric] = ratio(rates, path, other)
            table.add_row(metric, f"{metrics[metric]:.2f}", aim)
    console.print(table)
    metrics["ack_p99_ms"] = 1000 * float(np.percentile(delays, 99))
    metrics["trajectories_per_second"] = statistics.median(rates[OURS])
    console.print(f"push to acknowledgement under full load, {OURS}: p99 {metrics['ack_p99_ms']:.1f} ms")
    output.write_json(args.json, metrics)


if __name__ == "__main__":
    run_role(open_main) if "--run" in sys.argv else main()
