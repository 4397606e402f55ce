"""What must be right on a GPU before any figure counts; each check is an item of `scripts.bench.gpu`.

An item yields its findings as it gets them, and raises Wrong at its end if one is out of bounds. Part of that command.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from actors.engines.sampler import keyed_uniforms
from actors.engines.torch_engine import TorchEngine
from areal_like.config.registry import COMPONENTS, resolve
from areal_like.models.causal_lm import publishable, state_of
from areal_like.sampling import uniforms
from areal_like.types import Batch, Completion, Limits
from areal_like.weights.codec import Encoder, Lanes
from areal_like.weights.delta import DeltaHead, advance, read, write
from areal_like.weights.digest import text_of
from areal_like.weights.layout import Layout as WeightLayout
from areal_like.weights.planes import pack
from areal_like.weights.state import State
from areal_like.weights.update import Changes, Update
from learners import varlen
from learners.advantages import group
from learners.attention import packed_attention
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from learners.losses.contract import LossBatch, planned_for
from learners.row_layout import RowLayout

from .delta import changed
from .gpu_shapes import Place, made_batch, small_model

Findings = Iterator[dict[str, float | str]]
CLOSE, ROUNDED = 1e-3, 5e-2
"""Relative error of float32 and of bfloat16."""


class Wrong(Exception):
    """A finding is out of bounds."""


class Bounds:
    """Collects what is out of bounds, so that an item looks at everything before it fails."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def most(self, name: str, value: float, bound: float) -> dict[str, float | str]:
        if not value <= bound:
            self.broken.append(f"{name}={value:.3g} is above {bound:g}")
        return {name: value}

    def true(self, name: str, value: bool) -> dict[str, float | str]:
        if not value:
            self.broken.append(f"{name} is false")
        return {name: float(value)}

    def end(self) -> None:
        if self.broken:
            raise Wrong("; ".join(self.broken))


def _off(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    found, truth = found.detach().double().cpu(), truth.detach().double().cpu()
    return float((found - truth).abs().max() / truth.abs().max().clamp(min=1e-30))


# Losses and advantages


def losses(place: Place) -> Findings:
    """Every loss: value and gradient on the device against the CPU."""
    bounds = Bounds()
    for name in COMPONENTS["loss"]:
        truth, found = (_loss_gradient(resolve("loss", name), device) for device in ("cpu", place.device))
        yield bounds.most(f"{name}_error", max(_off(a, b) for a, b in zip(found, truth, strict=True)), CLOSE)
    bounds.end()


def _loss_gradient(loss: Any, device: str, tokens: int = 3000) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1)
    behaviour = -rng.exponential(1.5, tokens)
    proximal = behaviour + rng.normal(0, 0.3, tokens)
    sequence = np.arange(tokens) // 20
    columns = {
        "current": proximal + rng.normal(0, 0.3, tokens),
        "behaviour": behaviour,
        "proximal": proximal,
        "advantages": rng.normal(0, 1, tokens)[sequence],
        "mask": rng.random(tokens) < 0.8,
        "sequence": sequence,
        "staleness": rng.integers(0, 4, tokens),
        "group": sequence // 2,
        "uniform": rng.random(tokens),
    }
    on_device = {name: torch.from_numpy(values).to(device) for name, values in columns.items()}
    batch = LossBatch(**{n: x.float() if x.is_floating_point() else x for n, x in on_device.items()})
    batch.current.requires_grad_()
    value, _ = loss(planned_for(loss, batch)[0], float(tokens))
    (gradient,) = torch.autograd.grad(value, batch.current)
    return value, gradient


def train_steps(place: Place) -> Findings:
    """A train step with every advantage and with every loss: the model's gradient on the device against the CPU."""
    bounds = Bounds()
    kinds = [("advantage", name) for name in COMPONENTS["advantage"] if name != "distill"]  # it needs a teacher
    kinds += [("loss", name) for name in COMPONENTS["loss"]]
    for kind, name in kinds:
        knobs: dict[str, Any] = {"critic_lr": 1e-4} if name == "gae" else {}
        chosen = resolve(kind, name)
        loss, advantage = (chosen, group) if kind == "loss" else (ppo, chosen)
        truth, found = (_gradient(place, device, loss, advantage, **knobs) for device in ("cpu", place.device))
        yield bounds.most(f"{kind}_{name}_error", _off(found, truth), CLOSE)
    bounds.end()


def _gradient(place: Place, device: str, loss: Any, advantage: Any, **knobs: Any) -> torch.Tensor:
    model = small_model(place, "cpu", hidden_size=32, intermediate_size=64, vocab_size=64)
    knobs |= {"lr": 1e-6, "num_minibatches": 1, "publish_dtype": "float32", "compute_dtype": "float32"}
    learner = TorchLearner(model, loss, advantage, device=_learner_device(device), **knobs)
    learner.train(_short_batch(64))
    return learner.optimizer.gradient.clone()


def _short_batch(vocab: int, index: int = 0) -> Batch:
    return made_batch(vocab, 4, 4, 24, index)


def _learner_device(device: str) -> Any:
    return "cpu" if device == "cpu" else "cuda"


# The learner's attention


def attention(place: Place) -> Findings:
    """Packed attention (on a GPU the varlen kernel) against one `scaled_dot_product_attention` per sequence."""
    bounds = Bounds()
    lengths = np.array([5, 17, 64, 3] if place.tiny else [5, 1000, 64, 333, 2048])
    dtype = torch.bfloat16 if place.gpu else torch.float32
    made = torch.Generator().manual_seed(0)
    shapes = [(1, heads, int(lengths.sum()), 64) for heads in (8, 2, 2)]
    inputs = [torch.randn(shape, generator=made).to(place.device, dtype).requires_grad_() for shape in shapes]
    layout = RowLayout.of(lengths, torch.device(place.device))
    query, key, value = inputs
    output, _ = packed_attention(torch.nn.Identity(), query, key, value, None, 0.125, layout=layout)
    wide = [each.detach().float().requires_grad_() for each in inputs]
    parts = zip(*(each.split(lengths.tolist(), 2) for each in wide), strict=True)
    truth = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125, enable_gqa=True) for q, k, v in parts]
    reference = torch.cat(truth, 2).transpose(1, 2)
    kernel = varlen.takes(query[0], dtype if place.gpu else None)
    yield bounds.true("kernel", kernel) if place.gpu else {"kernel": float(kernel)}
    bound = ROUNDED if place.gpu else CLOSE
    yield bounds.most("output_error", _off(output, reference), bound)
    weights = torch.randn(output.shape, generator=made).to(place.device)
    gradients = torch.autograd.grad((output.float() * weights).sum(), inputs)
    expected = torch.autograd.grad((reference * weights).sum(), wide)
    for name, one, other in zip("qkv", gradients, expected, strict=True):
        yield bounds.most(f"gradient_{name}_error", _off(one, other), bound)
    bounds.end()


def tree(place: Place) -> Findings:
    """The gradient of a train step in which samples share their prompts, against each sample by itself."""
    bounds = Bounds()
    for dtype, bound in {"float32": CLOSE, "bfloat16": 2 * ROUNDED}.items():
        found = []
        for shares in (True, False):
            with patch("learners.packing.is_worth", lambda *_, shares=shares: shares):
                model = small_model(place)
                knobs: dict[str, Any] = {"compute_dtype": dtype, "publish_dtype": "float32", "num_minibatches": 1}
                learner = TorchLearner(model, ppo, group, device=_learner_device(place.device), lr=1e-6, **knobs)
                computed = learner.train(_short_batch(model.config.vocab_size))["computed_tokens"]
                found.append((learner.optimizer.gradient.clone(), float(computed)))
        (shared, fewer), (plain, all_) = found
        yield bounds.most(f"{dtype}_error", _off(shared, plain), bound)
        yield bounds.true(f"{dtype}_shares", fewer < all_)
    bounds.end()


# The engine


def engine(place: Place) -> Findings:
    """The embedded engine: greedy tokens against transformers' `generate`, logprobs against its forward pass, graphs
    against eager steps, random numbers against the host's."""
    bounds = Bounds()
    rng = np.random.default_rng(0)
    keys, positions = rng.integers(0, 1 << 63, 9999).astype(np.uint64) * np.uint64(2), rng.integers(0, 1 << 20, 9999)
    made = keyed_uniforms(*(torch.from_numpy(x.view(np.int64)).to(place.device) for x in (keys, positions)))
    yield bounds.true("uniforms_equal", np.array_equal(made.cpu().numpy(), uniforms(keys, positions)))
    reference = small_model(place)
    count, vocab = 8 if place.tiny else 64, reference.config.vocab_size
    prompts = [rng.integers(0, vocab, n).astype(np.int32) for n in rng.integers(1, 40, 6 if place.tiny else 20)]
    greedy = [Limits(count, temperature=0.0)] * len(prompts)
    done, graphs = _completions(place, prompts, greedy, slots=5, compute_dtype="float32")
    expected = [_greedy(reference, prompt, count) for prompt in prompts]
    same = np.mean([np.mean(one.tokens == other) for one, other in zip(done, expected, strict=True)])
    yield bounds.most("greedy_differs", 1 - float(same), 0.01)
    yield bounds.most("float32_logprobs_error", _logprob_error(reference, prompts, done), CLOSE)
    if place.gpu:
        yield {"graphs": float(graphs)}
        yield bounds.true("captured", graphs > 0)
    sampled = [Limits(count, key=i) for i in range(len(prompts))]
    replayed, _ = _completions(place, prompts, sampled, slots=5)
    again, _ = _completions(place, prompts, sampled, slots=5)
    eager, _ = _completions(place, prompts, sampled, slots=5, captures=False)
    yield bounds.true("repeats", _same(replayed, again)) | bounds.true("graph_equals_eager", _same(replayed, eager))
    yield bounds.most("sampled_logprobs_error", _logprob_error(reference, prompts, replayed, mean=True), ROUNDED)
    bounds.end()


def _completions(
    place: Place, prompts: list[np.ndarray], limits: list[Limits], captures: bool = True, **knobs: Any
) -> tuple[list[Completion], int]:
    """Of a new engine, requests joining one after the other; and how many graphs it has captured."""

    async def sample_all() -> tuple[list[Completion], int]:
        engine = TorchEngine(small_model(place, "cpu"), device=place.device, memory=0.25, **knobs)
        if engine._static and not captures:
            engine._static._captures = False

        async def late(i: int) -> Completion:
            for _ in range(3 * i):
                await asyncio.sleep(0)
            return await engine.generate(prompts[i], limits[i])

        done = await asyncio.gather(*map(late, range(len(prompts))))
        await engine.close()
        return list(done), engine._static.captured if engine._static else 0

    return asyncio.run(sample_all())


def _same(some: list[Completion], others: list[Completion]) -> bool:
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(some, others, strict=True)
    )


def _greedy(model: Any, prompt: np.ndarray, count: int) -> np.ndarray:
    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
    how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].cpu().numpy()


@torch.no_grad()
def _logprob_error(model: Any, prompts: list[np.ndarray], done: list[Completion], mean: bool = False) -> float:
    """Largest (or mean) difference of the behaviour logprobs from those of the model's own forward pass."""
    found = []
    for prompt, each in zip(prompts, done, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, each.tokens]).astype(np.int64))[None].to(model.device)
        logprobs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        truth = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
        found.append(np.abs(truth - each.logprobs))
    every = np.concatenate(found)
    return float(every.mean() if mean else every.max())


# Weights


def delta(place: Place) -> Findings:
    """Deltas and whole weights into the engine's memory on the device: bit for bit, at the same addresses."""
    bounds = Bounds()
    asyncio.run(_deltas(place, bounds))
    yield {"densities": 3.0, "whole": 1.0}
    bounds.end()


async def _deltas(place: Place, bounds: Bounds) -> None:
    model, rng = small_model(place, "cpu"), np.random.default_rng(0)
    state = publishable(model)
    held = State(state.specs, state.buffer.copy())
    engine = TorchEngine(model, device=place.device, memory=0.25)
    engine.digest = state.digest()
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    layout = WeightLayout(state.specs, 1 << 20)
    lanes, told = Lanes(layout, state.words), Lanes(layout, state.words)
    for version, density in enumerate((0.001, 0.02, 0.5), 1):
        after, changes = changed(state, density, rng), Changes(engine.digest)
        encoder = Encoder(layout)
        blocks = [pack(encoder.encode(block, state.buffer, after.buffer, lanes)) for block in layout.blocks]
        digest = text_of(lanes.total(), after.words.size)
        found = read(memoryview(write(DeltaHead(version - 1, version, engine.digest, digest), layout, blocks)), layout)
        advance(found, layout, held, told)
        changes.add(found, layout)
        await engine.load(Update(version, digest, held, changes))
        bounds.true(f"exact_at_{density:g}", state_of(model).digest() == digest == after.digest())
        state = after
    whole = changed(state, 0.1, rng)
    await engine.load(Update(9, whole.digest(), whole))
    bounds.true("exact_whole", state_of(model).digest() == whole.digest())
    bounds.true("same_addresses", places == {name: p.data_ptr() for name, p in model.named_parameters()})
    await engine.close()


def replay(place: Place) -> Findings:
    """The same batches twice from the same weights: bit for bit with deterministic kernels; and with the usual ones."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before CUDA begins
    bounds = Bounds()
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)  # with `warn_only` flash attention stays as it is
        first, second = (_digests(place) for _ in range(2))
        name = "deterministic" if deterministic else "usual"
        yield bounds.true(f"{name}_equal", first == second) if deterministic else {f"{name}_equal": first == second}
    bounds.end()


def _digests(place: Place) -> list[str]:
    model = small_model(place)
    dtype: Any = "bfloat16" if place.gpu else "float32"
    learner = TorchLearner(model, ppo, group, lr=1e-4, device=_learner_device(place.device), compute_dtype=dtype)
    found = []
    for index in range(3):
        learner.train(_short_batch(model.config.vocab_size, index))
        found.append(learner.snapshot().digest())
    return found
