"""Tiny random models of several architectures, and what transformers computes for them."""

import asyncio
import copy

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen2Config, Qwen3Config

from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import routers_of, state_of
from areal_like.weights.replica import Update
from tests.seeds import seeded, shifted

torch.set_num_threads(1)  # as in an actor; more threads only get in one another's way at this size
VOCAB = 37
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}, attention_bias=False),
    "qwen3": Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}, head_dim=16),
    # Known to no fused decoder: biases everywhere, and scaled logits.
    "llama with biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "granite": GraniteConfig(**SHAPE, logits_scaling=2.0, residual_multiplier=0.5),
}
FUSED = ("qwen2", "llama", "qwen3")


def new_model(kind="qwen2", seed=0):
    return made(CONFIGS[kind], shifted(seed))


def made(config, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for parameter in model.parameters():  # biases and norms start at 0 and 1: a mix-up would not show
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(tokens, np.int64))[None]).logits[0]


def logprobs_of(model, prompt, response, temperature=1.0):
    """float32 [R]: from the model's own forward."""
    logits = logits_of(model, [*prompt, *response])[len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.as_tensor(response).long()[:, None])[:, 0].numpy()


def greedy_of(model, prompt, count):
    ids = torch.as_tensor(np.asarray(prompt, np.int64))[None]
    done = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return done[0, len(prompt) :].numpy()


def experts_of(model, tokens):
    """Those that the model's own forward chooses at all positions but the last: [T - 1, layers, k], sorted."""
    found = []
    hooks = [router.register_forward_hook(lambda m, i, o: found.append(o[2])) for *_, router in routers_of(model)]
    logits_of(model, tokens)
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(found, 1)[:-1].numpy(), -1)


def prompts_of(*lengths):
    rng = seeded(0)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def update_of(model, version):
    state = state_of(model, "float32")
    return Update(version, state.digest(), state)


def sampled(model, prompts, limits, *, late=0, meanwhile=None, **knobs):
    """An engine's completions of prompts, of which each comes `late` steps after the one before, and its statistics.
    `meanwhile`: async, called with the engine once all run."""

    async def main():
        engine = TorchEngine(copy.deepcopy(model), **knobs)

        async def one(place):
            await steps(late * place)
            return await engine.generate(prompts[place], limits[place], str(place))

        tasks = [asyncio.create_task(one(place)) for place in range(len(prompts))]
        if meanwhile:
            while engine.stats()["tokens"] < 4 * len(tasks):
                await asyncio.sleep(0)
            await meanwhile(engine)
        done = await asyncio.gather(*tasks)
        stats = engine.stats()
        await engine.close()
        return done, stats

    return asyncio.run(main())


async def steps(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def started(engine, *calls):
    """The tasks of the calls, after a few decode steps."""
    tasks = [asyncio.create_task(call) for call in calls]
    while engine.stats()["tokens"] < 4 * len(tasks):
        await asyncio.sleep(0)
    return tasks
