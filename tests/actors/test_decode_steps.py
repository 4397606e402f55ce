"""Decode steps: attention without padding, the step of fixed shapes that a GPU replays (here without capture), and
`engine.batch_invariant`: a sample does not depend on other running ones, to the last bit."""

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from actors.engines import ragged_attention
from actors.engines.decoders import FusedDecoder, ModelDecoder
from actors.engines.sampler import keyed_uniforms
from actors.engines.slot_cache import PooledCache
from actors.engines.static_step import StaticStep, rounded_up
from areal_like.sampling import uniforms
from areal_like.types import Completion, Limits
from tests.actors.tiny_models import CONFIGS, logprobs_of, new_model, prompts_of, sampled
from tests.seeds import seeded, shifted

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


@dataclass
class OnDeviceOnly(TorchDispatchMode):
    """Raises for an operation that a GPU would have to wait for or could not capture: with a tensor of another device
    than `device`, or with a result whose shape depends on values."""

    device: str
    names: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        assert torch.Tag.data_dependent_output not in func.tags, func
        by_places = func is torch.ops.aten.index.Tensor and all(each.dtype == torch.int64 for each in args[1])
        assert torch.Tag.dynamic_output_shape not in func.tags or by_places, func
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                assert leaf.device.type == self.device, f"{func}: a tensor on {leaf.device}"
        return result


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "granite"])
def test_a_static_step_asks_the_host_nothing(kind, compute_dtype):
    """On the meta device tensors have no values, and a tensor of the host would be noticed."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), attn_implementation="eager").eval()
        cache = PooledCache(model.config, 8, torch.device("meta"), compute_dtype, 1024)
        cache.reserve(8, 100)
        decoder = FusedDecoder(model, cache) if FusedDecoder.fits(model) else ModelDecoder(model, cache)
        step = StaticStep(decoder, cache, 8)
    with OnDeviceOnly("meta") as mode, torch.inference_mode():
        step.step(4, 64)
    assert sum("index_copy_" in name for name in mode.names) == 2 * model.config.num_hidden_layers


def test_a_step_computes_few_rows_that_nobody_asked_for():
    rows = [rounded_up(n) for n in range(1, 513)]
    assert all(n <= row < max(3, 2 * n, n + 32) and row >= 2 for n, row in enumerate(rows, 1))
    assert (rows[0], rows[15], rows[16], rows[127], rows[128], rows[256]) == (2, 16, 32, 128, 160, 288)
    assert len(set(rows)) == 23


def test_the_device_has_the_same_random_numbers():
    rng = seeded(5)
    keys = rng.integers(0, 1 << 64, 4096, np.uint64, endpoint=False)
    positions = rng.integers(0, 1 << 40, 4096)
    keys[:4], positions[:4] = [0, (1 << 64) - 1, 1 << 63, 1], [0, 0, (1 << 62), 1]
    expected = uniforms(keys, positions)
    found = keyed_uniforms(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions))
    np.testing.assert_array_equal(found.numpy(), expected)


PROMPTS = [each for each in prompts_of(1, 7, 33, 20, 2, 7, 50, 12) for _ in range(2)]
"""Each twice, as the samples of a group."""
MOST_TOKENS = [1 + 11 * place % 17 for place in range(len(PROMPTS))]


def completions(model: torch.nn.Module, slots: int, late: int = 0, **knobs: object) -> list[Completion]:
    """Of all prompts, `slots` at a time. Each comes `late` steps after the one before."""
    limits = [Limits(length, key=place) for place, length in enumerate(MOST_TOKENS)]
    return sampled(model, PROMPTS, limits, late=late, slots=slots, batch_invariant=True, **knobs)[0]


def differing(some: list[Completion], others: list[Completion]) -> int:
    """Samples with other tokens, or other bits of their logprobs."""
    return sum(
        not (np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs))
        for one, other in zip(some, others, strict=True)
    )


def needs(dtype: str) -> None:
    pytest.importorskip("numba")
    if torch.__version__ < "2.13":
        pytest.skip("an older torch, whose products of rows depend on their number: the engine refuses it")
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
