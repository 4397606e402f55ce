"""Mismatch on purpose: the weights that an engine samples from, against NumPy; the digest is that of the published."""

import asyncio

import numpy as np
import pytest
import torch

from actors.engines.inexact import perturb
from actors.engines.torch_engine import TorchEngine
from areal_like.types import Limits
from tests.actors.tiny_models import logprobs_of, new_model, prompts_of, update_of
from tests.seeds import seeded


@pytest.mark.parametrize(("form", "most"), [("int8", 127), ("int4", 7)])
def test_integers_are_rounded_with_one_scale_for_each_row(form, most):
    weights, bias = seeded(0).normal(size=(5, 40)).astype(np.float32), np.ones(5, np.float32)
    weights[2] = 0.0
    held = {"weight": torch.tensor(weights), "bias": torch.tensor(bias)}
    perturb(held, form)
    scale = np.abs(weights).max(1, keepdims=True) / most
    scale[2] = 1.0
    np.testing.assert_allclose(held["weight"].numpy(), np.round(weights / scale) * scale, atol=1e-6)
    assert held["bias"].tolist() == bias.tolist()


def test_noise_has_the_size_that_was_asked_for_and_its_key():
    weights = torch.tensor(seeded(2).normal(0, 3, size=(100, 100)).astype(np.float32))

    def noise(name):
        held = {name: weights.clone()}
        perturb(held, 0.05)
        return held[name] - weights

    first = noise("a")
    assert float(first.std()) == pytest.approx(0.05 * float(weights.square().mean().sqrt()), rel=0.05)
    assert torch.equal(first, noise("a"))
    assert abs(torch.corrcoef(torch.stack([first.flatten(), noise("b").flatten()]))[0, 1]) < 0.05


@pytest.mark.parametrize("how", ["int8", 0.02])
def test_an_engine_samples_from_other_weights_and_names_the_published_ones(how):
    published, (prompt,) = new_model(seed=1), prompts_of(6)

    async def main():
        engine = TorchEngine(new_model(), inject_mismatch=how)
        for version in (1, 7):
            await engine.load(update := update_of(published, version))
            done = await engine.generate(prompt, Limits(8, key=5))
            assert engine.digest == update.digest
            inexact = new_model(seed=1)
            perturb(dict(inexact.named_parameters()), how)
            np.testing.assert_allclose(done.logprobs, logprobs_of(inexact, prompt, done.tokens), atol=1e-4)
            assert np.abs(done.logprobs - logprobs_of(published, prompt, done.tokens)).max() > 1e-3
        await engine.close()

    asyncio.run(main())
