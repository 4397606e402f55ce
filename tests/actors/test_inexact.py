"""Mismatch on purpose: the weights that an engine samples from, against NumPy; the digest is that of the published."""

import asyncio
import zlib

import numpy as np
import pytest
import torch

from actors.engines.inexact import BLOCK, attend_in_blocks, perturb
from actors.engines.torch_engine import TorchEngine
from actors.main import build_engine
from areal_like.config.registry import ConfigError, build
from areal_like.config.run_config import load
from areal_like.types import Limits
from areal_like.weights.update import Update
from tests.actors.tiny_models import logprobs_of, new_model, prompts_of, update_of
from tests.rounding import assert_rounds_alike
from tests.seeds import seeded


@pytest.mark.parametrize(("form", "most"), [("int8", 127), ("int4", 7)])
def test_integers_are_rounded_with_one_scale_for_each_row(form, most):
    weights, bias = seeded(0).normal(size=(5, 40)).astype(np.float32), np.ones(5, np.float32)
    weights[2] = 0.0
    held = {"weight": torch.tensor(weights), "bias": torch.tensor(bias)}
    perturb(held, form, version=3)
    scale = np.abs(weights).max(1, keepdims=True) / most
    scale[2] = 1.0
    np.testing.assert_allclose(held["weight"].numpy(), np.round(weights / scale) * scale, atol=1e-6)
    assert held["bias"].tolist() == bias.tolist()
    assert len(np.unique(np.round(held["weight"].numpy()[0] / scale[0]))) <= 2 * most + 1
    again = {"weight": held["weight"].clone()}
    perturb(again, form, version=4)
    torch.testing.assert_close(again["weight"], held["weight"])


def test_experts_have_scales_of_their_own_rows():
    weights = seeded(0).normal(size=(2, 4, 8)).astype(np.float32)
    weights[1, 2] *= 100
    held = {"experts": torch.tensor(weights)}
    perturb(held, "int8", version=0)
    scale = np.abs(weights).max(2, keepdims=True) / 127
    np.testing.assert_allclose(held["experts"].numpy(), np.round(weights / scale) * scale, rtol=1e-5)


def test_fp8_keeps_three_bits_behind_the_first():
    weights = torch.tensor(seeded(1).normal(size=(5, 40)).astype(np.float32))
    held = {"weight": weights.clone()}
    perturb(held, "fp8", version=0)
    large = weights.abs() > weights.abs().amax(1, keepdim=True) / 100
    error = ((held["weight"] - weights) / weights).abs()[large]
    assert 0.02 < error.max() <= 2**-4 + 1e-6 and not torch.equal(held["weight"], weights)


def test_a_run_without_a_seed_of_its_own_has_the_noise_of_before() -> None:
    weights = torch.tensor(seeded(2).normal(size=(6, 5)).astype(np.float32))
    for version, key in ((3, b"a/3"), (None, b"a")):
        perturb(held := {"a": weights.clone()}, 0.05, version)
        noise = torch.randn(6, 5, generator=torch.Generator().manual_seed(zlib.crc32(key)))
        torch.testing.assert_close(held["a"], weights + 0.05 * weights.square().mean().sqrt() * noise)


def test_noise_has_the_size_that_was_asked_for_and_its_key():
    weights = torch.tensor(seeded(2).normal(0, 3, size=(100, 100)).astype(np.float32))

    def noise(name, version, seed=0):
        held = {name: weights.clone()}
        perturb(held, 0.05, version, seed)
        return held[name] - weights

    first = noise("a", 1)
    assert float(first.std()) == pytest.approx(0.05 * float(weights.square().mean().sqrt()), rel=0.05)
    assert torch.equal(first, noise("a", 1))
    for other in (noise("b", 1), noise("a", 2), noise("a", 1, seed=1)):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]) < 0.05


@pytest.mark.parametrize("shape", ["causal", "masked", "grouped"])
def test_attention_in_another_order_is_attention(shape):
    time = 3 * BLOCK + 1
    q, k, v = torch.tensor(seeded(3).normal(0, 2, (3, 2, 4, time, 8)))
    known = {"is_causal": shape != "masked", "scale": 0.4, "enable_gqa": shape == "grouped"}
    if shape == "masked":
        q, hidden = q[:, :, :1], torch.arange(time) >= torch.tensor([3, time])[:, None]  # whole blocks of the first
        known["attn_mask"] = torch.zeros(2, time).double().masked_fill(hidden, -torch.inf)[:, None, None]
    if shape == "grouped":
        k, v = k[:, :2], v[:, :2]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **known)
    torch.testing.assert_close(attend_in_blocks(q, k, v, **known), expected)
    if "attn_mask" in known:
        known["attn_mask"] = known["attn_mask"].float()
    rounded = attend_in_blocks(q.float(), k.float(), v.float(), **known)
    assert not torch.equal(rounded, expected.float())
    torch.testing.assert_close(rounded, expected.float())


def served(prompt, update, **knobs):
    """What an engine says behind two updates, and the digest that it names."""

    async def main():
        engine = TorchEngine(new_model(), **knobs)
        await engine.load(Update(0, "before", update.state))
        await engine.load(update)
        done = await engine.generate(prompt, Limits(8, key=5))
        found = engine.digest
        await engine.close()
        return done, found

    return asyncio.run(main())


def test_an_engine_that_attends_in_another_order_differs_by_rounding_and_repeats_itself():
    published, prompt = new_model(seed=1), prompts_of(6)[0]
    update = update_of(published, 1)
    done, digest = served(prompt, update, inject_mismatch="attention", compute_dtype="bfloat16")
    usual, _ = served(prompt, update, compute_dtype="bfloat16")
    again, _ = served(prompt, update, inject_mismatch="attention", compute_dtype="bfloat16")
    assert digest == update.digest
    np.testing.assert_array_equal(again.logprobs, done.logprobs)
    assert not np.array_equal(done.logprobs, usual.logprobs)
    off, plain = (each.logprobs - logprobs_of(published, prompt, each.tokens) for each in (done, usual))
    assert_rounds_alike(torch.tensor(off), torch.tensor(plain), torch.zeros(len(off)))


@pytest.mark.parametrize("how", ["int8", 0.02])
def test_an_engine_samples_from_other_weights_and_names_the_published_ones(how):
    published, prompt = new_model(seed=1), prompts_of(6)[0]
    inexact = new_model(seed=1)
    perturb(dict(inexact.named_parameters()), how, version=1)
    update = update_of(published, 1)
    done, digest = served(prompt, update, inject_mismatch=how)
    assert digest == update.state.digest() == update.digest
    np.testing.assert_allclose(done.logprobs, logprobs_of(inexact, prompt, done.tokens), atol=1e-4)
    assert np.abs(done.logprobs - logprobs_of(published, prompt, done.tokens)).max() > 1e-3


@pytest.mark.parametrize("stays", [True, False])
def test_noise_that_stays_is_the_same_for_the_next_version(stays):
    published, prompt = new_model(seed=1), prompts_of(6)[0]
    first, later = update_of(published, 1), update_of(published, 7)
    assert first.digest == later.digest
    done = [served(prompt, update, inject_mismatch=0.02, mismatch_stays=stays) for update in (first, later)]
    assert [digest for _, digest in done] == [first.digest] * 2, "of the weights without noise"
    inexact = new_model(seed=1)
    perturb(dict(inexact.named_parameters()), 0.02, version=None if stays else 1)
    apart = [np.abs(each.logprobs - logprobs_of(inexact, prompt, each.tokens)).max() for each, _ in done]
    assert apart[0] < 1e-4 and (apart[1] < 1e-4) == stays
    assert np.abs(done[0][0].logprobs - logprobs_of(published, prompt, done[0][0].tokens)).max() > 1e-3


@pytest.mark.parametrize(("overrides", "seed"), [([], 5), (["engine.mismatch_seed=7"], 7)])
def test_noise_is_drawn_by_the_seed_of_the_run(overrides, seed, tmp_path):
    config = load(["quickstart", "inject_mismatch=0.3", "engine.mismatch_stays=true", "run.seed=5", *overrides])
    engine, state = build_engine(config, 13, tmp_path)
    asyncio.run(engine.load(Update(0, state.digest(), state)))
    exact = build("model", config.model, 5, 13)
    perturb(wanted := dict(exact.named_parameters()), 0.3, None, seed)
    found = dict(engine._parameters)
    assert all(torch.allclose(found[name].float(), wanted[name].float(), atol=0.02) for name in wanted)
    perturb(other := dict(build("model", config.model, 5, 13).named_parameters()), 0.3, None, seed + 1)
    assert not torch.allclose(found["model.embed_tokens.weight"], other["model.embed_tokens.weight"], atol=0.02)


def test_only_noise_can_stay():
    for how in (None, "int8", "attention"):
        with pytest.raises(ValueError, match="mismatch_stays is of noise"):
            TorchEngine(new_model(), inject_mismatch=how, mismatch_stays=True)
        with pytest.raises(ConfigError, match=r"engine\.mismatch_stays: there is no noise"):
            load(["quickstart", f"inject_mismatch={how or 'null'}", "engine.mismatch_stays=true"])
        with pytest.raises(ConfigError, match=r"engine\.mismatch_seed: there is no noise"):
            load(["quickstart", f"inject_mismatch={how or 'null'}", "engine.mismatch_seed=3"])
    assert load(["quickstart", "inject_mismatch=0.3", "engine.mismatch_stays=true"]).engine["mismatch_stays"]


def test_a_config_says_it_under_either_name():
    for how in ("int4", "attention"):
        assert load(["quickstart", f"inject_mismatch={how}"]).engine["inject_mismatch"] == how
    for argv in (["inject_mismatch=int3"], ["engine=timed", "inject_mismatch=int8"]):
        with pytest.raises(ConfigError, match=r"engine\.inject_mismatch"):
            load(["quickstart", *argv])


def test_another_form_is_refused():
    with pytest.raises(ValueError, match="inject_mismatch must be one of"):
        perturb({}, "int3", 0)
