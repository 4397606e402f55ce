"""Time from "the new weights are ready" to "applied and verified elsewhere": over loopback, slow links, to many actors.

    python -m scripts.bench.transfers [--json FILE] [--millions 100] [--repeats N] [--mbit 100 1000] [--actors 16]

A publisher in one process, each actor in its own, TCP on loopback; random bfloat16 weights of which .1 % change from
one version to the next, as in `scripts.bench.delta`. Seconds are wall-clock time, from the end of the cast to the last
actor's "applied", of the fastest repeat. Contenders: `delta` (the default), `full` (whole weights, chunked, buffers
reused), `gather` (torch nonzero and gather, int32 indices, by the same sockets; no digest, but a checksum).

Without --mbit the link is loopback itself, and the metrics are `delta_over_memcpy` and so on. With --mbit, the bench
runs in its own network namespace, in which every process that serves weights has a link of that many Mbit/s (htb,
frames of 1,500 bytes); this needs root. With --actors it sends `--few-millions` weights, once with the learner serving
all and once with relays (`weights.fanout` 2 and 4); `egress` is the bytes that the learner sent per version over those
that one actor received.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("transfers", "publish → applied")
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--few-millions", type=int, default=20, help="millions of weights, with --actors")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mbit", type=int, nargs="+", help="speeds of the link, Mbit/s; needs root")
    parser.add_argument("--actors", type=int, default=0, help="actors at once, with and without relays")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
from msgspec.structs import replace

from actors.relay import Relay
from actors.subscriber import Subscriber
from areal_like.weights.history import History, Hop
from areal_like.weights.replica import NOTHING
from areal_like.weights.server import WeightServer
from areal_like.weights.state import State
from areal_like.weights.update import Update
from areal_like.wire.messages import Manifest
from areal_like.wire.messages import Relay as Offer
from buffer.relays import Relays
from learners.publication import Coding, Publisher

from .delta import changed, weights
from .figures import tell

ANY_PORT = "tcp://127.0.0.1:0"
SECONDS = 600.0
DENSITY = 0.001


class NoEngine:
    """Accepts any weights."""

    version, digest = -1, ""

    async def load(self, update: Update) -> None:
        self.version, self.digest = update.version, update.digest


# ---- the actors' side -----------------------------------------------------------------------------------------------


async def _follow(pipe: Connection, number: int) -> None:
    engine: Any = NoEngine()
    subscriber = Subscriber(engine, f"actor-{number}", lambda *_: None)
    subscriber.relay = Relay(ANY_PORT, lambda: subscriber.sources.received, keep=2, snapshot_every=50)
    pipe.send(subscriber.relay.offer)
    while manifest := await asyncio.to_thread(pipe.recv):
        if manifest.digest == "gather":
            await _scatter(subscriber, manifest)
        else:
            await subscriber.apply(manifest)
        pipe.send((time.monotonic(), subscriber.sources.received))


async def _scatter(subscriber: Subscriber, manifest: Manifest) -> None:
    subscriber.sources.set(manifest)
    (hop,) = await subscriber.sources.plan(0, manifest.version, NOTHING, "", bool)
    base, version, nbytes, checksum = hop
    message = np.empty(nbytes, np.uint8)
    await subscriber.sources.fetch(0, hop, lambda at, chunk: np.copyto(message[at : at + chunk.size], chunk))
    if Hop.of(base, version, message.data).checksum != checksum:
        raise AssertionError("wrong checksum")
    count = nbytes // 6
    index, values = torch.from_numpy(message[: 4 * count].view(np.int32)), message[4 * count :].view(np.int16)
    torch.from_numpy(subscriber.replica.state.buffer.view(np.int16))[index.long()] = torch.from_numpy(values)


def actor(pipe: Connection, number: int) -> None:
    torch.set_num_threads(1)
    asyncio.run(_follow(pipe, number))


# ---- the learner's side ---------------------------------------------------------------------------------------------


class Blob(History):
    """One message, without weights."""

    version = 1

    def __init__(self, message: bytes):
        self._message = message

    def plan(self, version: int, held: int, digest: str, *, wait: bool = True) -> list[Hop]:
        return [Hop.of(0, version, self._message)]

    def payload(self, base: int, version: int) -> memoryview:
        return memoryview(self._message)


class Bench:
    """Actors that follow two states in turns, and the costs."""

    def __init__(self, millions: int, actors: int, fanout: int, limit: Callable[[list[str]], None]):
        rng = np.random.default_rng(0)
        self.states = [weights(millions, rng)]
        self.states.append(changed(self.states[0], DENSITY, rng))
        self.tree, self.pipes, self.processes = Relays(fanout), list[Connection](), []
        self._began, self._limit = 0.0, limit
        spawn = multiprocessing.get_context("spawn")
        self.offers = list[Offer]()
        for number in range(actors):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=actor, args=(theirs, number), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for number, pipe in enumerate(self.pipes):
            self.offers.append(pipe.recv())
            self.tree.join(str(number), self.offers[-1].endpoint, self.offers[-1].key)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join(10)

    def _announce(self, manifest: Manifest) -> None:
        for number, pipe in enumerate(self.pipes):
            pipe.send(replace(manifest, relays=self.tree.above(str(number))))

    def _arrivals(self) -> tuple[float, int]:
        """The time when the last actor had applied, and the bytes that one has received so far."""
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(SECONDS):
                raise TimeoutError("an actor does not answer")
            answers.append(pipe.recv())
        return max(at for at, _ in answers), answers[0][1]

    def _snapshot(self, sent: State) -> Callable[..., State]:
        def snapshot(into: State | None = None, done: Callable[[int], None] | None = None) -> State:
            state = into or State(sent.specs)
            np.copyto(state.buffer, sent.buffer)
            self._began = time.monotonic()
            if done:
                done(state.nbytes)
            return state

        return snapshot

    def publish(self, coding: str, repeats: int) -> dict[str, float]:
        """Seconds of the fastest repeat, bytes of one version, and bytes sent by the learner over bytes received by one
        actor."""
        publisher = Publisher(ANY_PORT, Coding(coding=coding, keep=2), self._announce)
        self._limit([publisher.endpoint, *(offer.endpoint for offer in self.offers)])
        best, per_version, egress, got = float("inf"), 0, 0.0, 0
        for version in range(repeats + 2):
            before = publisher.metrics["publish/bytes"]
            publisher.publish(version, self._snapshot(self.states[version % 2]))
            publisher.wait()
            at, received = self._arrivals()
            if version > 1:  # the first is a base snapshot for all, the second warms up
                best, per_version = min(best, at - self._began), received - got
                egress = (publisher.metrics["publish/bytes"] - before) / per_version
            got = received
        publisher.close()
        return {"seconds": best, "bytes": per_version, "egress": egress}

    def gather(self, repeats: int) -> dict[str, float]:
        """Peers' method; the actors' states are those of `publish`."""
        old, new = (torch.from_numpy(state.buffer.view(np.int16)) for state in self.states)
        best, nbytes = float("inf"), 0
        for _ in range(repeats):
            began = time.monotonic()
            index = (old != new).nonzero().flatten().to(torch.int32)
            blob = Blob(index.numpy().tobytes() + new[index].numpy().tobytes())
            server = WeightServer(ANY_PORT, None, lambda _, blob=blob: blob)  # type: ignore[misc]
            connecting = time.monotonic()
            self._limit([server.endpoint])
            limited = time.monotonic() - connecting
            self._announce(Manifest(1, "gather", parts=[server.endpoint]))
            at, _ = self._arrivals()
            best, nbytes = min(best, at - began - limited), server.bytes_sent
            server.close()
        return {"seconds": best, "bytes": nbytes, "egress": 1.0}


def memcpy_seconds(state: State, repeats: int) -> float:
    target, best = np.zeros_like(state.buffer), float("inf")
    for _ in range(repeats + 2):
        began = time.monotonic()
        np.copyto(target, state.buffer)
        best = min(best, time.monotonic() - began)
    return best


# ---- links ----------------------------------------------------------------------------------------------------------


def no_limit(_endpoints: list[str]) -> None:
    """Loopback as it is."""


def limiter(mbit: int) -> Callable[[list[str]], None]:
    """A link of its own for all traffic from each endpoint's port, in this process's network namespace."""

    def limit(endpoints: list[str]) -> None:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, stderr=subprocess.DEVNULL)
        _tc("qdisc add dev lo root handle 1: htb")
        for number, endpoint in enumerate(endpoints, 1):
            _tc(f"class add dev lo parent 1: classid 1:{number} htb rate {mbit}mbit burst 32k cburst 32k")
            port = endpoint.rpartition(":")[2]
            match = f"u32 match ip sport {port} 0xffff flowid 1:{number}"
            _tc(f"filter add dev lo protocol ip parent 1: prio 1 {match}")

    return limit


def _tc(text: str) -> None:
    subprocess.run(["tc", *text.split()], check=True)


def in_namespace(args: list[str]) -> None:
    """Run this bench again in a network namespace of its own."""
    command = [sys.executable, "-m", "scripts.bench.transfers", "--inside", *args]
    up = "ip link set lo mtu 1500 up"
    subprocess.run(["unshare", "-n", "sh", "-c", f'{up} && exec "$@"', "sh", *command], check=True)


def measure(args: argparse.Namespace) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for mbit in args.mbit or [0]:
        limit, name = (limiter(mbit), f"{mbit}mbit") if mbit else (no_limit, "loopback")
        if args.actors:
            for fanout in (0, 2, 4):
                bench = Bench(args.few_millions, args.actors, fanout, limit)
                for coding in ("delta", "full"):
                    found = bench.publish(coding, args.repeats)
                    metrics |= {f"{name}_fanout{fanout}_{coding}_{key}": value for key, value in found.items()}
                bench.close()
            continue
        bench = Bench(args.millions, 1, 0, limit)
        memcpy = memcpy_seconds(bench.states[0], args.repeats)
        results = {coding: bench.publish(coding, args.repeats) for coding in ("full", "delta")}
        results["gather"] = bench.gather(args.repeats)
        bench.close()
        for coding, found in results.items():
            metrics |= {f"{name}_{coding}_{key}": value for key, value in found.items() if key != "egress"}
            if not mbit:
                metrics[f"{coding}_over_memcpy"] = found["seconds"] / memcpy
    return metrics


def main(args: argparse.Namespace) -> None:
    if args.mbit and not args.inside:
        in_namespace(sys.argv[1:])
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    metrics = measure(args)
    tell(metrics, args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
