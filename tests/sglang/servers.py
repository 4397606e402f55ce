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

from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_weights import serialised
from areal_like.models.causal_lm import publishable, routers_of, state_of
from areal_like.types import Limits
from areal_like.weights.update import Update

torch.set_num_threads(1)
VOCAB = 70  # SGLang pads it to 128
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        tie_word_embeddings=False,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}
START_SECONDS = 240


def new_model(kind, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), attn_implementation="eager").eval()
    for parameter in model.parameters():  # biases and norms start at 0 and 1: a mix-up would not show
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def logprobs_of(model, prompt, response, temperature=1.0):
    """float32 [R]: from the model's own forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.as_tensor(response).long()[:, None])[:, 0].numpy()


def assert_sampled_by(models, prompts, done):
    """Each run of tokens has the logprobs of its version's model, and some completions got new weights in flight."""
    assert any(len(completion.runs) > 1 for completion in done)
    for prompt, completion in zip(prompts, done, strict=True):
        at = 0
        for version, count in completion.runs:
            expected = logprobs_of(models[version], prompt, completion.tokens)
            assert np.abs(completion.logprobs - expected)[at : at + count].max() < 1e-3
            at += count


def experts_of(model, tokens):
    """Those that the model's own forward chooses at all positions but the last: [T - 1, layers, k], sorted."""
    found = []
    hooks = [router.register_forward_hook(lambda m, i, o: found.append(o[2])) for *_, router in routers_of(model)]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(found, 1)[:-1].numpy(), -1)


def greedy_of(model, prompt, count):
    ids = torch.as_tensor(np.asarray(prompt, np.int64))[None]
    done = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return done[0, len(prompt) :].tolist()


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


class Published:
    """A model that changes a little with each version, as bits and as the learner's own weights."""

    def __init__(self, kind):
        self.model = new_model(kind)
        publishable(self.model)
        self.version = 0
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
        state = state_of(self.model)
        return Update(self.version, state.digest(), state)

    def frozen(self):
        """A copy of the model as it is now."""
        return copy.deepcopy(self.model)


def engine_for(published, folder, loaders=(), **knobs):
    """`loaders`: further custom loaders of its servers (`falsifying`)."""
    engine = SglangEngine(
        published.model, folder, **{"device": "cpu", "slots": 32, "start_timeout": START_SECONDS, **knobs}
    )
    engine.digest = state_of(published.model).digest()
    for server in engine._servers:
        at = server.arguments.index("--custom-weight-loader") + 2
        server.arguments[at:at] = loaders
    return engine


async def falsify(server, load_format):
    """Have a loader of `falsifying` do its work in a server."""
    body = {"serialized_named_tensors": serialised([("none", torch.zeros(1))], server.ranks)}
    await server.post("/begin_weight_update", {})
    await server.post("/update_weights_from_tensor", body | {"load_format": load_format, "flush_cache": False})
    await server.post("/end_weight_update", {})


@asynccontextmanager
async def serving(engine):
    """The engine under watch, with its servers ready; closed at the end."""
    watch = asyncio.create_task(engine.watch())
    try:
        ready = asyncio.gather(*(server.ready.wait() for server in engine._servers))
        await asyncio.wait([watch, ready], return_when=asyncio.FIRST_COMPLETED, timeout=START_SECONDS)
        if watch.done():
            watch.result()
        assert ready.done(), "the server was not ready in time"
        yield engine
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await engine.close()


async def slow_down(engine, seconds):
    """Make every forward pass of the servers slower, so that updates arrive during passes."""
    for server in engine._servers:
        await server.post("/slow_down", {"forward_sleep_time": seconds or None})


async def generate(engine, prompt, count=12, temperature=1.0, stop=(), request="", key=0):
    return await engine.generate(prompt, Limits(count, temperature, tuple(stop), key), request)
