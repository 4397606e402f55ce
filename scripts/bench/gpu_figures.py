"""Figures of one GPU; each is an item of `scripts.bench.gpu`, which this is part of.

An item yields its figures as it gets them: figures from before a cut count.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

from actors.engines.slot_cache import bytes_per_token
from actors.engines.torch_engine import TorchEngine
from actors.subscriber import Subscriber
from areal_like.config.registry import build
from areal_like.config.run_config import load
from areal_like.models.causal_lm import publishable, read_state
from areal_like.places import REPOSITORY
from areal_like.types import Limits
from areal_like.weights.state import State, TensorSpec
from areal_like.wire.messages import Manifest
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from learners.publication import Coding, Publisher

from ..starting.estimate import estimate
from .engine import run_engine
from .gpu_shapes import SIZES, Place, bandwidth, flops, made_batch, new_model, peak, to_device

Figures = Iterator[dict[str, float | str]]
LEARNER_BYTES = 24
"""Per parameter on one rank, at most: weights, masters, gradients, Adam's moments."""
RESPONSE, PREFIX = 256, 128
SEQUENCES = (64, 128, 256, 512)


# Train step


def mfu(place: Place, size: str) -> Figures:
    """Model FLOPs utilisation of a train step: PPO-clip, 64 samples of log-normal lengths, all activations kept."""
    model = new_model(place, size, num_hidden_layers=layers_that_fit(place, size))
    yield {"layers": float(model.config.num_hidden_layers)}
    batch = made_batch(model.config.vocab_size, 2 if place.tiny else 8, 8, 64 if place.tiny else 4096)
    work, tokens = flops(model, batch), sum(len(sample.tokens) for sample in batch.samples)
    learner = _learner(place, model, micro_batch_tokens=8192)
    seconds = []
    for step in range(2 if place.tiny else 6):
        begin = time.perf_counter()
        metrics = learner.train(batch)
        place.wait()
        if step:
            seconds.append(time.perf_counter() - begin)
            took = median(seconds)
            yield {"step_seconds": took, "tokens_per_second": tokens / took, "tflops": work / took / 1e12}
            # Shared prompts are computed once: what the model really computed, over what it was asked for.
            yield {"computed_share": float(metrics["computed_tokens"]) / tokens}
            if known := peak(place):
                yield {"mfu": work / took / known}
    if place.gpu:
        yield {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def layers_that_fit(place: Place, size: str) -> int:
    """All layers, or as many as leave half of the card to activations."""
    shape = SIZES["tiny" if place.tiny else size]
    if not place.gpu:
        return int(shape["num_hidden_layers"])
    hidden, inner = int(shape["hidden_size"]), int(shape["intermediate_size"])
    keys = int(shape["num_key_value_heads"]) * hidden // int(shape["num_attention_heads"])
    layer = hidden * (2 * hidden + 2 * keys + 3 * inner)
    ends = int(shape["vocab_size"]) * hidden * (1 if shape.get("tie_word_embeddings", True) else 2)
    room = torch.cuda.get_device_properties(0).total_memory / 2 / LEARNER_BYTES
    return max(1, min(int(shape["num_hidden_layers"]), int((room - ends) / layer)))


def _learner(place: Place, model: Any, **knobs: Any) -> TorchLearner:
    dtype: Any = "bfloat16" if place.gpu else "float32"
    device: Any = "cuda" if place.gpu else "cpu"
    return TorchLearner(model, ppo, group, lr=1e-6, num_minibatches=1, device=device, compute_dtype=dtype, **knobs)


# Decoding


def decode(place: Place, size: str) -> Figures:
    """Tokens per second of the embedded engine, against the bandwidth bound (each step reads all weights, and the keys
    and values so far) and transformers' static-cache `generate`."""
    speed = bandwidth(place)
    yield {"gb_per_second": speed / 1e9}
    asyncio.set_event_loop(asyncio.new_event_loop())
    counts, response = ((2, 4), 8) if place.tiny else (SEQUENCES, RESPONSE)
    model = new_model(place, size)
    engine = TorchEngine(model, slots=max(counts), device=place.device, kv_tokens=max(counts) * 512)
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    read = sum(p.numel() * p.element_size() for p in model.parameters() if tied or p is not embedding)
    token = bytes_per_token(model.config, engine._cache.dtype)
    for count in counts:
        seconds = _decoded(place, engine, count, response)
        bound = (read + count * (PREFIX + response / 2) * token) / speed
        yield {f"{count}_tokens_per_second": count * response / seconds, f"{count}_step_ms": 1e3 * seconds / response}
        yield {f"{count}_of_bandwidth_bound": bound * response / seconds}
    rate = counts[0] * response / _decoded(place, engine, counts[0], response)
    del engine, model
    gc.collect()
    for compiled in (False, True)[: 1 if place.tiny else 2]:
        name, other = "compiled_generate" if compiled else "generate", new_model(place, size)
        found = counts[0] * response / _generated(place, other, counts[0], response, compiled)
        yield {f"{name}_tokens_per_second": found, f"engine_over_{name}": rate / found}


def _decoded(place: Place, engine: TorchEngine, count: int, response: int) -> float:
    """Seconds of so many sequences of equal lengths, after graphs are captured."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 512, (count, 16 if place.tiny else PREFIX)).astype(np.int32)

    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        run_engine(engine, prompts, np.full(count, response), greedy=False)
        seconds.append(time.perf_counter() - begin)
    return seconds[-1]


def _generated(place: Place, model: Any, count: int, response: int, compiled: bool) -> float:
    """Seconds of `generate` with a static cache; with `compiled` transformers makes the decode step one CUDA graph."""
    ids = torch.randint(0, 512, (count, 16 if place.tiny else PREFIX), device=place.device)
    model = model.to(torch.bfloat16) if place.gpu else model
    how: dict[str, Any] = {
        "max_new_tokens": response,
        "min_new_tokens": response,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
        "cache_implementation": "static",
        "disable_compile": not compiled,
    }
    seconds = []
    for _ in range(2):
        place.wait()
        begin = time.perf_counter()
        ones = torch.ones_like(ids)
        model.generate(ids, attention_mask=ones, **how)
        place.wait()
        seconds.append(time.perf_counter() - begin)
    return seconds[-1]


# Weight updates


def update(place: Place, size: str) -> Figures:
    """Seconds of a weight update at 1 % and 0.1 % changed elements, while sequences run: the learner's cast from the
    device, encoding, sending over loopback, applying to the host's copy and to the engine's weights on the device; and
    the pause as sequences see it."""
    pcie = to_device(place)
    yield {"host_to_device_gb_per_second": pcie / 1e9}
    for label, density in {"1pct": 0.01, "01pct": 0.001}.items():
        for found in asyncio.run(_updates(place, size, density, pcie)):
            yield {f"{label}_{name}": value for name, value in found.items()}


async def _updates(place: Place, size: str, density: float, pcie: float) -> list[dict[str, float]]:
    model, count = new_model(place, size), 3 if place.tiny else 12
    state = publishable(model)
    master = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = TorchEngine(model, slots=8, kv_policy="keep", device=place.device, kv_tokens=8 * 1024)
    engine.digest = state.digest()
    made: asyncio.Queue[Manifest] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def announce(manifest: Manifest) -> None:
        loop.call_soon_threadsafe(made.put_nowait, manifest)

    publisher = Publisher("tcp://127.0.0.1:0", Coding(), announce)
    subscriber = Subscriber(engine, "bench", lambda *_: None, state=state)
    writers = [asyncio.create_task(_write(engine, number)) for number in range(8)]
    while engine.stats()["tokens"] < 80:
        await asyncio.sleep(0)
    rows: list[dict[str, float]] = []
    for version in range(count + 1):
        if version:
            await asyncio.to_thread(_changed, place, master, density)
        before, waited = engine.stats() | subscriber.stats(), time.perf_counter()
        cast = await asyncio.to_thread(publisher.publish, version, _Snapshot(master))
        manifest = await made.get()
        encoded = time.perf_counter() - waited
        await subscriber.apply(manifest)
        applied = time.perf_counter() - waited
        while engine.stats()["pauses"] == before["pauses"] and engine.digest == manifest.digest and version:
            await asyncio.sleep(0)
        spent = {name: value - before[name] for name, value in (engine.stats() | subscriber.stats()).items()}
        row = {"cast_seconds": cast, "until_encoded_seconds": encoded, "send_seconds": spent["fetch_seconds"]}
        row |= {"replica_seconds": spent["replica_seconds"], "apply_seconds": spent["apply_seconds"]}
        row |= {"publish_to_applied_seconds": applied, "pause": spent["pause_seconds"]}
        rows += [row | publisher.metrics] if version else []
    await _ended(engine, writers)
    subscriber.close()
    publisher.close()
    found = {name: median(row[name] for row in rows) for name in rows[0] if name != "pause"}
    found |= {f"pause_p{p}_ms": 1e3 * float(np.percentile([row["pause"] for row in rows], p)) for p in (50, 99)}
    bytes_ = found["publish/density"] * sum(p.numel() for p in model.parameters()) * 2
    return [found | {"apply_over_changed_bytes_on_the_bus": found["apply_seconds"] / (bytes_ / pcie)}]


class _Snapshot:
    """The learner's cast of weights on the device."""

    def __init__(self, master: dict[str, torch.Tensor]):
        self._master = master
        self._specs = [TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in master.items()]

    def __call__(self, into: State | None = None, done: Any = None) -> State:
        state = into or State(self._specs)
        read_state(self._master, state, done)
        return state


def _changed(place: Place, master: dict[str, torch.Tensor], density: float) -> None:
    """Move about this share of the elements by one step of bfloat16."""
    for tensor in master.values():
        bits = tensor.view(torch.int32)
        bits += (torch.rand(tensor.shape, device=tensor.device) < density).to(torch.int32) << 16
    if place.gpu:  # the whole device can't be waited for while the engine captures a graph
        torch.cuda.current_stream().synchronize()


async def _write(engine: TorchEngine, number: int) -> None:
    """One completion after the other."""
    prompt = np.arange(16, dtype=np.int32) + number
    while (await engine.generate(prompt, Limits(200 + 5 * number, key=number), str(number))).finish != "abort":
        pass


async def _ended(engine: TorchEngine, writers: list[asyncio.Task[None]]) -> None:
    for each in writers:
        each.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    await engine.close()


# The whole loop on one card


def one_card(place: Place) -> Figures:
    """Learner and engine on one GPU, long-tailed lengths: trained samples per second, asynchronous over synchronous."""
    size = SIZES["tiny" if place.tiny else "0.5b"]
    knobs = {name: value for name, value in size.items() if name != "vocab_size"}
    overrides = [f"model.{name}={json.dumps(value)}" for name, value in knobs.items()]
    overrides += on_device(place)
    if place.tiny:
        overrides += ["launcher=inline", "run.steps=4", "groups_per_batch=2", "engine.slots=8", "engine.memory=null"]
        overrides += ["task.length_trace={median: 8, sigma: 1.0, max: 32}"]
    rates = {}
    for label, more in {"sync": ["mode=sync"], "async2": ["scheduler.max_staleness=2"]}.items():
        rates[label], row = _trained(place, label, [*overrides, *more])
        yield {f"{label}_samples_per_second": rates[label], f"{label}_staleness_max": row["staleness/max"]}
    yield {"async_over_sync": rates["async2"] / rates["sync"]}


def on_device(place: Place) -> list[str]:
    """Both sides there, in the same precision."""
    learner, dtype = ("cuda", "bfloat16") if place.gpu else ("cpu", "float32")
    devices = [f"learner.device={learner}", f"engine.device={place.device}"]
    return devices + [f"{side}.compute_dtype={dtype}" for side in ("learner", "engine")]


def _trained(place: Place, label: str, overrides: list[str]) -> tuple[float, dict[str, float]]:
    """Samples per second after the first batches, and the last row of metrics. Raises RuntimeError."""
    command = [sys.executable, "-m", "scripts.train", "configs/bench/one_card.yaml", "--plain", *overrides]
    command += [f"run.dir={place.folder}", f"run.name={label}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stdout + done.stderr)[-1500:]}")
    rows = [json.loads(line) for line in (place.folder / label / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[min(3, len(rows) - 2)], rows[-1]
    samples = 8 * (last["ledger/trained"] - first["ledger/trained"])
    return samples / (last["seconds"] - first["seconds"]), last


# Memory


def memory(place: Place, size: str) -> Figures:
    """Bytes that a train step and an engine take, over the dry run's estimates."""
    shape = {name: value for name, value in SIZES["tiny" if place.tiny else size].items() if name != "vocab_size"}
    config = load(
        [
            str(REPOSITORY / "configs/bench/one_card.yaml"),
            *(f"model.{name}={json.dumps(value)}" for name, value in shape.items()),
            *on_device(place),
        ]
    )
    expected = estimate(config)
    yield {f"estimated_{role}_gib": expected[role]["sum"] / 2**30 for role in ("learner", "actor")}
    if not place.gpu:
        return
    model = new_model(place, size, vocab_size=expected_vocabulary(config))
    learner = _learner(place, model, micro_batch_tokens=config.learner.get("micro_batch_tokens", 16_384))
    longest = int(expected["step"]["longest sequence (tokens)"]) - 64
    torch.cuda.reset_peak_memory_stats()
    for index in range(2):
        learner.train(made_batch(model.config.vocab_size, 16, 8, max(1, longest), index))
    taken = torch.cuda.max_memory_allocated()
    yield {"learner_gib": taken / 2**30, "learner_over_estimate": taken / expected["learner"]["sum"]}
    del learner, model
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = TorchEngine(new_model(place, size, vocab_size=expected_vocabulary(config)), memory=config.engine.memory)
    taken = torch.cuda.memory_allocated() - before
    yield {"engine_gib": taken / 2**30, "engine_over_estimate": taken / expected["actor"]["sum"]}
    del engine


def expected_vocabulary(config: Any) -> int:
    """Of the config's task."""
    return int(build("task", config.task, config.run.seed).vocab_size)
