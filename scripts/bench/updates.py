"""How weight updates affect a generating actor, and what an engine's `load` costs.

    python -m scripts.bench.updates [--json FILE] [--updates 100] [--millions 100]

In flight: a publisher here, and an actor in its own process with a random Qwen2-architecture model of 12 M parameters
and 8 sequences that never stop. `--updates` versions, each with 1 % changed elements, go out one after the other as
soon as the last is applied. `pause_*_ms` is from the start of an update to the start of the next decode step, as
sequences see it (`kv_policy: keep`; renewing caches would be part of the next step). `tokens_lost` counts sampled
tokens that are in no completion, and tokens that completions lack.

Load: milliseconds to load `--millions` of float32 parameters from published bfloat16, on one thread: all of them, and
only changes of 1 % and .1 % (`areal_like.weights.update`).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("updates", "effects of weight updates on a generating actor")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--millions", type=int, default=100)
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch

from actors.engines.torch_engine import TorchEngine
from actors.subscriber import Subscriber
from areal_like.models.causal_lm import publishable, qwen2, write_state
from areal_like.types import Limits
from areal_like.weights.state import State
from areal_like.weights.update import Changes
from learners.publication import Coding, Publisher

from .delta import changed, weights
from .figures import tell

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


# ---- in flight ------------------------------------------------------------------------------------------------------


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


# ---- load -----------------------------------------------------------------------------------------------------------


def loads(millions: int, repeats: int = 5) -> dict[str, float]:
    rng = np.random.default_rng(0)
    before = weights(millions, rng)
    tensors = {spec.name: torch.zeros(spec.shape) for spec in before.specs}
    found: dict[str, float] = {"load_all_ms": _best(before, tensors, None, repeats)}
    for label, density in {"1pct": 0.01, "01pct": 0.001}.items():
        after, changes = changed(before, density, rng), Changes("")
        for index, ((_, old), (_, new)) in enumerate(zip(before.tensors(), after.tensors(), strict=True)):
            changes.tensors[index].append(np.flatnonzero(old != new))
        found[f"load_{label}_ms"] = _best(after, tensors, changes, repeats)
    return found


def _best(state: State, tensors: dict[str, torch.Tensor], changes: Changes | None, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):
        began = time.perf_counter()
        write_state(state, tensors, changes)
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    metrics = loads(args.millions) | in_flight(args.updates)
    tell(metrics, args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
