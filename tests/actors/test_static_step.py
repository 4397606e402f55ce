"""The decode step of fixed shapes that a GPU replays, here without capture: its results, and that it never reads from
the device."""

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from actors.engines.decoders import FusedDecoder, ModelDecoder
from actors.engines.sampler import keyed_uniforms
from actors.engines.slot_cache import PooledCache
from actors.engines.static_step import StaticStep, rounded_up
from areal_like.sampling import uniforms
from tests.actors.tiny_models import CONFIGS
from tests.seeds import seeded


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
