"""Products, draws and dtypes of the embedded engine, against torch in higher precision."""

import asyncio

import numpy as np
import pytest
import torch

from actors.engines import decoders
from actors.engines.sampler import sample
from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import publishable, state_of
from areal_like.types import Limits
from areal_like.weights.delta import Update
from tests.actors.tiny_models import logprobs_of, new_model, prompts_of


def test_a_token_without_weight_is_never_drawn():
    for vocab in (3, 5000):  # the second is drawn in two steps
        logits = torch.full((3, vocab), -torch.inf)
        logits[:, vocab // 2] = 0.0
        tokens, logprobs = sample(logits, np.ones(3, np.float32), np.array([0.0, 0.5, 1 - 2.0**-53]))
        assert (tokens == vocab // 2).all() and (logprobs == 0).all()


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "granite"])
def test_bfloat16_keeps_the_published_bits_and_close_logprobs(kind, own_forward, monkeypatch):
    if own_forward:
        monkeypatch.setattr(decoders.FusedDecoder, "fits", lambda model: False)
    model, new = new_model(kind), new_model(kind, seed=1)
    published = publishable(new, "bfloat16")
    prompts = prompts_of(4, 30, 4)

    async def main():
        engine = TorchEngine(model, compute_dtype="bfloat16")
        await engine.load(Update(1, published.digest(), published))
        done = await asyncio.gather(*(engine.generate(p, Limits(20, key=i)) for i, p in enumerate(prompts)))
        assert engine._cache.keys.dtype == torch.bfloat16
        await engine.close()
        return done

    done = asyncio.run(main())
    dtypes = {name: tensor.dtype for name, tensor in model.named_parameters()}
    assert all(dtypes[name] == torch.bfloat16 for name in dtypes if name.endswith("proj.weight"))
    assert model.get_output_embeddings().weight.dtype == torch.float32
    assert state_of(model, "bfloat16").digest() == published.digest()
    exact = [logprobs_of(new, p, c.tokens) for p, c in zip(prompts, done, strict=True)]
    off = np.abs(np.concatenate([c.logprobs for c in done]) - np.concatenate(exact))
    assert 0 < off.mean() < 0.05 and off.max() < 0.4
