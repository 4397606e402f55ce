"""Bytes and seconds of sparse weight updates against a copy of the weights and other methods, in one run.

    python -m scripts.bench.delta [--json FILE] [--millions N] [--repeats N]

1 % and 0.1 % of random bfloat16 weights change, 90 % of those by one step. Processor time of the fastest repeat, one
thread, over that of a memcpy of the weights; ours keeps the digest up to date. Peers: torch's nonzero and gather; XOR
and zstd level 1. Metrics: `ratio_1pct`, `ratio_01pct` (full ÷ delta), `encode_over_memcpy` and `apply_over_memcpy`
(1 %), and for every contender `CONTENDER_DENSITY_{ratio,encode,apply}`.
"""

import argparse
from collections.abc import Callable
from typing import Any

from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    parser = bench_parser("delta", "sparse weight updates against a copy of the weights")
    parser.add_argument("--millions", type=int, default=100, help="number of weights")
    parser.add_argument("--repeats", type=int, default=5)
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
import zstandard

from areal_like.weights import codec, plain
from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import DeltaHead, read, write
from areal_like.weights.layout import Layout
from areal_like.weights.planes import pack
from areal_like.weights.state import State, TensorSpec

from .figures import best_seconds, tell

MATRIX = 1 << 23
BLOCK_BYTES = 16 << 20
DENSITIES = {"1pct": 0.01, "01pct": 0.001}
NO_DIGEST = "0" * 32
Contender = tuple[Callable[[], int], Callable[[], None]]
"""Encode, which returns the bytes of the delta, and apply."""


def weights(millions: int, rng: np.random.Generator) -> State:
    sizes = [MATRIX] * (millions * 10**6 // MATRIX) + [millions * 10**6 % MATRIX]
    # As matrices: a tensor of one dimension is sent as plain bytes.
    state = State([TensorSpec(f"w{place}", "bfloat16", (1, size)) for place, size in enumerate(sizes)])
    pool = torch.from_numpy(0.02 * rng.standard_normal(1 << 22)).to(torch.bfloat16).view(torch.uint16).numpy()
    bits = state.buffer.view(np.uint16)
    bits[:] = np.resize(pool, bits.size)
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


def ours(before: State, after: State) -> Contender:
    layout = Layout(before.specs, BLOCK_BYTES)
    encoder, head = Encoder(layout), DeltaHead(0, 1, NO_DIGEST, NO_DIGEST)
    state = State(before.specs, before.buffer.copy())
    lanes, kept = Lanes(layout, before.words), list[bytes]()

    def encode() -> int:
        blocks = [pack(encoder.encode(block, before.buffer, after.buffer, lanes)) for block in layout.blocks]
        kept[:] = [write(head, layout, blocks)]
        return len(kept[0])

    def apply() -> None:
        for parts in read(kept[0], layout).blocks:
            codec.apply(parts, state.buffer, lanes)

    encode()
    apply()
    if state.buffer.tobytes() != after.buffer.tobytes():
        raise AssertionError("the codec has lost a bit")
    return encode, apply


def torch_gather(before: State, after: State) -> Contender:
    """Flat int32 indices and new values, by nonzero and gather; the receiver scatters."""
    old, new = (torch.from_numpy(state.buffer.view(np.int16)) for state in (before, after))
    target, kept = old.clone(), {}

    def encode() -> int:
        index = (old != new).nonzero().flatten().to(torch.int32)
        kept["delta"] = index, new[index]
        return 6 * index.numel()

    def apply() -> None:
        index, values = kept["delta"]
        target[index.long()] = values

    return encode, apply


def xor_zstd(before: State, after: State) -> Contender:
    """XOR of the bits, compressed by zstd level 1."""
    words, target = np.empty_like(before.words), before.words.copy()
    kept = {}

    def encode() -> int:
        np.bitwise_xor(before.words, after.words, out=words)
        kept["delta"] = zstandard.ZstdCompressor(level=1).compress(words.view(np.uint8).data)
        return len(kept["delta"])

    def apply() -> None:
        bits = np.frombuffer(zstandard.ZstdDecompressor().decompress(kept["delta"]), np.uint64)
        np.bitwise_xor(target, bits, out=target)

    return encode, apply


def compare(before: State, after: State, label: str, repeats: int) -> dict[str, float]:
    made = {"gaps": ours, "torch_gather": torch_gather, "xor_zstd": xor_zstd}
    contenders = {name: make(before, after) for name, make in made.items()}
    target = np.zeros_like(before.buffer)
    calls: dict[str, Callable[[], Any]] = {"memcpy": lambda: np.copyto(target, after.buffer)}
    for name, (encode, apply) in contenders.items():
        calls |= {f"{name}_{label}_encode": encode, f"{name}_{label}_apply": apply}
    seconds = best_seconds(calls, repeats)
    memcpy = seconds.pop("memcpy")
    metrics = {name: spent / memcpy for name, spent in seconds.items()}
    return metrics | {f"{name}_{label}_ratio": before.nbytes / encode() for name, (encode, _) in contenders.items()}


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    before, metrics = weights(args.millions, rng), dict[str, float]()
    for label, density in DENSITIES.items():
        metrics |= compare(before, changed(before, density, rng), label, args.repeats)
        metrics[f"ratio_{label}"] = metrics[f"gaps_{label}_ratio"]
    metrics |= {f"{what}_over_memcpy": metrics[f"gaps_1pct_{what}"] for what in ("encode", "apply")}
    tell(metrics, args.json)


if __name__ == "__main__":
    main(ARGUMENTS)
