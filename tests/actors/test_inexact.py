"""Mismatch on purpose: the weights that an engine samples from, against NumPy; the digest is that of the published."""

import asyncio

import numpy as np
import pytest
import torch

from actors.engines.inexact import perturb
from actors.engines.torch_engine import TorchEngine
from areal_like.config.registry import ConfigError
from areal_like.config.run_config import load
from areal_like.types import Limits
from areal_like.weights.update import Update
from tests.actors.tiny_models import logprobs_of, new_model, prompts_of, update_of
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


def test_noise_has_the_size_that_was_asked_for_and_its_key():
    weights = torch.tensor(seeded(2).normal(0, 3, size=(100, 100)).astype(np.float32))

    def noise(name, version):
        held = {name: weights.clone()}
        perturb(held, 0.05, version)
        return held[name] - weights

    first = noise("a", 1)
    assert float(first.std()) == pytest.approx(0.05 * float(weights.square().mean().sqrt()), rel=0.05)
    assert torch.equal(first, noise("a", 1))
    for other in (noise("b", 1), noise("a", 2), noise("a", None)):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]) < 0.05


def served(prompt, update, **knobs):
    """An engine's completion after two updates, and the digest that it names."""

    async def main():
        engine = TorchEngine(new_model(), **knobs)
        await engine.load(Update(0, "before", update.state))
        await engine.load(update)
        done = await engine.generate(prompt, Limits(8, key=5))
        found = engine.digest
        await engine.close()
        return done, found

    return asyncio.run(main())


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


def test_a_config_that_makes_no_sense_is_refused():
    for argv in (["engine.inject_mismatch=int3"], ["engine=timed", "engine.inject_mismatch=int8"]):
        with pytest.raises(ConfigError, match=r"engine\.inject_mismatch"):
            load(["quickstart", *argv])
    with pytest.raises(ConfigError, match=r"engine\.mismatch_stays"):
        load(["quickstart", "engine.inject_mismatch=int8", "engine.mismatch_stays=true"])
