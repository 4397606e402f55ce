"""Tiny random models in real SGLang servers on the CPU, and transformers' logprobs of the same weights.

Who imports this is skipped where SGLang is not installed.
"""

import asyncio
import copy
import importlib.util
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (scripts/setup_sglang_cpu.sh)", allow_module_level=True)

from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from actors.engines.sglang_engine import SglangEngine
from areal_like.models.causal_lm import publishable, state_of
from areal_like.types import Limits
from areal_like.weights.replica import Update
from tests.actors.tiny_models import SHAPE as SMALL
from tests.actors.tiny_models import logprobs_of, made

VOCAB = 70  # SGLang pads it to 128
SHAPE = SMALL | {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.15}
SHAPE |= {"max_position_embeddings": 1024}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, tie_word_embeddings=False, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}  # fmt: skip
START_SECONDS = 240


def assert_sampled_by(models, prompt, completion):
    """Each run of tokens has the logprobs of its version's model."""
    at = 0
    for version, count in completion.runs:
        expected = logprobs_of(models[version], prompt, completion.tokens)
        assert np.abs(completion.logprobs - expected)[at : at + count].max() < 1e-3, (version, at, count)
        at += count
    assert at == len(completion.tokens)


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


class Published:
    """A model that changes a little with each version, as bits and as the learner's own weights; `models` has a copy
    of each published version."""

    def __init__(self, kind):
        self.model = made(CONFIGS[kind], 0)
        publishable(self.model)
        self.version, self.models = 0, {}
        self._random = torch.Generator().manual_seed(1)

    def step(self, share=0.02):
        """Change about this share of all elements; returns the update."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                hit = torch.rand(parameter.shape, generator=self._random) < share
                parameter[hit] *= 1.05
        publishable(self.model)
        self.version += 1
        return self.update()

    def update(self):
        self.models[self.version] = copy.deepcopy(self.model)
        state = state_of(self.model)
        return Update(self.version, state.digest(), state)


def engine_for(published, folder, **knobs):
    engine = SglangEngine(
        published.model, folder, **{"device": "cpu", "slots": 32, "start_timeout": START_SECONDS, **knobs}
    )
    engine.digest = state_of(published.model).digest()
    return engine


@asynccontextmanager
async def serving(engine, published):
    """The engine under watch, with its servers ready and loaded; closed at the end."""
    watch = asyncio.create_task(engine.watch())
    try:
        ready = asyncio.gather(*(server.ready.wait() for server in engine._servers))
        await asyncio.wait([watch, ready], return_when=asyncio.FIRST_COMPLETED, timeout=START_SECONDS)
        if watch.done():
            watch.result()
        assert ready.done(), "the server was not ready in time"
        await engine.load(published.update())
        yield engine
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await engine.close()


@asynccontextmanager
async def slowed(engine, seconds):
    """Make every forward pass of the servers slower, so that updates arrive during passes."""
    for server in engine._servers:
        await server.post("/slow_down", {"forward_sleep_time": seconds})
    yield
    for server in engine._servers:
        await server.post("/slow_down", {"forward_sleep_time": None})


class Bench:
    """A running engine, the model that it serves, and the event loop of both."""

    def __init__(self, runner, engine, published):
        self.run, self.engine, self.published = runner.run, engine, published


def bench_for(kind, folder, **knobs):
    """A generator for a fixture: yields a `Bench`."""
    published = Published(kind)
    with asyncio.Runner() as runner:

        async def begin():
            engine = engine_for(published, folder, **knobs)
            stack = serving(engine, published)
            await stack.__aenter__()
            return engine, stack

        engine, stack = runner.run(begin())
        try:
            yield Bench(runner, engine, published)
        finally:
            runner.run(stack.__aexit__(None, None, None))


async def generate(engine, prompt, count=12, temperature=1.0, stop=(), request="", key=0):
    return await engine.generate(prompt, Limits(count, temperature, tuple(stop), key), request)
