"""The embedded engine reports the experts that the routers chose in the forward passes that made the tokens."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from actors.engines import torch_engine
from actors.engines.slot_cache import PooledCache
from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import routers_of
from areal_like.types import Limits
from tests.actors.tiny_models import SHAPE, new_model, prompts_of, started, update_of
from tests.seeds import shifted

CONFIG = Qwen3MoeConfig(
    **SHAPE, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
)


@pytest.fixture(params=["usual", "static"])
def step(request, monkeypatch):
    """How an engine decodes: as on a CPU, and as on a GPU."""
    if request.param == "static":
        monkeypatch.setattr(torch_engine, "is_static", lambda device: True)
        monkeypatch.setattr(PooledCache, "LEAST", 16)
        monkeypatch.setattr("actors.engines.static_step.LEAST_TIME", 16)


def moe(seed=0):
    torch.manual_seed(shifted(seed))
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), attn_implementation="eager").eval()


def chosen(model, tokens):
    """What the model's own forward over all tokens but the last chooses: [T - 1, layers, k], sorted."""
    found = []
    hooks = [router.register_forward_hook(lambda m, i, o: found.append(o[2])) for *_, router in routers_of(model)]
    with torch.no_grad():
        model(torch.as_tensor(np.asarray(tokens, np.int64))[None])
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(found, 1)[:-1].numpy(), -1)


@pytest.mark.usefixtures("step")
def test_experts_are_those_of_the_models_own_forward():
    model = moe()
    plain, prompts = copy.deepcopy(model), prompts_of(5, 9, 1)
    prompts.append(prompts[1])

    async def main():
        engine = TorchEngine(model, slots=3, return_experts=True)
        limits = [Limits(6 + i, key=i, experts_from=i) for i in range(4)]
        limits[2] = Limits(8, key=2)
        done = await asyncio.gather(*(engine.generate(p, each) for p, each in zip(prompts, limits, strict=True)))
        heldout = await engine.generate(prompts[0], Limits(4, trained=False))
        await engine.close()
        return done, limits, heldout

    done, limits, heldout = asyncio.run(main())
    assert heldout.experts is None
    for prompt, each, asked in zip(prompts, done, limits, strict=True):
        expected = chosen(plain, np.concatenate([prompt, each.tokens]))[asked.experts_from :]
        assert each.experts.dtype == np.uint8 and each.experts.shape == expected.shape
        np.testing.assert_array_equal(np.sort(each.experts, -1), expected)


@pytest.mark.usefixtures("step")
def test_experts_of_preempted_sequences_are_whole():
    model = moe()
    plain, prompts = copy.deepcopy(model), prompts_of(6, 6, 6)

    async def main():
        engine = TorchEngine(model, slots=3, kv_tokens=50, return_experts=True)
        done = await asyncio.gather(*(engine.generate(p, Limits(20, key=i)) for i, p in enumerate(prompts)))
        assert engine.stats()["preemptions"] > 0
        await engine.close()
        return done

    for prompt, each in zip(prompts, asyncio.run(main()), strict=True):
        expected = chosen(plain, np.concatenate([prompt, each.tokens]))
        np.testing.assert_array_equal(np.sort(each.experts, -1), expected)


@pytest.mark.usefixtures("step")
def test_after_an_update_earlier_tokens_keep_the_experts_under_which_they_were_sampled():
    model, new = moe(), moe(seed=1)
    old, prompts = copy.deepcopy(model), prompts_of(4, 11, 11)
    prompts.append(prompts[1])

    async def main():
        engine = TorchEngine(model, return_experts=True)
        tasks = await started(engine, *(engine.generate(p, Limits(16, key=i)) for i, p in enumerate(prompts)))
        await engine.load(update_of(new, 7))
        done = await asyncio.gather(*tasks)
        await engine.close()
        return done

    for prompt, each in zip(prompts, asyncio.run(main()), strict=True):
        (_, before), _ = each.runs
        tokens, switch = np.concatenate([prompt, each.tokens]), len(prompt) + before - 1
        found = np.sort(each.experts, -1)
        np.testing.assert_array_equal(found[:switch], chosen(old, tokens)[:switch])
        np.testing.assert_array_equal(found[switch:], chosen(new, tokens)[switch:])
        assert (chosen(old, tokens)[switch:] != chosen(new, tokens)[switch:]).any()


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="needs a mixture-of-experts model"):
        TorchEngine(new_model(), return_experts=True)
