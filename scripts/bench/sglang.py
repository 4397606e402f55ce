"""Costs of weight updates for an SGLang server under load, and asynchronous against synchronous training with it.

    python -m scripts.bench.sglang [--json FILE] [--updates 50] [--pause-mode retract] [--share 0.01]
    python -m scripts.bench.sglang --device cpu --tiny --updates 20        # a trial, without a GPU

The model has Qwen2.5-0.5B's architecture (`--tiny`: 2 layers of 64) and random weights.

Updates: `SEQUENCES` never stop; versions follow one another, and each changes `--share` of the elements. Rows: tokens/s
(counted as answers end) without updates ("none"), with patches ("ours"), with all weights each time ("full"). Per
update: seconds of `load`, bytes sent to the server (before they are written as text), and milliseconds of its pause
(p50, p99).

Training (left out with `--steps 0`): whole runs of `configs/bench/sglang.yaml`, sync, then async by staleness bound;
trained samples and sampled tokens per second, after `WARMUP_STEPS`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from areal_like.places import REPOSITORY
from areal_like.types import Limits
from areal_like.weights.state import State
from areal_like.weights.update import Update

from ..console import output
from .figures import bench_parser

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actors.engines.sglang_engine import SglangEngine

SEQUENCES, PROMPT, RESPONSE = 64, 128, 256
WARMUP_STEPS = 3
"""The first batches of an asynchronous run fill the pipeline; all modes leave them out."""
SHAPE = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "rope_theta": 1e6,
}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
VOCAB, TINY_VOCAB = 151_936, 1000


def new_model(tiny: bool) -> PreTrainedModel:
    from areal_like.models.causal_lm import qwen2  # takes seconds to import: not for `--help`

    return qwen2(0, TINY_VOCAB if tiny else VOCAB, **(TINY if tiny else SHAPE))  # type: ignore[arg-type]


# ---- updates --------------------------------------------------------------------------------------------------------


def stepped(before: State, share: float, rng: np.random.Generator) -> State:
    """A copy in which about this share of the elements is one step further."""
    after = State(before.specs, before.buffer.copy())
    for _, bits in after.tensors():
        bits[rng.random(bits.size, dtype=np.float32) < share] ^= 1
    return after


async def write(engine: SglangEngine, vocab: int, number: int) -> None:
    """Write one sequence after another, until cancelled."""
    rng, key = np.random.default_rng(number), 0
    while True:
        prompt = rng.integers(0, vocab, PROMPT).astype(np.int32)
        await engine.generate(prompt, Limits(RESPONSE - 2 * (number % 64), key=key))  # so that they end one by one
        key += 1


async def updates(engine: SglangEngine, state: State, args: argparse.Namespace, full: bool) -> dict[str, float]:
    rng, seconds, pauses = np.random.default_rng(engine.version + 1), [], []
    before, begin = engine.stats(), time.monotonic()
    for _ in range(args.updates):
        state.buffer[:] = stepped(state, args.share, rng).buffer
        update, paused = Update(engine.version + 1, state.digest(), state), engine.stats()["pause_seconds"]
        for server in engine._servers if full else ():
            server.digest = ""  # unknown weights: the server needs all of them
        start = time.monotonic()
        await engine.load(update)
        seconds.append(time.monotonic() - start)
        pauses.append(1e3 * (engine.stats()["pause_seconds"] - paused))
        await asyncio.sleep(args.interval)
    after, elapsed = engine.stats(), time.monotonic() - begin
    assert after["whole_updates"] - before["whole_updates"] == full * args.updates
    return {
        "tokens_per_second": (after["tokens"] - before["tokens"]) / elapsed,
        "update_seconds": float(np.mean(seconds)),
        "update_bytes": (after["patch_bytes"] - before["patch_bytes"]) / args.updates,
        "pause_p50_ms": float(np.percentile(pauses, 50)),
        "pause_p99_ms": float(np.percentile(pauses, 99)),
    }


async def under_load(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    from actors.engines.sglang_engine import SglangEngine
    from areal_like.models.causal_lm import publishable

    model = new_model(args.tiny)
    state = publishable(model)
    engine = SglangEngine(model, folder, device=args.device, slots=SEQUENCES, pause_mode=args.pause_mode)
    engine.digest = state.digest()
    tasks = [asyncio.create_task(engine.watch())]
    tasks += [asyncio.create_task(write(engine, model.config.vocab_size, number)) for number in range(SEQUENCES)]
    try:
        while engine.stats()["tokens"] < SEQUENCES * RESPONSE:  # the server is up, and warm
            for each in tasks:
                if each.done():
                    each.result()
            await asyncio.sleep(0.1)
        before, begin = engine.stats()["tokens"], time.monotonic()
        await asyncio.sleep(args.seconds)
        found = {"none": {"tokens_per_second": (engine.stats()["tokens"] - before) / (time.monotonic() - begin)}}
        found["ours"] = await updates(engine, state, args, full=False)
        found["full"] = await updates(engine, state, args, full=True)
        return found
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()


# ---- training -------------------------------------------------------------------------------------------------------


def measure(overrides: list[str], folder: Path) -> dict[str, float]:
    """One run of the bench's config."""
    command = [sys.executable, "-m", "scripts.train", "configs/bench/sglang.yaml", "--plain"]
    command += [f"run.dir={folder}", "run.name=run", *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[WARMUP_STEPS - 1], rows[-1]
    seconds = last["seconds"] - first["seconds"]
    samples = 8 * (last["ledger/trained"] - first["ledger/trained"])
    return {
        "samples_per_second": samples / seconds,
        "tokens_per_second": (last["rollout/tokens"] - first["rollout/tokens"]) / seconds,
        "staleness_max": max(row["staleness/max"] for row in rows),
    }


def training(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    new_model(args.tiny).save_pretrained(folder / "model")
    more = [f"model.path={folder / 'model'}", f"run.steps={args.steps}", f"engine.pause_mode={args.pause_mode}"]
    if args.device == "cpu":
        more += ["engine.device=cpu", "engine.server=null", "learner.device=cpu", "learner.compute_dtype=float32"]
    runs = {"sync": ["mode=sync"]} | {f"async {bound}": [f"scheduler.max_staleness={bound}"] for bound in (1, 2, 4)}
    found = {}
    for label, overrides in runs.items():
        (folder / label).mkdir()
        found[label] = measure([*more, *overrides], folder / label)
    return found


def show(console: Console, title: str, found: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(name for row in found.values() for name in row))
    table = output.table(title, "", *(name.replace("_", " ") for name in columns))
    for label, row in found.items():
        table.add_row(label, *(f"{row[name]:,.4g}" if name in row else "" for name in columns))
    console.print(table)


def main() -> None:
    parser = bench_parser("sglang", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 small layers")
    parser.add_argument("--updates", type=int, default=50, help="updates of each kind")
    parser.add_argument(
        "--share", type=float, default=0.01, help="share of the elements that change from version to version"
    )
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between updates")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of generation without updates")
    parser.add_argument("--pause-mode", choices=["in_place", "retract", "abort"], default="retract")
    parser.add_argument("--steps", type=int, default=12, help="train steps of each run; 0: no runs")
    args = parser.parse_args()
    console, found = output.console(), {}
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as name:
        found["updates"] = asyncio.run(under_load(args, Path(name) / "servers"))
        show(console, "weight updates under load", found["updates"])
        if args.steps:
            found["training"] = training(args, Path(name))
            show(console, "training", found["training"])
    output.write_json(args.json, found)


if __name__ == "__main__":
    main()
