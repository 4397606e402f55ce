"""The buffer against a raw ZeroMQ proxy, multiprocessing and Ray: `python -m scripts.bench.buffer [--json FILE]`.

Four producer processes, the measured path, one consumer process; each message carries whole groups of 8 trajectories
of 75 KB. Ours is the real buffer process (ledger, bound, acknowledgements) with light actors, which encode each group,
and a light learner; a queue of Python objects carries lists of dicts of arrays. Contenders take turns; a ratio is the
median over rounds of the ratio within a round. One that does not answer is left out.

Metrics: `tcp_over_raw_zmq`, `tcp_over_ray_queue`, `tcp_over_mp_queue`, `same_host_over_tcp`, `fsync_over_off`,
`ack_p99_ms` (push to acknowledgement under full load), and trajectories per second of each path.
"""

import dataclasses
import importlib.util
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from areal_like.config import run_config as configs
from areal_like.run.process import Role, prepare_process
from areal_like.wire import messages
from areal_like.wire.bus import Dealer
from areal_like.wire.groups import encode_group, pack_heads
from areal_like.wire.learner_client import LearnerClient

from .figures import bench_parser, random_batch, tell

RATIOS = {
    "tcp_over_raw_zmq": ("tcp", "raw_zmq"),
    "tcp_over_ray_queue": ("tcp", "ray_queue"),
    "tcp_over_mp_queue": ("tcp", "mp_queue"),
    "same_host_over_tcp": ("ipc", "tcp"),
    "fsync_over_off": ("tcp_fsync", "tcp"),
}
"""Metric → path, path to divide by."""
OURS = {"tcp": ("tcp", "off"), "tcp_memory": ("tcp", "memory"), "tcp_fsync": ("tcp", "fsync"), "ipc": ("ipc", "off")}
"""Path → `buffer.transport`, `buffer.journal`."""
GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 750, 1000
GROUP_BYTES = 4 * PROMPT_TOKENS + GROUP_SIZE * 9 * RESPONSE_TOKENS
"""Of a payload: the prompt once, and of each response token its id, logprob and mask."""
PRODUCERS, GROUPS_PER_BATCH, MAX_STALENESS = 4, 64, 2
GROUPS_PER_PUSH = 16
"""Most ready groups in one message (1.2 MB)."""
VOCABULARY = 150_000
WARMUP_SECONDS, LONGEST = 1.0, 120.0
"""Before a measurement; until a contender that has not answered is left out."""
GROUP = random_batch(np.full((1, GROUP_SIZE), RESPONSE_TOKENS), PROMPT_TOKENS, VOCABULARY).groups[0]

processes = multiprocessing.get_context("fork")
Takes = Iterator[Callable[[], int]]
"""A generator in the consumer's process that gives one function: take what is there, return its trajectories."""


def rate(take: Callable[[], int], seconds: float) -> float:
    """Trajectories per second that `take` returns, after a warm-up."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < min(WARMUP_SECONDS, seconds):
        take()
    begin, taken = time.perf_counter(), 0
    while (now := time.perf_counter()) - begin < seconds:
        taken += take()
    return taken / (now - begin)


def measured(seconds: float, consumer: Callable[[], Takes], *others: Callable[[], object]) -> float | None:
    """The rate of the consumer beside the other processes; None if it does not answer."""
    results, out = processes.Pipe(duplex=False)

    def consume() -> None:
        takes = consumer()
        found = rate(next(takes), seconds)
        next(takes, None)  # it may clean up
        out.send(found)

    running = [processes.Process(target=each) for each in (*others, consume)]
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
            process.join()


def light_actor(endpoint: str, name: str, delays: Path) -> None:
    """An actor process that encodes and answers at once. Appends seconds from push to acknowledgement to `delays`."""
    prepare_process()  # as real roles do
    dealer, group, ended = Dealer(endpoint, name, peer="buffer"), GROUP, 0
    ready, sent = deque[int](), dict[int, float]()
    dealer.send(messages.Hello("actor", name, os.getpid(), 2 * GROUPS_PER_BATCH * GROUP_SIZE))
    with delays.open("ab", buffering=0) as file:
        while True:
            received = dealer.receive(1.0)
            while received:
                match received.message:
                    case messages.Announce(manifest):
                        for sample in group.samples:
                            sample.runs = [(manifest.version, RESPONSE_TOKENS)]
                        group.digests = {manifest.version: manifest.digest}
                        dealer.send(messages.Applied(manifest.version, manifest.digest))
                    case messages.Lease(leases):
                        ready += [lease.group_id for lease in leases]
                    case messages.Pushed(ids):
                        now = time.perf_counter()
                        file.write(np.array([now - sent.pop(each) for each in ids]).tobytes())
                    case messages.Refused(reason):
                        raise SystemExit(f"refused: {reason}")
                received = dealer.receive(0)
            while ready:  # in as few messages as possible
                ids = [ready.popleft() for _ in range(min(GROUPS_PER_PUSH, len(ready)))]
                coded = [encode_group(dataclasses.replace(group, id=each)) for each in ids]
                sent.update(dict.fromkeys(ids, time.perf_counter()))
                ended += len(ids) * GROUP_SIZE
                heads = pack_heads([head for head, _ in coded])
                dealer.send(messages.Push(heads), [payload for _, payload in coded])
                dealer.send(messages.Credit(ended))


def light_learner(endpoint: str) -> Takes:
    """Takes batches as fast as they come, publishes a version after each."""
    prepare_process()
    client, index = LearnerClient(endpoint), 0
    client.hello(messages.Model(VOCABULARY))
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

    yield take


class OpenRole(Role):
    """The buffer on loopback TCP without keys. No run uses it."""

    def endpoint(self, service: str) -> str:
        return "tcp://127.0.0.1:0" if self.config.buffer.transport == "tcp" else super().endpoint(service)


def run_buffer(role: Role) -> None:
    from buffer.main import main

    prepare_process()
    main(role)


def our_buffer(seconds: float, transport: str, journal: str, delays: Path) -> float | None:
    spec = ["base", f"buffer.transport={transport}", f"buffer.journal={journal}", "eval.prompts=0"]
    spec += [f"groups_per_batch={GROUPS_PER_BATCH}", f"actors.count={PRODUCERS}"]
    spec += [f"sizing.group_size={GROUP_SIZE}", f"scheduler.max_staleness={MAX_STALENESS}"]
    spec += [f"sampling.max_new_tokens={RESPONSE_TOKENS}"]
    with tempfile.TemporaryDirectory(prefix="buffer-") as run:
        role = OpenRole("buffer", Path(run), Path(run), configs.load(spec))
        process = processes.Process(target=run_buffer, args=(role,))
        process.start()
        try:
            endpoint = role.find("buffer")
            actors = [partial(light_actor, endpoint, f"actor-{place}", delays) for place in range(PRODUCERS)]
            return measured(seconds, partial(light_learner, endpoint), *actors)
        finally:
            process.kill()
            process.join()


ARRAYS = [{"tokens": each.tokens, "logprobs": each.logprobs, "loss_mask": each.loss_mask} for each in GROUP.samples]
"""A group as an object for a queue of Python objects."""


def raw_zmq(seconds: float) -> float | None:
    """`zmq_proxy` in C between PUSH and PULL sockets on TCP: no header, codec, bookkeeping or acknowledgement."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        front, back = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (one, other))

    def connected(kind: int, endpoint: str, bind: bool = False) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        sock.set_hwm(32)
        sock.bind(endpoint) if bind else sock.connect(endpoint)
        return sock

    def producer() -> None:
        sock, message = connected(zmq.PUSH, front), os.urandom(GROUP_BYTES)
        while True:
            sock.send(message)

    def proxy() -> None:
        zmq.proxy(connected(zmq.PULL, front, bind=True), connected(zmq.PUSH, back, bind=True))

    def consumer() -> Takes:
        sock = connected(zmq.PULL, back)
        yield lambda: GROUP_SIZE * len(sock.recv()) // GROUP_BYTES

    return measured(seconds, consumer, proxy, *[producer] * PRODUCERS)


def put_forever(queue: Any) -> None:
    while True:
        queue.put(ARRAYS)


def mp_queue(seconds: float) -> float | None:
    """`multiprocessing.Queue` into a process and out of it, a group per put."""
    source, sink = processes.Queue(64), processes.Queue(64)

    def forward() -> None:
        while True:
            sink.put(source.get())

    def consumer() -> Takes:
        yield lambda: len(sink.get())

    return measured(seconds, consumer, forward, *[partial(put_forever, source)] * PRODUCERS)


def ray_consumer() -> Takes:
    import ray
    from ray.util.queue import Queue

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=PRODUCERS + 2, **quiet)  # not a cluster that happens to run here
    queue, produce = Queue(64), ray.remote(num_cpus=1)(put_forever)
    for _ in range(PRODUCERS):
        produce.remote(queue)
    yield lambda: len(queue.get())
    ray.shutdown()


def main() -> None:
    parser = bench_parser("buffer", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often every contender is measured")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per measurement, after a warm-up")
    parser.add_argument("--without-ray", action="store_true", help="leave Ray out (it is an extra)")
    args = parser.parse_args()
    runs: dict[str, Callable[[float], float | None]] = {"raw_zmq": raw_zmq, "mp_queue": mp_queue}
    if importlib.util.find_spec("ray") and not args.without_ray:
        runs["ray_queue"] = partial(measured, consumer=ray_consumer)
    with tempfile.TemporaryDirectory(prefix="delays-") as folder:
        for path, (transport, journal) in OURS.items():
            runs[path] = partial(our_buffer, transport=transport, journal=journal, delays=Path(folder) / path)
        rates: dict[str, list[float]] = {path: [] for path in runs}
        for _ in range(args.rounds):
            for path in [*rates]:
                if (found := runs[path](args.seconds)) is None:
                    print(f"{path}: no answer; left out", flush=True)
                    del rates[path]
                else:
                    rates[path].append(found)
        delays = np.fromfile(Path(folder) / "tcp")
    metrics = {f"{path}_per_second": statistics.median(values) for path, values in rates.items()}
    for metric, (path, other) in RATIOS.items():
        if path in rates and other in rates:
            metrics[metric] = statistics.median(a / b for a, b in zip(rates[path], rates[other], strict=True))
    tell(metrics | {"ack_p99_ms": 1000 * float(np.percentile(delays, 99))}, args.json)


if __name__ == "__main__":
    main()
