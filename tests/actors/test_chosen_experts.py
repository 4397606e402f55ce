"""The embedded engine reports the experts that the routers chose in the forward passes that made the tokens."""

import numpy as np
import pytest
from transformers import Qwen3MoeConfig

from actors.engines.torch_engine import TorchEngine
from areal_like.types import Limits
from tests.actors.tiny_models import (
    SHAPE,
    decode_as_on_a_gpu,
    experts_of,
    made,
    new_model,
    prompts_of,
    sampled,
    update_of,
)
from tests.seeds import shifted

CONFIG = Qwen3MoeConfig(
    **SHAPE, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
)


@pytest.mark.parametrize("step", ["usual", "static"])
@pytest.mark.parametrize("knobs", [{"slots": 3}, {"slots": 3, "kv_tokens": 50}], ids=["whole", "preempted"])
def test_experts_are_those_of_the_models_own_forward(knobs, step, monkeypatch):
    if step == "static":
        decode_as_on_a_gpu(monkeypatch)
    model, prompts = made(CONFIG, shifted(0)), prompts_of(6, 9, 1, 6)
    prompts.append(prompts[1])
    limits = [Limits(16 + i, key=i, experts_from=i if i != 2 else 0) for i in range(4)]
    limits.append(Limits(4, trained=False))
    done, stats = sampled(model, prompts, limits, return_experts=True, **knobs)
    assert (stats["preemptions"] > 0) == ("kv_tokens" in knobs)
    assert done.pop().experts is None
    for prompt, each, asked in zip(prompts, done, limits, strict=False):
        expected = experts_of(model, np.concatenate([prompt, each.tokens]))[asked.experts_from :]
        assert each.experts.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(each.experts, -1), expected)


@pytest.mark.parametrize("step", ["usual", "static"])
def test_after_an_update_earlier_tokens_keep_the_experts_under_which_they_were_sampled(step, monkeypatch):
    if step == "static":
        decode_as_on_a_gpu(monkeypatch)
    old, new, prompts = made(CONFIG, shifted(0)), made(CONFIG, shifted(1)), prompts_of(4, 11, 11)
    prompts.append(prompts[1])
    limits, update = [Limits(16, key=i) for i in range(4)], update_of(new, 7)
    done, _ = sampled(old, prompts, limits, return_experts=True, meanwhile=lambda engine: engine.load(update))
    for prompt, each in zip(prompts, done, strict=True):
        (_, before), _ = each.runs
        tokens, switch = np.concatenate([prompt, each.tokens]), len(prompt) + before - 1
        found, by_old, by_new = np.sort(each.experts, -1), experts_of(old, tokens), experts_of(new, tokens)
        np.testing.assert_array_equal(found[:switch], by_old[:switch])
        np.testing.assert_array_equal(found[switch:], by_new[switch:])
        assert (by_old[switch:] != by_new[switch:]).any()


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="needs a mixture-of-experts model"):
        TorchEngine(new_model(), return_experts=True)
