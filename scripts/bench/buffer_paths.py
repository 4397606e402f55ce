"""The paths from four producers to one consumer that `scripts.bench.buffer` compares: our buffer and its alternatives.
Each is a context manager that starts processes and returns the receiving end of a pipe, through which the consumer
reports its rate, in trajectories per second.

A trajectory is 12 KB: 750 prompt tokens and 1,000 sampled ones with logprobs and loss mask; every message, put or push
carries whole groups of 8.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
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
from areal_like.wire.groups import RUN, encode_group
from areal_like.wire.messages import Message

GROUP_SIZE = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 750, 1000
TRAJECTORY_BYTES = 4 * (PROMPT_TOKENS + RESPONSE_TOKENS) + 5 * RESPONSE_TOKENS
PRODUCERS = 4
GROUPS_PER_BATCH = 64
MAX_STALENESS = 2
GROUPS_PER_PUSH = 16
"""Most ready groups in one message (1.5 MB)."""
VOCABULARY = 150_000
WARMUP_SECONDS = 1.0

processes = multiprocessing.get_context("fork")


def rate(take: Callable[[], int], seconds: float) -> float:
    """Trajectories per second that `take` returns, after a warm-up."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < min(WARMUP_SECONDS, seconds):
        take()
    begin, taken = time.perf_counter(), 0
    while (now := time.perf_counter()) - begin < seconds:
        taken += take()
    return taken / (now - begin)


@contextlib.contextmanager
def started(*targets: tuple[Callable[..., None], tuple[Any, ...]]) -> Iterator[None]:
    """Each (function, arguments) as a process; they end with the block."""
    running = [processes.Process(target=target, args=args, daemon=True) for target, args in targets]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.join()


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        yield Path(folder)


# ---- our buffer -----------------------------------------------------------------------------------------------------


def make_group() -> Group:
    """A group as an actor would push it."""
    random = np.random.default_rng(0)
    samples = [
        Sample(
            tokens=random.integers(0, VOCABULARY, PROMPT_TOKENS + RESPONSE_TOKENS).astype(np.int32),
            prompt_length=PROMPT_TOKENS,
            logprobs=-random.exponential(size=RESPONSE_TOKENS).astype(np.float32),
            loss_mask=np.ones(RESPONSE_TOKENS, bool),
            runs=[(0, RESPONSE_TOKENS)],
            reward=float(place),
            finish="stop",
        )
        for place in range(GROUP_SIZE)
    ]
    return Group(0, samples, {0: "digest"}, 1.0)


class OpenRole(Role):
    """The buffer on loopback TCP without keys, for a fair comparison with queues that have none. No run uses it."""

    def endpoint(self, service: str) -> str:
        tcp = self.config.buffer.transport == "tcp" and not self.keys
        return "tcp://127.0.0.1:0" if tcp else super().endpoint(service)


def open_main(role: Role) -> None:
    from buffer.main import main

    main(OpenRole(**{field.name: getattr(role, field.name) for field in dataclasses.fields(role)}))


class LightActor:
    """Speaks an actor's side of the protocol and has its groups ready: a lease is answered at once.

    Waits for leases and announcements. `delays` are the seconds from push to acknowledgement.
    """

    def __init__(self, endpoint: str, name: str, slots: int = 2 * GROUPS_PER_BATCH * GROUP_SIZE):
        self.dealer = Dealer(endpoint, name, peer="buffer")
        self.head, self.payload = encode_group(make_group())
        self.version, self.ended = -1, 0
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
                self.version = manifest.version
                self.head.runs = np.array([(self.version, RESPONSE_TOKENS)] * GROUP_SIZE, RUN).tobytes()
                self.head.digests = {self.version: manifest.digest}
                self.dealer.send(messages.Applied(self.version, manifest.digest))
            case messages.Lease(leases):
                self.ready += [lease.group_id for lease in leases]
            case messages.Pushed(ids):
                now = time.perf_counter()
                self.delays += [now - self.sent.pop(group_id) for group_id in ids]
            case messages.Refused(reason):
                raise SystemExit(f"refused: {reason}")

    def _push(self, ids: list[int]) -> None:
        self.sent.update(dict.fromkeys(ids, time.perf_counter()))
        self.ended += len(ids) * GROUP_SIZE
        names, rows, runs = [(group_id, GROUP_SIZE, 1.0) for group_id in ids], self.head.rows, self.head.runs
        table = messages.Table(names, rows * len(ids), runs * len(ids), self.head.digests)
        self.dealer.send(messages.Push(table), [self.payload] * len(ids))
        self.dealer.send(messages.Credit(self.ended))


def light_actor(endpoint: str, name: str, delays: Connection) -> None:
    """An actor process; it sends its delays from time to time."""
    prepare_memory()  # as real roles do
    actor, told = LightActor(endpoint, name), time.perf_counter()
    while True:
        actor.step()
        if time.perf_counter() - told > 0.5:
            delays.send(actor.delays)
            actor.delays, told = [], time.perf_counter()


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
    time.sleep(3600)


@contextlib.contextmanager
def buffer_process(transport: str, journal: str, folder: Path, *overrides: str) -> Iterator[tuple[str, int]]:
    """The real buffer process, on TCP without keys; gives its endpoint and process id."""
    with socket_folder() as sockets, tempfile.TemporaryDirectory(prefix="run-", dir=folder) as run:
        spec = [str(REPOSITORY / "configs/base.yaml"), f"buffer.transport={transport}", f"buffer.journal={journal}"]
        spec += [f"groups_per_batch={GROUPS_PER_BATCH}", f"actors.count={PRODUCERS}", "eval.prompts=0"]
        spec += [f"sizing.group_size={GROUP_SIZE}", f"scheduler.max_staleness={MAX_STALENESS}", *overrides]
        configs.save(configs.load(spec), Path(run) / "config.yaml")
        command = [sys.executable, "-m", "scripts.bench.buffer_paths", "--run", run]
        command += ["--name", "buffer", "--sockets", str(sockets)]
        with (folder / "buffer.log").open("w") as log:
            process = subprocess.Popen(command, cwd=REPOSITORY, stderr=log)
        try:
            offer = Path(run) / "rendezvous/buffer.json"
            while not offer.exists():
                if process.poll() is not None:
                    sys.exit((folder / "buffer.log").read_text())
                time.sleep(0.02)
            yield json.loads(offer.read_text())["endpoint"], process.pid
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def our_buffer(
    transport: str, journal: str, seconds: float, folder: Path, delays: Callable[[], Connection]
) -> Iterator[Connection]:
    """`delays()` returns the pipe for an actor's delays."""
    results, out = processes.Pipe(duplex=False)
    with buffer_process(transport, journal, folder) as (endpoint, _):
        actors = [(light_actor, (endpoint, f"actor-{i}", delays())) for i in range(PRODUCERS)]
        with started(*actors, (light_learner, (endpoint, seconds, out))):
            yield results


# ---- the others -----------------------------------------------------------------------------------------------------


def make_arrays() -> list[dict[str, np.ndarray]]:
    """A group as an object for a queue of Python objects."""
    return [
        {"tokens": sample.tokens, "logprobs": sample.logprobs, "loss_mask": sample.loss_mask}
        for sample in make_group().samples
    ]


def _raw_producer(endpoint: str) -> None:
    sock = zmq.Context().socket(zmq.PUSH)
    sock.set_hwm(32)
    sock.connect(endpoint)
    message = os.urandom(GROUP_SIZE * TRAJECTORY_BYTES)
    while True:
        sock.send(message)


def _raw_proxy(front: str, back: str) -> None:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for sock, endpoint in ((pull, front), (push, back)):
        sock.set_hwm(32)
        sock.bind(endpoint)
    zmq.proxy(pull, push)


def _raw_consumer(endpoint: str, seconds: float, results: Connection) -> None:
    sock = zmq.Context().socket(zmq.PULL)
    sock.set_hwm(32)
    sock.connect(endpoint)
    results.send(rate(lambda: len(sock.recv()) // TRAJECTORY_BYTES, seconds))
    time.sleep(3600)


@contextlib.contextmanager
def raw_zmq(seconds: float) -> Iterator[Connection]:
    """`zmq_proxy` in C between PUSH and PULL sockets on TCP: no header, codec, bookkeeping or acknowledgement."""
    results, out = processes.Pipe(duplex=False)
    front, back = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    producers = [(_raw_producer, (front,))] * PRODUCERS
    with started((_raw_proxy, (front, back)), *producers, (_raw_consumer, (back, seconds, out))):
        yield results


def free_ports(n: int) -> list[int]:
    """Free ports."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(n)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def _mp_producer(queue: Any, group: list[Any]) -> None:
    while True:
        queue.put(group)


def _mp_forward(source: Any, sink: Any) -> None:
    while True:
        sink.put(source.get())


def _mp_consumer(queue: Any, seconds: float, results: Connection) -> None:
    results.send(rate(lambda: len(queue.get()), seconds))
    time.sleep(3600)


@contextlib.contextmanager
def mp_queue(seconds: float, group: list[Any]) -> Iterator[Connection]:
    """`multiprocessing.Queue` into a process and out of it, a group per put."""
    results, out = processes.Pipe(duplex=False)
    source, sink = processes.Queue(64), processes.Queue(64)
    producers = [(_mp_producer, (source, group))] * PRODUCERS
    with started((_mp_forward, (source, sink)), *producers, (_mp_consumer, (sink, seconds, out))):
        yield results


def _ray_run(seconds: float, results: Connection) -> None:
    import ray
    from ray.util.queue import Queue

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=PRODUCERS + 2, **quiet)  # not a cluster that happens to run here
    queue = Queue(64)

    @ray.remote(num_cpus=1)
    def produce(queue: Any, trajectories: list[bytes]) -> None:
        while True:
            queue.put(trajectories)

    for _ in range(PRODUCERS):
        produce.remote(queue, make_arrays())
    results.send(rate(lambda: len(queue.get()), seconds))
    ray.shutdown()


@contextlib.contextmanager
def ray_queue(seconds: float) -> Iterator[Connection]:
    """`ray.util.queue.Queue`, a group per put."""
    results, out = processes.Pipe(duplex=False)
    process = processes.Process(target=_ray_run, args=(seconds, out))
    process.start()
    try:
        yield results
    finally:
        process.join()


if __name__ == "__main__":
    run_role(open_main)
