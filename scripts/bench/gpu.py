"""Train step, decoding, weight updates and whole runs on one GPU: `python -m scripts.bench.gpu [--json FILE]`.

Each item runs in a process of its own with a time limit; figures before a failure count. FILE is written after every
item; a table compares with the bars. Exit code 1 if an item has failed. Models have random weights, and the shapes of
Qwen2.5; metrics of `train`, `decode` and `step_over_trl` end in the size, but for `decode` at 0.5b.

correct     `gradient_error` of the device against the CPU, `logprob_error` of the engine against a forward pass; two
            equal train steps of the default recipe give the same bits
train       PPO-clip, 64 samples of log-normal lengths, as many layers as fit: `train_tokens_per_second`, `train_mfu`
            (FLOPs as in PaLM, arXiv 2204.02311, appendix B; recomputation does not count)
step_over_trl  seconds of TRL's step (its best micro-batch, Liger's kernels where installed) over ours
decode      64, 256 and 512 sequences: `engine_tokens_per_second_COUNT`, `engine_over_generate` (transformers' compiled
            cache; 64)
update      12 of 1 % of the elements beside 8 sequences: `update_seconds` (median, cast to applied), `publish_limit`
            (over the bare operations on the device), `held_up_ms` (the learner), `pause_p50_ms`, `pause_p99_ms`
one_card    `configs/bench/one_card.yaml`, trained samples per second with η = 2 over sync: `async_over_sync`
timeline    at SmolLM2's shape: shares of time, `ROLE_ACTIVITY`, `ROLE_waits`, `all_waits`, and nvidia-smi's `gpu_busy`
checkpoint_stall  the same at 1.5B: the share of its time that a checkpoint every 4 steps costs
learn       SmolLM2 (`--model`; examples/smollm2): `learn_seconds` to 0.95 on one-digit sums, `mismatch_kl`
"""

import argparse
import asyncio
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from shutil import which
from statistics import median
from typing import Any

from .figures import bench_parser

if __name__ == "__main__":  # first: `--help` needs none of the imports below
    NAMES = [f"{item}_{size}" for item in ("train", "decode") for size in ("0.5b", "1.5b", "7b")]
    NAMES = ["correct", *NAMES, "update", "one_card", "timeline", "checkpoint_stall", "learn"]
    NAMES += [f"step_over_trl_{size}" for size in ("0.5b", "1.5b")]
    parser = bench_parser("gpu", __doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="ITEM", help="these items")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 ... or cpu")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="SmolLM2's, for `learn`")
    parser.add_argument("--item", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    ARGUMENTS = parser.parse_args()

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engines.torch_engine import TorchEngine
from actors.subscriber import Subscriber
from areal_like.launch.forks import Forked
from areal_like.launch.group import environment
from areal_like.models.causal_lm import publishable, qwen2, read_state, state_of
from areal_like.run.run_folder import SUMMARY
from areal_like.run.spans import Spans
from areal_like.types import Batch, Limits
from areal_like.weights.device import state_on
from areal_like.weights.state import TensorSpec
from areal_like.weights.transfer import to_device, to_host
from areal_like.wire.messages import Manifest
from examples.smollm2 import make_sums
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from learners.publication import Coding, Publisher

from .. import timeline as timelines
from ..console.output import write_json
from ..starting.estimate import Sizes
from .engine import run_engine, run_generate
from .figures import SIGMA, random_batch, tell, trained
from .learner import run_trl
from .trl import clock

Metrics = Iterator[dict[str, float]]
LEARNER_BYTES = 24
"""Per parameter on one rank, at most: weights, masters, gradients, Adam's moments."""
PROMPT, MEDIAN, PREFIX, RESPONSE = 64, 512, 128, 256
"""Tokens of a trained prompt, and of the median answer; of a prompt in `decode`, and of its answer."""
PEAKS = {"A100": 312e12, "H20": 148e12, "H100": 989e12, "H800": 989e12, "H200": 989e12, "B200": 2250e12}
"""FLOP/s in dense bfloat16, from NVIDIA's data sheets (SXM modules)."""
CLOSE = 1e-3
"""Most relative error of float32."""
COMMON = {"vocab_size": 151_936, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SIZES: dict[str, dict[str, Any]] = {
    "0.5b": COMMON | dict(zip(SHAPE, (896, 24, 14, 4864), strict=True)),
    "1.5b": COMMON | dict(zip(SHAPE, (1536, 28, 12, 8960), strict=True)),
    "135m": dict(zip(SHAPE, (576, 30, 9, 1536), strict=True)) | {"vocab_size": 49_152, "num_key_value_heads": 3},
    "7b": COMMON
    | dict(zip(SHAPE, (3584, 28, 28, 18_944), strict=True))
    | {"vocab_size": 152_064, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tiny": dict(zip(SHAPE, (64, 2, 4, 128), strict=True)) | {"vocab_size": 512, "num_key_value_heads": 2},
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item runs: device, whether with shapes for a CPU, a folder for what it writes, and SmolLM2's."""

    device: str
    tiny: bool
    folder: Path
    model: Path | None = None

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    def shape(self, size: str) -> dict[str, Any]:
        return SIZES["tiny" if self.tiny else size]

    def seconds(self, call: Callable[[], Any], warm_up: bool = False) -> float:
        """Until the device is done. `warm_up`: a first call, which captures graphs and compiles, does not count."""
        if warm_up:
            call()
        begin = clock()
        call()
        return clock() - begin


def new_model(place: Place, size: str, **other: Any) -> PreTrainedModel:
    """Random weights, made on the device: a CPU would take minutes."""
    with torch.device(place.device):
        return qwen2(0, **(place.shape(size) | other)).eval()


def new_learner(place: Place, model: PreTrainedModel, **knobs: Any) -> TorchLearner:
    knobs = {"compute_dtype": "bfloat16" if place.gpu else "float32", "lr": 1e-6, "num_minibatches": 1} | knobs
    return TorchLearner(model, ppo, group, device="cuda" if place.gpu else "cpu", **knobs)


def made_batch(vocabulary: int, groups: int, longest: int) -> Batch:
    """Groups of 4 or 8 samples with log-normal lengths."""
    drawn = MEDIAN * np.exp(SIGMA * np.random.default_rng(0).standard_normal((groups, min(8, 2 * groups))))
    return random_batch(np.clip(drawn, 1, longest).astype(int), PROMPT, vocabulary)


def correct(place: Place) -> Metrics:
    """Raises ArithmeticError if the device computes something else than the CPU."""

    def gradient(place: Place, longest: int, **knobs: Any) -> torch.Tensor:
        learner = new_learner(place, small_model(), **knobs)
        learner.train(made_batch(512, 4, longest))
        return learner.optimizer.gradient.double().cpu()

    exact, found = (gradient(each, 24, compute_dtype="float32") for each in (Place("cpu", True, place.folder), place))
    error = float((found - exact).abs().max() / exact.abs().max())
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
    if not torch.equal(*(gradient(place, 48 if place.tiny else 2048) for _ in range(2))):
        raise ArithmeticError("two equal train steps give different gradients")
    if max(error, worst) > CLOSE:
        raise ArithmeticError(f"gradient_error {error:.2g}, logprob_error {worst:.2g}: above {CLOSE:g}")


def small_model() -> PreTrainedModel:
    """On the CPU, with weights large enough for logprobs that differ."""
    return qwen2(0, **SIZES["tiny"], initializer_range=0.1).eval()


@torch.no_grad()
def off(model: Any, prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> float:
    """Largest difference of the engine's logprobs [T] from those of a forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None].to(model.device)
    truth = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    found = truth.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
    return float(np.abs(found - logprobs).max())


# Train step


def train(place: Place, size: str) -> Metrics:
    model, batch = trained_here(place, size)
    work, took = flops(model, batch), step_seconds(place, model, batch)
    yield {f"train_tokens_per_second_{size}": sum(len(sample.tokens) for sample in batch.samples) / took}
    name = torch.cuda.get_device_name() if place.gpu else "cpu"
    if peak := next((peak for known, peak in PEAKS.items() if known in name), None):
        yield {f"train_mfu_{size}": work / took / peak}


def trained_here(place: Place, size: str) -> tuple[PreTrainedModel, Batch]:
    model = new_model(place, size, num_hidden_layers=layers_that_fit(place, size))
    return model, made_batch(model.config.vocab_size, *((2, 64) if place.tiny else (8, 4096)))


def step_seconds(place: Place, model: PreTrainedModel, batch: Batch) -> float:
    """Of our train step: the median, without the first, which measures the memory and compiles."""
    learner = new_learner(place, model)
    return median([place.seconds(lambda: learner.train(batch)) for _ in range(2 if place.tiny else 6)][1:])


def step_over_trl(place: Place, size: str) -> Metrics:
    if not find_spec("trl"):
        print("| TRL is not installed")
        return
    ours, best = step_seconds(place, *trained_here(place, size)), math.inf
    torch.use_deterministic_algorithms(False)  # ours are
    kernels = [True, False] if place.gpu and find_spec("liger_kernel") else [False]
    for liger, count in product(kernels, (2, 4) if place.tiny else (4, 8, 16)):
        gc.collect()
        torch.cuda.empty_cache()
        how: dict[str, Any] = {"use_cpu": not place.gpu, "bf16": place.gpu, "use_liger_kernel": liger}
        try:
            best = min(best, *run_trl(*trained_here(place, size), count, 1 if place.tiny else 3, **how)[1:])
            yield {f"step_over_trl_{size}": best / ours}
        except Exception as error:  # it does not fit, or Liger does not know this GPU
            print(f"| TRL, micro-batch {count}, Liger {liger}: {type(error).__name__}: {str(error)[:200]}")


def layers_that_fit(place: Place, size: str) -> int:
    """All layers, or as many as leave half of the card to activations."""
    with torch.device("meta"):
        sizes = Sizes(qwen2(0, **place.shape(size)))
    memory = torch.cuda.get_device_properties(0).total_memory if place.gpu else math.inf
    return int(max(1, min(sizes.layers, (memory / 2 / LEARNER_BYTES - sizes.outside) // sizes.layer)))


def flops(model: PreTrainedModel, batch: Batch) -> float:
    """Of forward and backward of one train step, each sample by itself, the head for trained tokens."""
    config, head = model.config, model.get_output_embeddings().weight
    embedding = {id(model.get_input_embeddings().weight), id(head)}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in embedding)
    lengths = np.array([len(sample.tokens) for sample in batch.samples], np.float64)
    trained_tokens = sum(int(sample.loss_mask.sum()) for sample in batch.samples)
    attention = 6 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 6.0 * weights * float(lengths.sum()) + 6.0 * head.numel() * trained_tokens + attention


# Decoding


def decode(place: Place, size: str) -> Metrics:
    suffix, rates = "" if size == "0.5b" else f"_{size}", {}
    asyncio.set_event_loop(asyncio.new_event_loop())
    counts, response, prefix = ((2, 4), 8, 16) if place.tiny else ((64, 256, 512), RESPONSE, PREFIX)
    prompts = np.random.default_rng(0).integers(0, 512, (max(counts), prefix)).astype(np.int32)
    model = new_model(place, size)
    engine = TorchEngine(model, slots=max(counts), device=place.device, kv_tokens=max(counts) * 512)
    for count in counts:
        decoded = partial(run_engine, engine, prompts[:count], np.full(count, response))
        rates[count] = count * response / place.seconds(decoded, warm_up=True)
        yield {f"engine_tokens_per_second_{count}{suffix}": rates[count]}
    del engine, model, decoded  # frees their memory
    reference = new_model(place, size).to(torch.bfloat16 if place.gpu else torch.float32)
    generate = partial(run_generate, reference, prompts[: counts[0]], np.full(counts[0], response))
    how = {"cache_implementation": "static", "disable_compile": not place.gpu}
    rate = counts[0] * response / place.seconds(partial(generate, **how), warm_up=True)
    yield {f"engine_over_generate{suffix}": rates[counts[0]] / rate}


# Weight updates


def update(place: Place) -> Metrics:
    yield asyncio.run(_updates(place))


async def _updates(place: Place) -> dict[str, float]:
    model = new_model(place, "0.5b")
    state = publishable(model)
    master = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = TorchEngine(model, slots=8, kv_policy="keep", device=place.device, kv_tokens=8 * 1024)
    engine.digest = state.digest()
    made = SimpleQueue[Manifest]()
    publisher = Publisher("tcp://127.0.0.1:0", Coding(), made.put)
    subscriber = Subscriber(engine, "bench", lambda *_: None, state=state)
    writers = [asyncio.create_task(_write(engine, number)) for number in range(8)]
    while engine.stats()["tokens"] < 80:
        await asyncio.sleep(0)
    seconds, pauses, held_up = [], [], []
    for version in range(4 if place.tiny else 13):
        if version:
            await asyncio.to_thread(_change, place, master, 0.01)
        before, began = engine.stats(), time.perf_counter()
        await asyncio.to_thread(publisher.publish, version, partial(_cast, master))
        published = time.perf_counter()
        manifest = await asyncio.to_thread(made.get)
        await subscriber.apply(manifest)
        if not version:
            continue
        seconds.append(time.perf_counter() - began)
        held_up.append(1e3 * (published - began))
        while engine.stats()["pauses"] == before["pauses"]:
            await asyncio.sleep(0)
        pauses.append(engine.stats()["pause_seconds"] - before["pause_seconds"])
    for each in writers:
        each.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    if state_of(model).digest() != manifest.digest:
        raise ArithmeticError("the engine's weights are not the published ones")
    await engine.close()
    subscriber.close()
    publisher.close()
    found = {f"pause_p{p}_ms": 1e3 * float(np.percentile(pauses, p)) for p in (50, 99)}
    limit = _bare_update(place, state.nbytes // 2)
    took = median(seconds)
    return found | {"update_seconds": took, "publish_limit": took / limit, "held_up_ms": median(held_up)}


def _bare_update(place: Place, count: int) -> float:
    """Seconds to find 1 % of changed numbers on the device, bring gaps and values to the host and back, and write."""
    old, new, target = torch.zeros(3, count, dtype=torch.int16, device=place.device)
    new[::100] = 1

    def once() -> None:
        places = (old != new).nonzero().view(-1)
        (gaps, values), arrived = to_host([places.diff(prepend=places.new_zeros(1)).byte(), new[places]])
        if arrived:
            arrived.synchronize()
        there = to_device(gaps, target.device).long().cumsum(0)
        target.index_copy_(0, there, to_device(values, target.device))

    return min(place.seconds(once) for _ in range(6))


def _cast(master: dict[str, Any], into: Any = None, done: Any = None) -> Any:
    """The learner's cast of weights into published bits, on the device where it has those."""
    specs = [TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in master.items()]
    state: Any = into or state_on(next(iter(master.values())).device, specs, 0, 1)
    state.write(master, done) if state.in_place else read_state(master, state, done)
    return state


def _change(place: Place, master: dict[str, Any], density: float) -> None:
    """Move about this share of the elements by one step of bfloat16."""
    for tensor in master.values():
        bits = tensor.view(torch.int32)
        bits += (torch.rand(tensor.shape, device=tensor.device) < density).to(torch.int32) << 16
    if place.gpu:  # the whole device can't be waited for while the engine captures a graph
        torch.cuda.current_stream().synchronize()


async def _write(engine: TorchEngine, number: int) -> None:
    prompt = np.arange(16, dtype=np.int32) + number
    while (await engine.generate(prompt, Limits(200 + 5 * number, key=number), str(number))).finish != "abort":
        pass


# The whole loop on one card


def card_run(place: Place, name: str, size: str, *words: str) -> float:
    """Trained samples per second of a run of `configs/bench/one_card.yaml`, in the folder `name`, with a model of this
    size; its first steps do not count."""
    knobs = {knob: value for knob, value in place.shape(size).items() if knob != "vocab_size"}
    groups, steps = (2, 4) if place.tiny else (16, 16)
    given = ["configs/bench/one_card.yaml", "gpu=1x" if place.gpu else "gpu=none", f"run.steps={steps}"]
    given += [f"model.{knob}={json.dumps(value)}" for knob, value in knobs.items()]
    given += ["task.length_trace={median: 8, sigma: 1.0, max: 32}"] * place.tiny
    rows = trained(place.folder / name, [*given, f"groups_per_batch={groups}", *words])
    first = rows[steps // 4]
    return 8 * groups * (steps - first["step"]) / (rows[-1]["seconds"] - first["seconds"])


def one_card(place: Place) -> Metrics:
    rates = {}
    for name, mode in {"sync": "mode=sync", "async": "scheduler.max_staleness=2"}.items():
        rates[name] = card_run(place, name, "0.5b", mode)
        yield {f"{name}_samples_per_second": rates[name]}
    yield {"async_over_sync": rates["async"] / rates["sync"]}


def checkpoint_stall(place: Place) -> Metrics:
    every = (0, 1 if place.tiny else 4)
    without, with_them = (card_run(place, str(steps), "1.5b", f"checkpoint.every={steps}") for steps in every)
    yield {"checkpoint_stall": 1 - with_them / without}


def timeline(place: Place) -> Metrics:
    run, log = place.folder / "run", place.folder / "nvidia-smi"
    words = ["--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200"]
    with log.open("wb") as file:
        smi = subprocess.Popen(["nvidia-smi", *words], stdout=file) if place.gpu and which("nvidia-smi") else None
        card_run(place, run.name, "135m")
        if smi:
            smi.kill()
    spans = Spans(run, "gpu", since_1970=0.0)
    for at, _, share in (line.partition(", ") for line in log.read_text("ascii").splitlines()):
        if share.isdigit():  # percent of 200 ms
            end = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            spans.add("busy", end - 0.002 * int(share), end)
    steps = [span.begin for span in timelines.timeline(run)["learner"] if span.name == "train"]
    for role, found in timelines.timeline(run, steps[-2], steps[-1]).items():
        for span in found:
            print(f"| {role:10s} {span.name:10s} {span.begin:9.3f} to {span.end:9.3f} s")
    roles = timelines.timeline(run, steps[1], steps[-1])
    worked = (span for role, found in roles.items() if role != "gpu" for span in found)
    roles["all"] = sorted(worked, key=lambda span: span.begin)
    shares = timelines.shares(roles)
    yield {"all_waits": shares.pop("all")[timelines.WAITS]}
    yield {f"{role}_{name}": share for role, row in shares.items() for name, share in row.items()}


def learn(place: Place) -> Metrics:
    words = ["configs/quickstart.yaml", "run.steps=2"]
    if place.model:
        make_sums.write(place.folder / "sums")
        words = ["configs/smollm2/one-digit.yaml", "gpu=1x" if place.gpu else "gpu=none"]
        for key, split in {"path": "train", "heldout_path": "heldout"}.items():
            words.append(f"task.{key}={place.folder}/sums/one-digit-{split}.jsonl")
        words += [f"model.path={place.model.absolute()}", "run.target_reward=0.95"]
    elif not place.tiny:
        print("| no model: see --model")
        return
    run = place.folder / "learn"
    yield {"mismatch_kl": median(row["mismatch_kl"] for row in trained(run, words) if "mismatch_kl" in row)}
    evaluations = json.loads((run / SUMMARY).read_bytes())["evaluations"]
    yield {"learn_seconds": min(each["seconds"] for each in evaluations if each["reward"] >= 0.95 * bool(place.model))}


# Items, each in its own process

ITEMS: dict[str, tuple[float, Callable[[Place], Metrics]]] = {
    "correct": (120, correct),
    **{f"train_{size}": (180, partial(train, size=size)) for size in ("0.5b", "1.5b", "7b")},
    **{f"decode_{size}": (240, partial(decode, size=size)) for size in ("0.5b", "1.5b", "7b")},
    "update": (120, update),
    "one_card": (300, one_card),
    "timeline": (120, timeline),
    "checkpoint_stall": (300, checkpoint_stall),
    "learn": (180, learn),
    **{f"step_over_trl_{size}": (300, partial(step_over_trl, size=size)) for size in ("0.5b", "1.5b")},
}
"""Item → seconds that it may take, what runs it."""
AT_LEAST = (
    {"train_mfu_0.5b": 0.33, "train_mfu_1.5b": 0.5, "train_mfu_7b": 0.55}
    | {"step_over_trl_0.5b": 2.7, "step_over_trl_1.5b": 3.0, "async_over_sync": 1.9, "engine_over_generate": 3.0}
    | {f"engine_tokens_per_second_{name}": rate for name, rate in {"64": 40e3, "256": 100e3, "64_7b": 10.5e3}.items()}
)
AT_MOST = (
    {"update_seconds": 0.06, "pause_p50_ms": 5.0, "held_up_ms": 10.0, "checkpoint_stall": 0.02}
    | {"learn_seconds": 4.0, "mismatch_kl": 4e-4, "learner_estimate_error": 0.1, "engine_estimate_error": 0.1}
)  # fmt: skip
"""Bars on one H200. No item has the dry run's errors of memory (`*_estimate_error`)."""


def judged(metrics: dict[str, float]) -> Iterator[str]:
    """A line for each bar: where the figure stands."""
    for name, bar in {**AT_LEAST, **AT_MOST}.items():
        found, sign = metrics.get(name, math.nan), 1 if name in AT_LEAST else -1
        verdict = f"measured {found:.3g}: {'met' if sign * found >= sign * bar else 'missed'}"
        yield f"{name:35s} bar {bar:7g}, {'not measured' if math.isnan(found) else verdict}"


def run_item(name: str, place: Place) -> None:
    """In this process: each finding is a line of JSON in the place's folder."""
    if place.gpu:
        torch.cuda.set_device(torch.device(place.device).index or 0)
    with (place.folder / "found").open("a", buffering=1, encoding="utf-8") as file:
        for found in ITEMS[name][1](place):
            file.write(json.dumps(found) + "\n")


def attempt(name: str, args: argparse.Namespace) -> tuple[dict[str, float], str, list[str]]:
    """An item in a process of its own: what it found, its error ("" if it ended well), and lines for the user."""
    words, variables = ["--item", name, "--device", args.device], environment(len(os.sched_getaffinity(0)))
    words += ["--tiny"] * args.tiny + (["--model", str(args.model)] if args.model else [])
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as made:
        found, log, error = Path(made) / "found", Path(made) / "log", ""
        found.touch()
        process = Forked("scripts.bench.gpu", [*words, "--folder", made], variables, log)
        try:
            if code := process.wait(ITEMS[name][0]):
                error = f"exit code {code}"
        except subprocess.TimeoutExpired:
            error = f"not done in {ITEMS[name][0]:.0f} s"
        process.end(signal.SIGKILL)  # with the processes that it has started
        process.wait()
        lines = found.read_text(encoding="utf-8").splitlines()
        metrics = {name: figure for line in lines for name, figure in json.loads(line).items()}
        said = log.read_text(errors="replace", encoding="utf-8")
        shown = [line for line in said.splitlines() if line.startswith("| ")]
        return metrics, error and f"{error}\n{said[-2000:]}", shown


def main(args: argparse.Namespace) -> None:
    if args.item:
        run_item(args.item, Place(args.device, args.tiny, args.folder, args.model))
        return
    metrics, failed = dict[str, float](), False
    for name in args.only:
        found, error, shown = attempt(name, args)
        metrics |= found
        print(f"{name}: {error or 'ok'}", *shown, sep="\n", flush=True)
        tell(found, None)
        write_json(args.json, metrics)
        failed |= bool(error)
    print("", *judged(metrics), sep="\n")
    sys.exit(failed)


if __name__ == "__main__":
    main(ARGUMENTS)
