"""The decode step of fixed shapes that a GPU replays, here without capture: its results, and that it never reads from
the device."""

import asyncio
import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from actors.engines import decoders, devices, slot_kernel, torch_engine
from actors.engines.chosen_experts import ChosenExperts
from actors.engines.decoders import FusedDecoder, ModelDecoder
from actors.engines.sampler import keyed_uniforms, sample, sample_static
from actors.engines.slot_cache import PooledCache
from actors.engines.static_step import StaticStep
from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import state_of
from areal_like.sampling import stream_key, uniforms
from areal_like.types import Limits
from areal_like.weights.changes import Changes
from areal_like.weights.update import Update
from tests.actors.test_chosen_experts import CONFIG
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


def test_the_pool_keeps_its_place_and_what_it_holds():
    config = CONFIGS["qwen2"]
    cache = PooledCache(config, 8, torch.device("cpu"), torch.float32, 1000)
    cache.LEAST = 16
    places = set()
    cache.reserve(3, 10)
    for capacity, (rows, time) in [(16, (3, 10)), (64, (8, 40)), (112, (8, 70)), (128, (2, 120)), (896, (1, 513))]:
        cache.keys[:, 0, :, :10] = cache.values[:, 0, :, :10] = 7.0
        cache.reserve(rows, time)
        assert (cache.capacity, cache.rows) == (capacity, min(8, 1000 // capacity))
        assert (cache.keys[:, 0, :, :10] == 7).all() and (cache.values[:, 0, :, :10] == 7).all()
        places.add((cache.keys.data_ptr(), cache.values.data_ptr()))
    assert len(places) == 1
    with pytest.raises(ValueError, match="exceed the cache's 1000 tokens"):
        cache.reserve(2, 600)


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


def test_a_mixture_of_experts_that_tells_which_it_chose_asks_the_host_nothing():
    """In bfloat16 alone: torch's shapes of a grouped product know no other."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), attn_implementation="eager").eval()
        cache = PooledCache(model.config, 8, torch.device("meta"), torch.bfloat16, 1024)
        cache.reserve(8, 100)
        chosen = ChosenExperts(model, 8)
        step = StaticStep(ModelDecoder(model, cache), cache, 8, chosen)
    with OnDeviceOnly("meta"), torch.inference_mode():
        step.step(4, 64)
    assert chosen.newest().shape == (4, 2, 2) and step._experts.shape == (8, 2, 2)


def test_a_large_vocabulary_is_drawn_from_without_asking_the_host():
    logits = torch.zeros(4, 5000, device="meta")
    with OnDeviceOnly("meta"):
        sample_static(logits, torch.zeros(4, device="meta"), torch.zeros(4, device="meta", dtype=torch.float64))


def test_the_host_is_seen_to_be_asked():
    with OnDeviceOnly("meta"):
        with pytest.raises(AssertionError, match="nonzero"):
            torch.zeros(3, device="meta").nonzero()
        with pytest.raises(AssertionError, match="a tensor on cpu"):
            torch.arange(3)


def test_the_device_has_the_same_random_numbers():
    rng = seeded(5)
    keys = rng.integers(0, 1 << 64, 4096, np.uint64, endpoint=False)
    positions = rng.integers(0, 1 << 40, 4096)
    keys[:4], positions[:4] = [0, (1 << 64) - 1, 1 << 63, 1], [0, 0, (1 << 62), 1]
    expected = uniforms(keys, positions)
    found = keyed_uniforms(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions))
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("vocab", [37, 5000])
def test_a_static_draw_is_the_usual_one(vocab):
    rng, rows = seeded(3), 100
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32))
    draws, heat = rng.random(rows), rng.choice([0.0, 0.7, 1.0], rows).astype(np.float32)
    tokens, logprobs = sample(logits.clone(), heat, draws)
    ids, found = sample_static(logits, torch.from_numpy(heat), torch.from_numpy(draws))
    np.testing.assert_array_equal(ids.numpy(), tokens)
    np.testing.assert_array_equal(found.numpy(), logprobs)


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


def test_broken_weights_are_named_and_healed(static):
    model, (prompt,) = new_model(), prompts_of(4)
    good = update_of(model, 1)
    model.get_input_embeddings().weight.data.fill_(torch.nan)

    async def main():
        engine = TorchEngine(model)
        with pytest.raises(RuntimeError, match="NaN"):
            await engine.generate(prompt, Limits(3))
        await engine.load(good)
        done = await engine.generate(prompt, Limits(3))
        await engine.close()
        return done

    assert np.isfinite(asyncio.run(main()).logprobs).all()


# Devices and memory


def test_a_device_that_is_not_there_is_refused():
    cpu = torch.device("cpu")
    assert devices.device_of("cpu", cpu) == cpu
    for name in ("tpu", "meta"):
        with pytest.raises(ValueError, match="must be auto, cpu, cuda"):
            devices.device_of(name, cpu)
    with pytest.raises(ValueError, match="torch sees"):
        devices.device_of("cuda:99", cpu)


def test_a_gpu_has_its_number(monkeypatch):
    """`torch.cuda.set_device` refuses a device without a number."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, index in {"auto": 0, "cuda": 0, "cuda:1": 1}.items():
        assert devices.device_of(name, torch.device("cpu")) == torch.device("cuda", index)


def test_the_budget_is_the_smaller_bound():
    cpu, per_token = torch.device("cpu"), 1 << 20
    assert devices.kv_budget(cpu, per_token, 100, 8, None, None) is None
    assert devices.kv_budget(cpu, per_token, 100, 8, 50, None) == 50
    assert devices.kv_budget(cpu, per_token, 100, 8, 5000, 2.0) == 2048
    with pytest.raises(ValueError, match="holds no token"):
        devices.kv_budget(cpu, per_token, 100, 8, None, 1e-6)


def test_memory_bounds_an_engine_on_the_cpu_too():
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dim, float32
    engine = TorchEngine(new_model(), memory=40 * per_token / devices.GIB)
    with pytest.raises(ValueError, match="memory"):
        asyncio.run(engine.generate(prompts_of(30)[0], Limits(30)))


def test_the_row_that_the_kernel_reads_has_every_slot_in_its_place():
    """The kernel itself runs, and checks itself, only on GPUs; this tests its view of the memory."""
    slots, heads, time, dim = 3, 2, 5, 8
    cache = torch.randn(4, slots, heads, time, dim)[2]
    row = slot_kernel._as_row(cache, slots)
    for slot in range(slots):
        start = slot * heads * time
        torch.testing.assert_close(row[start : start + time].transpose(0, 1), cache[slot])


def test_the_kernel_gets_each_slot_from_its_start_to_its_length(monkeypatch):
    """With torch's own signature, and what a kernel must make of these arguments."""
    slots, heads, time, dim = 3, 2, 5, 8
    keys, values = torch.randn(2, slots, heads, time, dim)
    query, lengths = torch.randn(slots, 2 * heads, 1, dim), torch.tensor([5, 1, 3], dtype=torch.int32)

    def flash(query, key, value, starts, key_starts, *more, scale, seqused_k):
        assert more == (1, time, 0.0, False, False)  # queries, keys, dropout, causal, debugging
        assert starts.tolist() == [0, 1, 2, 3]
        rows = []
        for one, start, used in zip(query, key_starts.tolist(), seqused_k.tolist(), strict=False):
            k, v = (x[start : start + used].transpose(0, 1).repeat_interleave(2, 0) for x in (key, value))
            rows.append((torch.einsum("hd,htd->ht", one, k) * scale).softmax(-1).unsqueeze(1) @ v)
        return torch.cat(rows, 1).transpose(0, 1), None

    real = slot_kernel.KERNEL
    monkeypatch.setattr(slot_kernel, "KERNEL", flash)
    found = slot_kernel.attend(query, keys, values, lengths, 0.3)
    hidden = (torch.arange(time) >= lengths[:, None])[:, None, None]
    wide = [each.repeat_interleave(2, 1) for each in (keys, values)]
    truth = F.scaled_dot_product_attention(query, *wide, attn_mask=~hidden, scale=0.3)
    torch.testing.assert_close(found, truth)
    monkeypatch.setattr(slot_kernel, "KERNEL", real)
    halves = [each.to("meta", torch.bfloat16) for each in (query, keys, values)]
    assert slot_kernel.attend(*halves, lengths.to("meta"), 0.3).shape == query.shape
