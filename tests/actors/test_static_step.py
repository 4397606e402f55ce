"""The decode step of fixed shapes that a GPU replays, here without capture: its results, and that it never reads from
the device."""

import asyncio
import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from actors.engines import decoders, torch_engine
from actors.engines.decoders import FusedDecoder, ModelDecoder
from actors.engines.sampler import keyed_uniforms
from actors.engines.slot_cache import PooledCache
from actors.engines.static_step import StaticStep
from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import state_of
from areal_like.sampling import stream_key, uniforms
from areal_like.types import Limits
from areal_like.weights.update import Changes, Update
from tests.actors.tiny_models import CONFIGS, greedy_of, logprobs_of, new_model, prompts_of, started, steps, update_of
from tests.seeds import seeded


@pytest.fixture
def static(monkeypatch):
    """Make engines decode as on a GPU."""
    monkeypatch.setattr(torch_engine, "is_static", lambda device: True)
    monkeypatch.setattr(PooledCache, "LEAST", 16)
    monkeypatch.setattr("actors.engines.static_step.LEAST_TIME", 16)


def sampled(model, prompts, limits, **knobs):
    async def main():
        engine = TorchEngine(copy.deepcopy(model), **knobs)

        async def late(i):
            await steps(3 * i)
            return await engine.generate(prompts[i], limits[i])

        done = await asyncio.gather(*map(late, range(len(prompts))))
        stats = engine.stats()
        await engine.close()
        return done, stats

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "granite"])
def test_a_static_step_samples_what_the_usual_one_does(kind, monkeypatch, static):
    model = new_model(kind)
    prompts, temperatures = prompts_of(1, 7, 7, 20, 2, 33, 5), [0.0, 1.0, 0.7, 0.0, 1.5, 0.0, 1.0]
    counts = [20, 3, 40, 11, 1, 17, 26]
    limits = [
        Limits(n, temperature=t, key=stream_key(i)) for i, (n, t) in enumerate(zip(counts, temperatures, strict=True))
    ]
    found, stats = sampled(model, prompts, limits, slots=3)
    monkeypatch.undo()
    usual, known = sampled(model, prompts, limits, slots=3)
    assert stats["tokens"] == known["tokens"] and stats["shared_tokens"] == known["shared_tokens"]
    for prompt, limit, one, other in zip(prompts, limits, found, usual, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        if limit.temperature == 0:
            np.testing.assert_array_equal(one.tokens, greedy_of(model, prompt, limit.max_tokens))


def test_short_memory_preempts_and_deals_the_pool_out_anew(static):
    model, prompts = new_model(), prompts_of(3, 5, 8, 2)
    limits = [Limits(60, key=i) for i in range(4)]
    wide, _ = sampled(model, prompts, limits, slots=4)
    narrow, stats = sampled(model, prompts, limits, slots=4, kv_tokens=150)
    assert stats["preemptions"] > 0
    for one, other in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


# What only a device knows


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


def test_the_device_has_the_same_random_numbers():
    rng = seeded(5)
    keys = rng.integers(0, 1 << 64, 4096, np.uint64, endpoint=False)
    positions = rng.integers(0, 1 << 40, 4096)
    keys[:4], positions[:4] = [0, (1 << 64) - 1, 1 << 63, 1], [0, 0, (1 << 62), 1]
    expected = uniforms(keys, positions)
    found = keyed_uniforms(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions))
    np.testing.assert_array_equal(found.numpy(), expected)


# Weights


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("own_forward", [False, True])
def test_an_update_leaves_addresses_as_they_are(static, sparse, own_forward, monkeypatch):
    """A graph reads the weights at the addresses of its capture."""
    if own_forward:
        monkeypatch.setattr(decoders.FusedDecoder, "fits", lambda model: False)
    model, new = new_model(), new_model(seed=1)
    before, (prompt,) = state_of(model, "float32"), prompts_of(6)
    update = update_of(new, 1)
    if sparse:
        changes = Changes(before.digest())
        for index, ((_, old), (_, now)) in enumerate(zip(before.tensors(), update.state.tensors(), strict=True)):
            changes.tensors[index].append(np.flatnonzero(old != now))
        update = Update(1, update.digest, update.state, changes)

    async def main():
        engine = TorchEngine(model)
        engine.digest = before.digest()
        places = {name: tensor.data_ptr() for name, tensor in engine._parameters.items()}
        (old,) = await started(engine, engine.generate(prompt, Limits(30)))
        held = engine._cache._pool.data_ptr()
        await engine.load(update)
        assert places == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        assert held == engine._cache._pool.data_ptr()
        done = await engine.generate(prompt, Limits(20, temperature=0.0))
        await old
        await engine.close()
        return done

    done = asyncio.run(main())
    np.testing.assert_array_equal(done.tokens, greedy_of(new, prompt, 20))
    np.testing.assert_allclose(done.logprobs, logprobs_of(new, prompt, done.tokens), atol=1e-4)


# Devices and memory
