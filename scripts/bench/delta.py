"""Bytes and seconds of sparse weight updates against a copy of the weights and other methods, in one run.

    python -m scripts.bench.delta [--json FILE] [--millions 100 500] [--repeats N]

The weights are random bfloat16, in matrices of 8 million; 1 % and 0.1 % of them change, 90 % of those by one step, the
others by 2 to 8, either way. Shows processor time of the fastest repeat, single thread, over that of a memcpy of the
weights into allocated memory; contenders take turns. "digest": the same with the digest kept up to date. Peers: torch's
nonzero and gather with int32 indices; XOR and zstd level 1.

Metrics, of the first size: `ratio_1pct`, `ratio_01pct` (full ÷ delta), `encode_over_memcpy`, `apply_over_memcpy` at 1 %
with the digest, as in production; `sweep_over_memcpy` is a digest from scratch, `peak_extra_over_weights` the most
memory beyond the two states while encoding, `bound_ratio_*` the entropy bound. Every row of the table is a metric
`ROW_DENSITY_{ratio,encode,apply}`, with `_500m` appended for the second size.

Then a publisher here sends `--updates` versions with 1 % changed elements, one after the other, to an actor in its own
process with a model of 12 M parameters and 8 sequences that never stop. `pause_*_ms` is from the start of an update to
the start of the next decode step (`kv_policy: keep`). `tokens_lost` counts sampled tokens that are in no completion,
and tokens that completions lack.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("delta", "sparse weight updates against a copy of the weights")
    parser.add_argument("--millions", type=int, nargs="+", default=[100, 500], help="sizes of the weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=100, help="updates of a generating actor")
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
import zstandard

from actors.engines.torch_engine import TorchEngine
from actors.subscriber import Subscriber
from areal_like.models.causal_lm import publishable, qwen2
from areal_like.types import Limits
from areal_like.weights import codec, plain
from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import DeltaHead, read, write
from areal_like.weights.digest import lanes_of
from areal_like.weights.layout import Layout
from areal_like.weights.planes import pack
from areal_like.weights.state import State, TensorSpec
from learners.publication import Coding, Publisher

from .figures import best_seconds, tell

MATRIX = (2048, 4096)
BLOCK_BYTES = 16 << 20
DENSITIES = {"1pct": 0.01, "01pct": 0.001}
NO_DIGEST = "0" * 32
KNOBS: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1024,
}
VOCAB, SEQUENCES, RESPONSE = 4096, 8, 64
SECONDS = 300.0


def new_model() -> Any:
    return qwen2(0, VOCAB, **KNOBS)  # type: ignore[arg-type]


@dataclass(slots=True)
class Row:
    """One contender at one density: bytes, and a call each for what is timed."""

    encode: Callable[[], int]
    apply: Callable[[], None]


def weights(millions: int, rng: np.random.Generator) -> State:
    count = millions * 10**6
    rows = [MATRIX] * (count // (MATRIX[0] * MATRIX[1]))
    rest = count - sum(a * b for a, b in rows)
    specs = [TensorSpec(f"w{i}", "bfloat16", shape) for i, shape in enumerate([*rows, (1, rest)])]
    state = State(specs)
    values = (0.02 * rng.standard_normal(1 << 22)).astype(np.float32).view(np.uint32)
    pool = ((values + 0x7FFF + ((values >> 16) & 1)) >> 16).astype(np.uint16)
    bits = state.buffer.view(np.uint16)
    for start in range(0, bits.size, pool.size):
        part = bits[start : start + pool.size]
        part[:] = np.roll(pool, start)[: part.size]
    return state


def changed(before: State, density: float, rng: np.random.Generator) -> State:
    """A copy; which elements change is independent from one to the next."""
    after = State(before.specs, before.buffer.copy())
    bits = after.buffer.view(np.uint16)
    for start in range(0, bits.size, 1 << 24):
        part = bits[start : start + (1 << 24)]
        places = np.flatnonzero(rng.random(part.size, dtype=np.float32) < density)
        far = np.where(rng.random(places.size) < 0.9, 1, rng.integers(2, 9, places.size))
        up = rng.random(places.size) < 0.5
        part[places] = plain.stepped(part[places], (2 * far - 2 + up).astype(np.uint32))
    return after


def ours(before: State, after: State, digest: bool) -> Row:
    layout = Layout(before.specs, BLOCK_BYTES)
    encoder, head = Encoder(layout), DeltaHead(0, 1, NO_DIGEST, NO_DIGEST)
    state = State(before.specs, before.buffer.copy())
    lanes = Lanes(layout, before.words) if digest else None
    kept: list[bytes] = []

    def encode() -> int:
        blocks = [pack(encoder.encode(block, before.buffer, after.buffer, lanes)) for block in layout.blocks]
        kept[:] = [write(head, layout, blocks)]
        return len(kept[0])

    def apply() -> None:
        for block, coded in zip(layout.blocks, read(kept[0], layout).blocks, strict=True):
            codec.apply(block, coded, state.buffer, lanes)

    encode()
    apply()
    if state.buffer.tobytes() != after.buffer.tobytes():
        raise AssertionError("the codec has lost a bit")
    return Row(encode, apply)


def torch_gather(before: State, after: State) -> Row:
    """Peers' method: flat int32 indices and new values, by nonzero and gather; the receiver scatters."""
    old, new = (torch.from_numpy(state.buffer.view(np.int16)) for state in (before, after))
    target, kept = old.clone(), {}

    def encode() -> int:
        index = (old != new).nonzero().flatten().to(torch.int32)
        kept["delta"] = index, new[index]
        return 6 * index.numel()

    def apply() -> None:
        index, values = kept["delta"]
        target[index.long()] = values

    return Row(encode, apply)


def xor_zstd(before: State, after: State) -> Row:
    """Peers' method: XOR of the bits, compressed by zstd level 1."""
    words, target = np.empty_like(before.words), before.words.copy()
    kept = {}

    def encode() -> int:
        np.bitwise_xor(before.words, after.words, out=words)
        kept["delta"] = zstandard.ZstdCompressor(level=1).compress(words.view(np.uint8).data)
        return len(kept["delta"])

    def apply() -> None:
        bits = np.frombuffer(zstandard.ZstdDecompressor().decompress(kept["delta"]), np.uint64)
        np.bitwise_xor(target, bits, out=target)

    return Row(encode, apply)


def compare(before: State, after: State, label: str, repeats: int) -> dict[str, float]:
    rows = {
        "gaps": ours(before, after, False),
        "gaps_digest": ours(before, after, True),
        "torch_gather": torch_gather(before, after),
        "xor_zstd": xor_zstd(before, after),
    }
    target = np.zeros_like(before.buffer)
    calls: dict[str, Callable[[], Any]] = {"memcpy": lambda: np.copyto(target, after.buffer)}
    calls["sweep"] = lambda: lanes_of(after.words, 0)
    for name, row in rows.items():
        calls |= {f"{name}_{label}_encode": row.encode, f"{name}_{label}_apply": row.apply}
    seconds = best_seconds(calls, repeats)
    metrics = {name: seconds[name] / seconds["memcpy"] for name in calls if name not in ("memcpy", "sweep")}
    metrics |= {f"{name}_{label}_ratio": before.nbytes / row.encode() for name, row in rows.items()}
    metrics |= {"memcpy_gb_per_second": before.nbytes / seconds["memcpy"] / 1e9}
    return metrics | {"sweep_over_memcpy": seconds["sweep"] / seconds["memcpy"]}


def peak_extra(before: State, after: State) -> float:
    """The most memory that one encoding in a fresh encoder asks for, payload included, over that of the weights."""
    layout = Layout(before.specs, BLOCK_BYTES)
    tracemalloc.start()
    encoder = Encoder(layout)
    blocks = [pack(encoder.encode(block, before.buffer, after.buffer)) for block in layout.blocks]
    write(DeltaHead(0, 1, NO_DIGEST, NO_DIGEST), layout, blocks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / before.nbytes


def of_size(millions: int, repeats: int, rng: np.random.Generator) -> dict[str, float]:
    before, metrics = weights(millions, rng), dict[str, float]()
    for label, density in DENSITIES.items():
        after = changed(before, density, rng)
        if not metrics:
            metrics["peak_extra_over_weights"] = peak_extra(before, after)
        metrics |= compare(before, after, label, repeats)
        steps = -0.9 * np.log2(0.45) - 0.1 * np.log2(0.1 / 14)
        places = -density * np.log2(density) - (1 - density) * np.log2(1 - density)
        metrics[f"bound_ratio_{label}"] = 16 / (places + density * steps)
    metrics |= {f"ratio_{label}": metrics[f"gaps_{label}_ratio"] for label in DENSITIES}
    metrics |= {f"{what}_over_memcpy": metrics[f"gaps_digest_1pct_{what}"] for what in ("encode", "apply")}
    return metrics


class Writer:
    """Asks for completions without end, and counts their tokens."""

    def __init__(self, engine: TorchEngine):
        self.engine, self.done, self.short, self.versions = engine, 0, 0, 0

    async def write(self, number: int) -> None:
        prompt = np.arange(16, dtype=np.int32) + number
        length = RESPONSE + 5 * number  # so that they do not all end in one step
        while True:
            said = await self.engine.generate(prompt, Limits(length, key=self.done), str(number))
            self.done += len(said.tokens)
            if said.finish != "abort":
                self.short += length - sum(count for _, count in said.runs)
                self.versions = max(self.versions, len(said.runs))
            else:
                return


async def _generate(pipe: Connection) -> None:
    model = new_model()
    state = publishable(model)
    engine = TorchEngine(model, slots=SEQUENCES, kv_policy="keep")
    engine.digest = state.digest()
    subscriber, writer = Subscriber(engine, "actor", lambda *_: None, state=state), Writer(engine)
    tasks = [asyncio.create_task(writer.write(number)) for number in range(SEQUENCES)]
    while engine.stats()["tokens"] < 4 * SEQUENCES:
        await asyncio.sleep(0)
    pauses, seconds = [], 0.0
    while manifest := await asyncio.to_thread(pipe.recv):
        await subscriber.apply(manifest)
        for _ in range(3):  # until the next step has begun
            await asyncio.sleep(0)
        if engine.stats()["pause_seconds"] > seconds:
            pauses.append(engine.stats()["pause_seconds"] - seconds)
            seconds = engine.stats()["pause_seconds"]
        pipe.send(manifest.version)
    await engine.close()
    await asyncio.gather(*tasks)
    lost = writer.short + abs(int(engine.stats()["tokens"]) - writer.done)
    pipe.send({"pauses": pauses, "lost": lost, "tokens": writer.done, "runs": writer.versions})


def actor(pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(_generate(pipe))


def in_flight(updates: int) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=actor, args=(theirs,), daemon=True)
    process.start()
    publisher = Publisher("tcp://127.0.0.1:0", Coding(), pipe.send)
    rng, state = np.random.default_rng(0), publishable(new_model())
    began = time.monotonic()
    for version in range(updates + 1):
        sent = state
        publisher.publish(version, lambda into=None, done=None, sent=sent: _cast(sent, into, done))
        publisher.wait()
        if not pipe.poll(SECONDS) or pipe.recv() != version:
            raise TimeoutError("the actor does not answer")
        state = changed(state, 0.01, rng)
    seconds = time.monotonic() - began
    pipe.send(None)
    said = pipe.recv()
    process.join(10)
    publisher.close()
    p50, p99 = np.percentile(said["pauses"], [50, 99])
    return {
        "updates": len(said["pauses"]),
        "updates_per_second": updates / seconds,
        "pause_p50_ms": 1e3 * p50,
        "pause_p99_ms": 1e3 * p99,
        "tokens": said["tokens"],
        "tokens_lost": said["lost"],
        "versions_in_one_response": said["runs"],
    }


def _cast(sent: State, into: State | None, done: Any) -> State:
    state = into or State(sent.specs)
    np.copyto(state.buffer, sent.buffer)
    if done:
        done(state.nbytes)
    return state


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    metrics: dict[str, float] = {}
    for size in args.millions:
        suffix = "" if size == args.millions[0] else f"_{size}m"
        metrics |= {name + suffix: value for name, value in of_size(size, args.repeats, rng).items()}
    tell(metrics | in_flight(args.updates), args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
