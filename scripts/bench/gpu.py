"""Train step, decoding, weight updates and the whole loop on one GPU: `python -m scripts.bench.gpu [--json FILE]`.

    python -m scripts.bench.gpu --json gpu.json
    python -m scripts.bench.gpu --device cpu --tiny                (without a GPU; the numbers mean little)

Each item runs in a process of its own with a time limit: one that fails or hangs ends alone, and what it measured
before counts. FILE is written after every item. Exit code 1 if an item has failed. All models have random weights, of
the shapes of Qwen2.5; nothing is downloaded.

correct    gradients on the device against those on the CPU, the engine's logprobs against a forward pass:
           `gradient_error`, `logprob_error`
train      PPO-clip, 64 samples of log-normal lengths, as many layers as fit: `train_mfu_SIZE`,
           `train_tokens_per_second_SIZE`, `train_layers_SIZE`. FLOPs are the model's own (PaLM, arXiv 2204.02311,
           appendix B): 6 per multiplying weight and token, the head for trained tokens only, and causal attention's
           6 · layers · width · length² per sequence; recomputation does not count
decode     64 to 512 sequences: `engine_tokens_per_second_SEQUENCES`, `engine_over_bandwidth_SEQUENCES` (of the rate at
           which the memory gives weights, keys and values), `engine_over_generate` (transformers' static cache, 64
           sequences), `engine_over_compiled_generate`; sizes other than 0.5b append theirs
update     12 updates of 1 % of the elements while 8 sequences run, medians: `update_seconds` (cast to applied) and its
           parts, `pause_p50_ms`, `pause_p99_ms`; the engine's weights must have the publisher's digest
one_card   `configs/bench/one_card.yaml`, trained samples per second with η = 2 over sync: `async_over_sync`
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_like.places import REPOSITORY
from areal_like.types import Batch, Group, Limits, Sample

from ..console.output import write_json
from .figures import bench_parser

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actors.engines.torch_engine import TorchEngine
    from learners.learner import TorchLearner

Metrics = Iterator[dict[str, float]]
LEARNER_BYTES = 24
"""Per parameter on one rank, at most: weights, masters, gradients, Adam's moments."""
PROMPT, MEDIAN, SIGMA = 64, 512, float(np.log(4) / 1.645)
"""Tokens of a prompt; log-normal lengths of the answers (p95/p50 = 4)."""
RESPONSE, PREFIX = 256, 128
"""Tokens per sequence in `decode`, and of its prompt."""
CLOSE = 1e-3
"""Most relative error of float32."""
COMMON = {"vocab_size": 151_936, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
SIZES: dict[str, dict[str, Any]] = {
    "0.5b": COMMON
    | {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5b": COMMON
    | {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "7b": COMMON
    | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18_944}
    | {"vocab_size": 152_064, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "intermediate_size": 128},
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item runs: device, whether with shapes for a CPU, and a folder for what it writes."""

    device: str
    tiny: bool
    folder: Path

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    def shape(self, size: str) -> dict[str, Any]:
        return SIZES["tiny" if self.tiny else size]

    def wait(self) -> None:
        """Until the device is done."""
        import torch

        if self.gpu:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begin


def new_model(place: Place, size: str, **other: Any) -> PreTrainedModel:
    """Random weights, made on the device: a CPU would take minutes."""
    import torch

    from areal_like.models.causal_lm import qwen2

    with torch.device(place.device):
        return qwen2(0, **(place.shape(size) | other)).eval()


def new_learner(place: Place, model: PreTrainedModel, **knobs: Any) -> TorchLearner:
    from learners.advantages import group
    from learners.learner import TorchLearner
    from learners.losses.clipped import ppo

    knobs = {"compute_dtype": "bfloat16" if place.gpu else "float32"} | knobs
    device: Any = "cuda" if place.gpu else "cpu"
    return TorchLearner(model, ppo, group, lr=1e-6, num_minibatches=1, device=device, **knobs)


def made_batch(vocab: int, groups: int, size: int, longest: int) -> Batch:
    """Random tokens, one prompt per group; log-normal lengths; rewards of 0 and 1; logprobs near those of an untrained
    model."""
    rng = np.random.default_rng(0)

    def sample(prompt: np.ndarray, index: int) -> Sample:
        length = int(np.clip(MEDIAN * np.exp(SIGMA * rng.standard_normal()), 1, longest))
        return Sample(
            tokens=np.concatenate([prompt, rng.integers(0, vocab, length).astype(np.int32)]),
            prompt_length=len(prompt),
            logprobs=(rng.normal(0, 0.1, length) - np.log(vocab)).astype(np.float32),
            loss_mask=np.ones(length, bool),
            runs=[(0, length)],
            reward=float(index % 2),
            finish="stop",
        )

    prompts = rng.integers(0, vocab, (groups, PROMPT)).astype(np.int32)
    return Batch(0, 0, [Group(g, [sample(prompt, i) for i in range(size)]) for g, prompt in enumerate(prompts)])


def correct(place: Place) -> Metrics:
    """Raises ArithmeticError if the device computes something else than the CPU."""
    from actors.engines.torch_engine import TorchEngine

    gradients = []
    for each in (Place("cpu", True, place.folder), place):
        learner = new_learner(each, small_model(), compute_dtype="float32")
        learner.train(made_batch(512, 4, 4, 24))
        gradients.append(learner.optimizer.gradient.double().cpu())
    error = float((gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max())
    yield {"gradient_error": error}
    reference = small_model().to(place.device)
    prompts = np.random.default_rng(0).integers(0, 512, (8, 16)).astype(np.int32)

    async def sampled() -> float:
        engine = TorchEngine(small_model(), device=place.device, slots=5, compute_dtype="float32")
        done = await asyncio.gather(*(engine.generate(each, Limits(64, key=i)) for i, each in enumerate(prompts)))
        await engine.close()
        return max(off(reference, prompts[i], each.tokens, each.logprobs) for i, each in enumerate(done))

    worst = asyncio.run(sampled())
    yield {"logprob_error": worst}
    if max(error, worst) > CLOSE:
        raise ArithmeticError(f"gradient_error {error:.2g}, logprob_error {worst:.2g}: above {CLOSE:g}")


def small_model() -> PreTrainedModel:
    """On the CPU, with weights large enough for logprobs that differ."""
    from areal_like.models.causal_lm import qwen2

    return qwen2(0, **SIZES["tiny"], initializer_range=0.1).eval()


def off(model: Any, prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> float:
    """Largest difference of the engine's logprobs [T] from those of a forward pass."""
    import torch

    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None].to(model.device)
    with torch.no_grad():
        truth = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    found = truth.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
    return float(np.abs(found - logprobs).max())


# Train step


def train(place: Place, size: str) -> Metrics:
    import torch

    from ..simulation.costs import GPUS

    model = new_model(place, size, num_hidden_layers=layers_that_fit(place, size))
    yield {f"train_layers_{size}": float(model.config.num_hidden_layers)}
    batch = made_batch(model.config.vocab_size, 2 if place.tiny else 8, 8, 64 if place.tiny else 4096)
    work, tokens = flops(model, batch), sum(len(sample.tokens) for sample in batch.samples)
    name = torch.cuda.get_device_name() if place.gpu else "cpu"
    peak = next((GPUS[known][0] for known in GPUS if known in name), None)
    learner = new_learner(place, model, micro_batch_tokens=8192)
    seconds = [place.seconds(lambda: learner.train(batch)) for _ in range(2 if place.tiny else 6)]
    took = median(seconds[1:])
    yield {f"train_tokens_per_second_{size}": tokens / took, f"train_tflops_{size}": work / took / 1e12}
    if peak:
        yield {f"train_mfu_{size}": work / took / peak}
        yield {f"train_peak_gib_{size}": torch.cuda.max_memory_allocated() / 2**30}


def layers_that_fit(place: Place, size: str) -> int:
    """All layers, or as many as leave half of the card to activations."""
    import torch

    shape = place.shape(size)
    if not place.gpu:
        return shape["num_hidden_layers"]
    hidden = shape["hidden_size"]
    keys = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * keys + 3 * shape["intermediate_size"])
    ends = shape["vocab_size"] * hidden * (1 if shape.get("tie_word_embeddings", True) else 2)
    room = torch.cuda.get_device_properties(0).total_memory / 2 / LEARNER_BYTES
    return max(1, min(shape["num_hidden_layers"], int((room - ends) / layer)))


def flops(model: PreTrainedModel, batch: Batch) -> float:
    """Of forward and backward of one train step, each sample by itself."""
    config, head = model.config, model.get_output_embeddings().weight
    embedding = {id(model.get_input_embeddings().weight), id(head)}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in embedding)
    lengths = np.array([len(sample.tokens) for sample in batch.samples], np.float64)
    trained = sum(int(sample.loss_mask.sum()) for sample in batch.samples)
    attention = 6 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 6.0 * weights * float(lengths.sum()) + 6.0 * head.numel() * trained + attention


# Decoding


def decode(place: Place, size: str) -> Metrics:
    from actors.engines.slot_cache import bytes_per_token
    from actors.engines.torch_engine import TorchEngine

    speed, suffix = bandwidth(place), "" if size == "0.5b" else f"_{size}"
    asyncio.set_event_loop(asyncio.new_event_loop())
    counts, response, prefix = ((2, 4), 8, 16) if place.tiny else ((64, 128, 256, 512), RESPONSE, PREFIX)
    prompts = np.random.default_rng(0).integers(0, 512, (max(counts), prefix)).astype(np.int32)
    model = new_model(place, size)
    engine = TorchEngine(model, slots=max(counts), device=place.device, kv_tokens=max(counts) * 512)
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    read = sum(p.numel() * p.element_size() for p in model.parameters() if tied or p is not embedding)
    token, rates = bytes_per_token(model.config, engine._cache.dtype), {}
    for count in counts:
        rates[count] = count * response / decoded(place, engine, prompts[:count], response)
        bound = count * speed / (read + count * (prefix + response / 2) * token)
        yield {f"engine_tokens_per_second_{count}{suffix}": rates[count]}
        yield {f"engine_over_bandwidth_{count}{suffix}": rates[count] / bound}
    yield {f"engine_over_bandwidth{suffix}": rates[count] / bound}
    del engine, model
    gc.collect()
    for compiled in (False,) if place.tiny else (False, True):
        name = "compiled_generate" if compiled else "generate"
        rate = counts[0] * response / generated(place, new_model(place, size), prompts[: counts[0]], response, compiled)
        yield {f"{name}_tokens_per_second{suffix}": rate, f"engine_over_{name}{suffix}": rates[counts[0]] / rate}


def bandwidth(place: Place) -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    import torch

    source = torch.zeros(1 << 25 if place.tiny else 1 << 31, dtype=torch.uint8, device=place.device)
    target = torch.zeros_like(source)
    return 2 * source.numel() / min(place.seconds(lambda: target.copy_(source)) for _ in range(6))


def decoded(place: Place, engine: TorchEngine, prompts: np.ndarray, response: int) -> float:
    """Seconds of sequences of equal lengths, after graphs are captured. prompts [n, P]."""
    from .engine import run_engine

    lengths = np.full(len(prompts), response)
    return [place.seconds(lambda: run_engine(engine, prompts, lengths, greedy=False)) for _ in range(2)][-1]


def generated(place: Place, model: Any, prompts: np.ndarray, response: int, compiled: bool) -> float:
    """Seconds of `generate` with a static cache; with `compiled` transformers makes the decode step one CUDA graph."""
    import torch

    ids = torch.from_numpy(prompts.astype(np.int64)).to(place.device)
    model = model.to(torch.bfloat16) if place.gpu else model
    how: dict[str, Any] = {"max_new_tokens": response, "min_new_tokens": response, "pad_token_id": 0}
    how |= {"do_sample": True, "top_k": 0, "cache_implementation": "static", "disable_compile": not compiled}
    ones = torch.ones_like(ids)
    return [place.seconds(lambda: model.generate(ids, attention_mask=ones, **how)) for _ in range(2)][-1]


# Weight updates


def update(place: Place) -> Metrics:
    rows, pauses = asyncio.run(_updates(place))
    yield {name: median(row[name] for row in rows) for name in rows[0]}
    yield {f"pause_p{p}_ms": 1e3 * float(np.percentile(pauses, p)) for p in (50, 99)}


async def _updates(place: Place) -> tuple[list[dict[str, float]], list[float]]:
    """Seconds of the parts of each update, and the pause that sequences see."""
    from actors.engines.torch_engine import TorchEngine
    from actors.subscriber import Subscriber
    from areal_like.models.causal_lm import publishable, state_of
    from areal_like.wire.messages import Manifest
    from learners.publication import Coding, Publisher

    model = new_model(place, "0.5b")
    state = publishable(model)
    master = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = TorchEngine(model, slots=8, kv_policy="keep", device=place.device, kv_tokens=8 * 1024)
    engine.digest = state.digest()
    made, loop = asyncio.Queue[Manifest](), asyncio.get_running_loop()

    def announce(manifest: Manifest) -> None:
        loop.call_soon_threadsafe(made.put_nowait, manifest)

    publisher = Publisher("tcp://127.0.0.1:0", Coding(), announce)
    subscriber = Subscriber(engine, "bench", lambda *_: None, state=state)
    writers = [asyncio.create_task(_write(engine, number)) for number in range(8)]
    while engine.stats()["tokens"] < 80:
        await asyncio.sleep(0)
    rows, pauses = [], []
    for version in range(4 if place.tiny else 13):
        if version:
            await asyncio.to_thread(_change, place, master, 0.01)
        before, began = engine.stats() | subscriber.stats(), time.perf_counter()
        cast = await asyncio.to_thread(publisher.publish, version, partial(_cast, master))
        manifest = await made.get()
        encoded = time.perf_counter() - began
        await subscriber.apply(manifest)
        applied = time.perf_counter() - began
        if version:
            while engine.stats()["pauses"] == before["pauses"]:
                await asyncio.sleep(0)
            spent = {name: value - before[name] for name, value in (engine.stats() | subscriber.stats()).items()}
            parts = {f"update_{name}_seconds": spent[f"{name}_seconds"] for name in ("fetch", "replica", "apply")}
            rows.append(
                {"update_seconds": applied, "update_cast_seconds": cast, "update_encoded_seconds": encoded} | parts
            )
            pauses.append(spent["pause_seconds"])
    for each in writers:
        each.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    if state_of(model).digest() != manifest.digest:
        raise ArithmeticError("the engine's weights are not the published ones")
    await engine.close()
    subscriber.close()
    publisher.close()
    return rows, pauses


def _cast(master: dict[str, Any], into: Any = None, done: Any = None) -> Any:
    """The learner's cast of weights on the device into a state on the host."""
    from areal_like.models.causal_lm import read_state
    from areal_like.weights.state import State, TensorSpec

    state = into or State([TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in master.items()])
    read_state(master, state, done)
    return state


def _change(place: Place, master: dict[str, Any], density: float) -> None:
    """Move about this share of the elements by one step of bfloat16."""
    import torch

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


# The whole loop on one card


def one_card(place: Place) -> Metrics:
    knobs = {name: value for name, value in place.shape("0.5b").items() if name != "vocab_size"}
    learner, dtype = ("cuda", "bfloat16") if place.gpu else ("cpu", "float32")
    overrides = [f"model.{name}={json.dumps(value)}" for name, value in knobs.items()]
    overrides += [f"learner.device={learner}", f"engine.device={place.device}"]
    overrides += [f"{side}.compute_dtype={dtype}" for side in ("learner", "engine")]
    if place.tiny:
        overrides += ["launcher=inline", "run.steps=4", "groups_per_batch=2", "engine.slots=8", "engine.memory=null"]
        overrides += ["task.length_trace={median: 8, sigma: 1.0, max: 32}"]
    rates = {}
    for name, mode in {"sync": "mode=sync", "async": "scheduler.max_staleness=2"}.items():
        rates[name] = trained(place.folder, name, [*overrides, mode])
        yield {f"{name}_samples_per_second": rates[name]}
    yield {"async_over_sync": rates["async"] / rates["sync"]}


def trained(folder: Path, name: str, overrides: list[str]) -> float:
    """Samples per second after the first batches. Raises RuntimeError."""
    command = [sys.executable, "-m", "scripts.train", "configs/bench/one_card.yaml", "--plain", *overrides]
    command += [f"run.dir={folder}", f"run.name={name}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stdout + done.stderr)[-1500:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[min(3, len(rows) - 2)], rows[-1]
    return 8 * (last["ledger/trained"] - first["ledger/trained"]) / (last["seconds"] - first["seconds"])


# Items, each in its own process

ITEMS: dict[str, tuple[float, Callable[[Place], Metrics]]] = {
    "correct": (120, correct),
    "train_0.5b": (120, partial(train, size="0.5b")),
    "train_1.5b": (120, partial(train, size="1.5b")),
    "train_7b": (120, partial(train, size="7b")),
    "decode_0.5b": (150, partial(decode, size="0.5b")),
    "decode_1.5b": (150, partial(decode, size="1.5b")),
    "decode_7b": (180, partial(decode, size="7b")),
    "update": (120, update),
    "one_card": (240, one_card),
}
"""Item → seconds that it may take, what runs it."""


def run_item(name: str, place: Place) -> None:
    """In this process: each finding is a line of JSON in the place's folder."""
    if place.gpu:
        import torch

        torch.cuda.set_device(torch.device(place.device).index or 0)
    with (place.folder / "found").open("a", buffering=1) as file:
        for found in ITEMS[name][1](place):
            file.write(json.dumps(found) + "\n")


def attempt(name: str, device: str, tiny: bool) -> tuple[dict[str, float], str]:
    """An item in a process of its own: what it found, and its error ("" if it ended well)."""
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as made:
        folder, error = Path(made), ""
        (folder / "found").touch()
        command = [sys.executable, "-m", "scripts.bench.gpu", "--item", name, "--folder", made, "--device", device]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, *(["--tiny"] if tiny else [])],
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                start_new_session=True,
            )
            try:
                if code := process.wait(ITEMS[name][0]):
                    error = f"exit code {code}"
            except subprocess.TimeoutExpired:
                error = f"not done in {ITEMS[name][0]:.0f} s"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            process.wait()
        found = dict[str, float]()
        for line in (folder / "found").read_text().splitlines():
            found |= json.loads(line)
        return found, error and f"{error}\n{(folder / 'log').read_text(errors='replace')[-2000:]}"


def main() -> None:
    parser = bench_parser("gpu", __doc__)
    parser.add_argument(
        "--only", nargs="+", choices=list(ITEMS), default=list(ITEMS), metavar="ITEM", help="these items"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 ... or cpu")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--item", choices=list(ITEMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.item:
        run_item(args.item, Place(args.device, args.tiny, args.folder))
        return
    metrics, failed = dict[str, float](), False
    for name in args.only:
        found, error = attempt(name, args.device, args.tiny)
        metrics |= found
        write_json(args.json, metrics)
        print(f"{name}: {error or 'ok'}", flush=True)
        for key, value in found.items():
            print(f"  {key:40s} {value:12.5g}", flush=True)
        failed |= bool(error)
    sys.exit(failed)


if __name__ == "__main__":
    main()
