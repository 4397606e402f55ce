"""`engine.batch_invariant`: a sample does not depend on other running ones, to the last bit."""

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_like.types import Completion, Limits
from tests.actors.tiny_models import logprobs_of, new_model, prompts_of, sampled
from tests.seeds import shifted

PROMPTS = [each for each in prompts_of(1, 7, 33, 20, 2, 7, 50, 12) for _ in range(2)]
"""Each twice, as the samples of a group."""
LENGTHS = [1 + 11 * place % 30 for place in range(len(PROMPTS))]


def completions(model: torch.nn.Module, slots: int, late: int = 0, **knobs: object) -> list[Completion]:
    """Of all prompts, `slots` at a time. Each comes `late` steps after the one before."""
    limits = [Limits(length, key=place) for place, length in enumerate(LENGTHS)]
    return sampled(model, PROMPTS, limits, late=late, slots=slots, batch_invariant=True, **knobs)[0]


def differing(some: list[Completion], others: list[Completion]) -> int:
    """Samples with other tokens, or other bits of their logprobs."""
    return sum(
        not (np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs))
        for one, other in zip(some, others, strict=True)
    )


def needs(dtype: str) -> None:
    pytest.importorskip("numba")
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no products in bfloat16")


@pytest.mark.parametrize(("kind", "dtype"), [("qwen2", "float32"), ("qwen3", "bfloat16")])
def test_a_sample_does_not_depend_on_what_else_runs(kind: str, dtype: str) -> None:
    needs(dtype)
    model = new_model(kind)
    alone = completions(model, 1, compute_dtype=dtype)
    for prompt, one in zip(PROMPTS, alone, strict=True):
        truth = logprobs_of(model, prompt, one.tokens)
        np.testing.assert_allclose(one.logprobs, truth, atol=1e-4 if dtype == "float32" else 0.4)
    for slots, late in [(len(PROMPTS), 0), (3, 7), (7, 13)]:
        others = completions(model, slots, late, compute_dtype=dtype)
        assert differing(alone, others) == 0, f"{slots} slots"


def test_nor_where_threads_share_a_row() -> None:
    """So many numbers that torch cuts them among its threads, in the middle of rows: of an activation, of logits."""
    needs("float32")
    torch.manual_seed(shifted(0))
    config = Qwen2Config(
        hidden_size=64, intermediate_size=4864, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=9001, max_position_embeddings=256,
    )  # fmt: skip
    model, before = Qwen2ForCausalLM(config), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        alone = completions(model, 1)
        assert differing(alone, completions(model, len(PROMPTS))) == 0
    finally:
        torch.set_num_threads(before)
