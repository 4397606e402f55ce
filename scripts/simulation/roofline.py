"""What a model costs on a GPU where no run was measured yet: from its size and the GPU's public figures.

Peaks are dense bfloat16 and memory figures of the SXM modules, from NVIDIA's data sheets of H100, H200 and DGX B200
(eight GPUs: 1,440 GB, 64 TB/s); an H800 is an H100 with slower links, H20's are as published. Shares of the peaks that
real engines and trainers reach are assumed, not measured: see `MEMORY_SHARE`, `DECODE_SHARE`, `TRAIN_SHARE`. So times
are right within `OFF_BY` at best.

    decode step    2 bytes · parameters (read once) + keys and values of all tokens held, over the memory's speed;
                   and 2 FLOPs · parameters per sequence
    prefill        2 FLOPs · parameters per token
    train step     8 FLOPs · parameters per token (forward, backward, and the proximal policy's forward);
                   32 bytes · parameters for gradients, master weights and Adam's moments, read and written
    update         2 bytes · parameters over a link that the actors of a source share, and read and written once on the
                   actor
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from areal_like.config.registry import settled
from areal_like.config.run_config import Config, ConfigError, ranks_of

from .costs import Costs, Engine, LearnerCost, WeightsCost, of_timed, read, scaled

if TYPE_CHECKING:
    from ..starting.memory import Sizes

OFF_BY = 1.5
"""Times are assumed to be right within this factor."""
MEMORY_SHARE, DECODE_SHARE, TRAIN_SHARE = 0.6, 0.4, 0.35
"""Of the peak: memory bandwidth in decoding, FLOPs in prefill and decoding, FLOPs in training."""
NETWORK = 25e9
"""Bytes per second that a source of weights sends in all: half of a link of 400 Gbit/s."""
DOUBLING = 0.9
"""Each doubling of an engine's GPUs makes it 2 · DOUBLING times as fast."""
STEP_SECONDS = 0.002
"""Of the engine's own work in each step."""
TRAINED = 18
"""Bytes per parameter of a learner: weights, gradients, master weights, Adam's moments; activations come on top."""
FREE = 0.9
"""Of a GPU's memory, for weights and the cache."""


@dataclass(frozen=True)
class Gpu:
    """FLOP/s in dense bfloat16, bytes per second of its memory, bytes of it."""

    flops: float
    bandwidth: float
    memory: float


GPUS = {
    "H20": Gpu(148e12, 4.0e12, 96e9),
    "H100": Gpu(989e12, 3.35e12, 80e9),
    "H800": Gpu(989e12, 3.35e12, 80e9),
    "H200": Gpu(989e12, 4.8e12, 141e9),
    "B200": Gpu(2250e12, 8e12, 180e9),
}


def known(config: Config, file: Path | None, hardware: str | None = None, each: int = 1) -> Costs:
    """From a file, else of the config's timed parts. `hardware`: those of engine, learner and weights on such GPUs, an
    engine on `each` of them (`on`). The learner is as fast as the config's `learner.ranks` make it, and what the config
    says of engine and learner counts, not what a file says. Raises ConfigError."""
    if hardware is None and file is None:
        return of_timed(config)
    found = read(file) if file else Costs()
    if hardware:
        found = on(hardware, sizes_of(config), each, found)
    found = scaled(found, ranks_of(config))
    knobs, engine = settled("engine", config.engine), found.engine
    for name in ("slots", "kv_tokens"):  # with others the engine takes what it has room for
        setattr(engine, name, config.engine.get(name) or getattr(engine, name))
    engine.interruptible = knobs.get("interruptible", engine.interruptible)
    if knobs.get("kv_policy") in ("recompute", "keep"):
        engine.recompute = knobs["kv_policy"] == "recompute"
    return found


def on(name: str, sizes: Sizes, each: int, costs: Costs, slots: int = 256) -> Costs:
    """Costs of a model of these sizes: an engine on `each` GPUs, a learner on one (`costs.scaled` takes more).
    Answers, verifier and the rest are those of `costs`. Raises ConfigError."""
    gpu, weights = GPUS[name], 2.0 * sizes.count
    faster = each * DOUBLING ** math.log2(each)
    bandwidth, flops = gpu.bandwidth * MEMORY_SHARE * faster, gpu.flops * DECODE_SHARE * faster
    free = FREE * gpu.memory * each - weights
    if free < weights / 10:
        need = math.ceil(1.1 * weights / (FREE * gpu.memory))
        raise ConfigError(
            f"{weights / 1e9:.0f} GB of weights leave no cache on {each} × {name}: --gpus-per-actor {need}"
        )
    engine = Engine(
        base=STEP_SECONDS + weights / bandwidth,
        per_sequence=weights / flops,
        per_token=sizes.kv(2) / bandwidth,
        prefill=weights / flops,
        apply=2 * weights / bandwidth,
        slots=slots,
        kv_tokens=free / sizes.kv(2),
    )
    train = LearnerCost(
        base=32.0 * sizes.count / (gpu.bandwidth * MEMORY_SHARE),
        per_token=8.0 * sizes.count / (gpu.flops * TRAIN_SHARE),
        least=math.ceil(TRAINED * sizes.count / (FREE * gpu.memory)),
    )
    source = f"the public figures of {name}, not measured" + (f"; lengths from {costs.source}" if costs.source else "")
    fetch = WeightsCost(encode=weights / NETWORK, size=weights, link=NETWORK)  # whole weights: no delta is known
    sample = msgspec.structs.replace(costs.sample, cores=None)  # of the machine that was measured
    return msgspec.structs.replace(costs, engine=engine, learner=train, weights=fetch, sample=sample, source=source)


def sizes_of(config: Config) -> Sizes:
    """Of the config's model, built without memory. Raises ConfigError."""
    from ..starting.estimate import model_of, plain_of
    from ..starting.memory import Sizes

    model = model_of(plain_of(config))
    if model is None:
        raise ConfigError("--hardware needs a model, but neither engine nor learner of this config computes one")
    return Sizes.of(model)
