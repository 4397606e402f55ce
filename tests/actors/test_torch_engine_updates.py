"""In-flight weight updates: each token comes from the right weights, and the bits are the published ones."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from actors.engines.torch_engine import TorchEngine
from areal_like.models.causal_lm import state_of, write_state
from areal_like.types import Limits
from areal_like.weights.delta import Changes, Update
from tests.actors.tiny_models import (
    decode_as_on_a_gpu,
    greedy_of,
    logprobs_of,
    new_model,
    prompts_of,
    sampled,
    started,
    steps,
    update_of,
)


def kept_logprobs(old, new, prompt, response, switch):
    """The truth for `kv_policy: keep`: old weights read the tokens before the switch, new weights those after it."""
    tokens = torch.as_tensor(np.concatenate([prompt, response]).astype(np.int64))[None]
    fed = len(prompt) + switch - 1
    cache = DynamicCache(config=old.config)
    with torch.no_grad():
        first = old(tokens[:, :fed], past_key_values=cache).logits[0]
        rest = new(tokens[:, fed:], past_key_values=cache).logits[0]
    logits = torch.cat([first, rest])[len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.as_tensor(response).long()[:, None])[:, 0].numpy()


@pytest.mark.parametrize("step", ["usual", "static"])
@pytest.mark.parametrize("kind", ["qwen2", "granite"])
@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_update_in_flight(policy, kind, step, monkeypatch):
    if step == "static":
        decode_as_on_a_gpu(monkeypatch)
    old, new = new_model(kind), new_model(kind, seed=1)
    prompts = prompts_of(4, 11, 1, 11)
    prompts += [prompts[1], prompts[2], prompts[1], prompts[3]]  # groups: their prompt is computed once, also anew

    async def load(engine):
        """A GPU's graph reads weights, keys and values at the addresses of its capture."""
        tensors = [*engine._parameters.values(), *([engine._cache._pool] if step == "static" else [])]
        before = [tensor.data_ptr() for tensor in tensors]
        await engine.load(update_of(new, 7))
        assert before == [tensor.data_ptr() for tensor in tensors]

    limits = [Limits(30, key=i) for i in range(len(prompts))]
    done, stats = sampled(old, prompts, limits, kv_policy=policy, meanwhile=load)
    assert stats["updates"] == 1 and stats["pause_seconds"] > 0
    assert stats["shared_tokens"] == 30 * (1 + (policy == "recompute")), "by 2, 1 and 1 samples"
    for prompt, completion in zip(prompts, done, strict=True):
        (before, switch), (after, rest) = completion.runs
        assert (before, after, switch + rest) == (0, 7, 30) and switch >= 4
        tokens = completion.tokens
        if policy == "keep":
            expected = kept_logprobs(old, new, prompt, tokens, switch)
        else:
            made_by_old = logprobs_of(old, prompt, tokens)[:switch]
            expected = np.concatenate([made_by_old, logprobs_of(new, prompt, tokens)[switch:]])
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_prompt_that_old_weights_have_read_is_not_shared():
    model, new = new_model(), new_model(seed=1)
    (prompt,) = prompts_of(9)

    async def main():
        engine = TorchEngine(model, kv_policy="keep")
        (old,) = await started(engine, engine.generate(prompt, Limits(40)))
        await engine.load(update_of(new, 1))
        first = asyncio.create_task(engine.generate(prompt, Limits(20, temperature=0.0)))
        await steps(2)
        second = await engine.generate(prompt, Limits(10, temperature=0.0))
        assert engine.stats()["shared_tokens"] == 8, "the second from the first, which the new weights have read"
        np.testing.assert_array_equal(second.tokens, greedy_of(new, prompt, 10))
        np.testing.assert_array_equal((await first).tokens, greedy_of(new, prompt, 20))
        old.cancel()
        await engine.close()

    asyncio.run(main())


def test_an_uninterruptible_engine_finishes_under_the_old_weights():
    prompts = prompts_of(4, 5, 6)

    async def main():
        engine = TorchEngine(new_model(), interruptible=False)
        calls = (engine.generate(prompt, Limits(n)) for prompt, n in zip(prompts, (10, 20), strict=False))
        running = await started(engine, *calls)
        loads = [asyncio.create_task(engine.load(update_of(new_model(seed=v), v))) for v in (1, 2)]
        await steps(1)
        late = asyncio.create_task(engine.generate(prompts[2], Limits(3)))
        await asyncio.gather(*loads)
        assert all(each.done() for each in running) and not late.done()
        done = await asyncio.gather(*running, late)
        await engine.close()
        assert [c.runs for c in done] == [[(0, 10)], [(0, 20)], [(2, 3)]]
        assert engine.stats()["pause_seconds"] == 0

    asyncio.run(main())


def test_broken_weights_reach_every_caller_and_good_ones_heal():
    good = new_model()
    broken = copy.deepcopy(good)
    with torch.no_grad():
        broken.get_input_embeddings().weight.fill_(torch.nan)
    prompts = prompts_of(4, 5, 6)

    async def main():
        engine = TorchEngine(copy.deepcopy(good), slots=2)
        tasks = await started(engine, *(engine.generate(p, Limits(50)) for p in prompts[:2]))
        tasks.append(asyncio.create_task(engine.generate(prompts[2], Limits(50))))
        await steps(1)
        await engine.load(update_of(broken, 1))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [RuntimeError] * 3 and all("NaN" in str(r) for r in results)
        await engine.load(update_of(good, 2))
        healed = await engine.generate(prompts[0], Limits(5, temperature=0.0))
        np.testing.assert_array_equal(healed.tokens, greedy_of(good, prompts[0], 5))
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("held", [True, False])
def test_a_sparse_update_writes_what_has_changed_and_only_onto_what_it_was_made_from(held):
    """An element that the update does not name keeps its value, which only a test could have put there."""
    model = new_model("qwen2")
    engine, state = TorchEngine(model), state_of(model, "bfloat16")
    write_state(state, dict(model.named_parameters()))
    engine.digest = state.digest() if held else "another"
    changes = Changes(state.digest())
    target = dict(model.named_parameters())[state.specs[0].name].detach().view(-1)
    before = target.clone()
    bits = next(state.tensors())[1]
    bits[[3, 5]] ^= 1
    changes.tensors[0].append(np.array([3, 5]))
    target[7] = 123.0
    asyncio.run(engine.load(Update(1, state.digest(), state, changes)))
    assert (target[7] == 123.0) == held
    assert (target[[3, 5]] != before[[3, 5]]).all() and (target[[2, 4, 6]] == before[[2, 4, 6]]).all()
    assert (engine.version, engine.digest) == (1, state.digest())
