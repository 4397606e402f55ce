"""A decode step's attention on the CPU that reads no padding: its results, and when it is used."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from actors.engines import ragged_attention
from areal_like.types import Limits
from tests.actors.tiny_models import logprobs_of, new_model, prompts_of, sampled
from tests.seeds import shifted

LENGTHS = (1, 3, 4, 63, 64, 65, 130, 8)
"""Around the borders of a pass over four keys or eight values, and of a block."""


@pytest.fixture
def compiled(monkeypatch):
    """However small a step is."""
    monkeypatch.setattr(ragged_attention, "COMPILED_FROM", 0)


def cache_of(lengths, width, dtype=torch.float32, heads=2, group=3):
    """Query [n, heads, group, width], keys and values [slots, heads, time, width], with more slots and time than are
    used, and large numbers where nobody may read."""
    made = torch.Generator().manual_seed(shifted(0))
    slots, time = len(lengths) + 2, max(lengths) + 9
    query = torch.randn(len(lengths), heads, group, width, generator=made).to(dtype)
    keys, values = (torch.randn(slots, heads, time, width, generator=made).to(dtype) for _ in range(2))
    for i, length in enumerate(lengths):
        keys[i, :, length:] = values[i, :, length:] = 1e4
    return query, keys, values


def attended(query, keys, values, lengths, scale=0.3):
    step = ragged_attention.begin(keys[None], np.array(lengths))
    assert step is not None
    return step(query, keys, values, scale)


def truth(query, keys, values, lengths, scale=0.3):
    rows = [
        F.scaled_dot_product_attention(q.double(), k[:, :n].double(), v[:, :n].double(), scale=scale)
        for q, k, v, n in zip(query, keys, values, lengths, strict=False)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("width, group", [(16, 3), (16, 1), (8, 2)])
def test_it_is_attention(compiled, width, group):
    given = cache_of(LENGTHS, width, group=group)
    assert torch.allclose(attended(*given, LENGTHS).double(), truth(*given, LENGTHS), rtol=0, atol=3e-6)


def test_scores_that_lie_far_apart(compiled):
    query, keys, values = cache_of((50, 50), 16)
    keys[:, :, 7] = 20 * query[0, 0, 0]
    given = (query, keys, values)
    found = attended(*given, (50, 50), scale=50.0)
    assert torch.allclose(found.double(), truth(*given, (50, 50), scale=50.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "granite"])
def test_the_engine_samples_by_it_what_the_model_says(compiled, monkeypatch, kind):
    """Answers of very different lengths, some of which begin late."""
    used, call = [], ragged_attention.Ragged.__call__
    monkeypatch.setattr(ragged_attention.Ragged, "__call__", lambda *args: used.append(1) or call(*args))
    model, prompts, lengths = new_model(kind), prompts_of(1, 7, 30, 20, 2), (90, 5, 40, 3, 60)
    done, _ = sampled(model, prompts, [Limits(n, key=shifted(i)) for i, n in enumerate(lengths)], slots=4)
    assert used
    for prompt, each in zip(prompts, done, strict=True):
        assert np.allclose(each.logprobs, logprobs_of(model, prompt, each.tokens), atol=2e-4)
