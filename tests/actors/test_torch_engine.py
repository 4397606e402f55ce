"""The embedded engine against transformers: its own `generate` and forward are the truth, whatever joins or leaves."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from actors.engines import decoders
from actors.engines.sampler import sample
from actors.engines.torch_engine import TorchEngine
from areal_like.models import state_of, write_state
from areal_like.sampling import uniforms
from areal_like.types import Limits
from areal_like.weights.state import Update

torch.set_num_threads(1)  # as in an actor; more threads only get in one another's way at this size
VOCAB = 37
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}, attention_bias=False),
    "qwen3": Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}, head_dim=16),
    # Known to no fused decoder: biases everywhere, and scaled logits.
    "llama with biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "granite": GraniteConfig(**SHAPE, logits_scaling=2.0, residual_multiplier=0.5),
}
FUSED = {"qwen2", "llama", "qwen3"}


def new_model(kind="qwen2", seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # biases and norms start at 0 and 1: a mix-up would not show
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
        assert parameter.isfinite().all(), name
    return model


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(tokens, np.int64))[None]).logits[0]


def logprobs_of(model, prompt, response, temperature=1.0):
    """float32 [R]: what the model's own forward says."""
    logits = logits_of(model, [*prompt, *response])[len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.as_tensor(response).long()[:, None])[:, 0].numpy()


def greedy_of(model, prompt, count):
    ids = torch.as_tensor(np.asarray(prompt, np.int64))[None]
    done = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return done[0, len(prompt) :].numpy()


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def update_of(model, version):
    state = state_of(model, "float32")
    return Update(version, state.digest(), state)


async def steps(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def started(engine, *calls):
    """Tasks of the calls, after a few decode steps."""
    tasks = [asyncio.create_task(call) for call in calls]
    while engine.stats()["tokens"] < 4 * len(tasks):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_equals_generate_whatever_joins_or_leaves(kind, own_forward, monkeypatch):
    if own_forward:
        monkeypatch.setattr(decoders.FusedDecoder, "fits", lambda model: False)
    model = new_model(kind)
    reference = copy.deepcopy(model)
    assert decoders.FusedDecoder.fits(model) == (kind in FUSED and not own_forward)
    prompts, counts = prompts_of(1, 7, 7, 20, 2, 33, 5), [20, 3, 40, 11, 1, 17, 26]

    async def main():
        engine = TorchEngine(model, slots=3)

        async def late(i):
            await steps(3 * i)
            return await engine.generate(prompts[i], Limits(counts[i], temperature=0.0))

        done = await asyncio.gather(*map(late, range(len(prompts))))
        assert engine.stats()["tokens"] == sum(counts)
        await engine.close()
        return done

    for prompt, count, completion in zip(prompts, counts, asyncio.run(main()), strict=True):
        np.testing.assert_array_equal(completion.tokens, greedy_of(reference, prompt, count))
        np.testing.assert_allclose(completion.logprobs, logprobs_of(reference, prompt, completion.tokens), atol=1e-4)
        assert (completion.tokens.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
        assert (completion.finish, completion.runs) == ("length", [(0, count)])


@pytest.mark.parametrize("kind", ["qwen2", "granite"])
def test_sampling_is_the_inverse_cdf_of_keyed_uniforms(kind):
    model = new_model(kind)
    reference = copy.deepcopy(model)
    prompts, temperatures = prompts_of(3, 9, 4, 9), [0.7, 1.0, 0.0, 1.5]
    limits = [Limits(25, temperature=t, key=11 + i) for i, t in enumerate(temperatures)]

    async def main():
        engine = TorchEngine(model)
        together = await asyncio.gather(*map(engine.generate, prompts, limits))
        alone = [await engine.generate(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
        await engine.close()
        return together, alone

    together, alone = asyncio.run(main())
    for prompt, limit, one, other in zip(prompts, limits, together, alone, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        temperature = limit.temperature or 1.0
        logprobs = logprobs_of(reference, prompt, one.tokens, temperature)
        np.testing.assert_allclose(one.logprobs, logprobs, atol=1e-4)
        if limit.temperature:
            logits = logits_of(reference, [*prompt, *one.tokens])[len(prompt) - 1 : -1].double() / temperature
            cdf = logits.softmax(-1).cumsum(-1).numpy()
            draws = uniforms(np.full(25, limit.key, np.uint64), np.arange(25))
            np.testing.assert_array_equal(one.tokens, (cdf <= draws[:, None]).sum(-1))


def test_offset_goes_on_where_an_earlier_call_ended():
    (prompt,) = prompts_of(6)

    async def main():
        engine = TorchEngine(new_model())
        whole = await engine.generate(prompt, Limits(10, key=5))
        first = await engine.generate(prompt, Limits(4, key=5))
        rest = await engine.generate(np.concatenate([prompt, first.tokens]), Limits(6, key=5, offset=4))
        np.testing.assert_array_equal(whole.tokens, [*first.tokens, *rest.tokens])
        await engine.close()

    asyncio.run(main())


def test_a_token_without_weight_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    tokens, logprobs = sample(logits, np.ones(3, np.float32), np.array([0.0, 0.5, 1 - 2.0**-53]))
    assert (tokens == 1).all() and (logprobs == 0).all()


def test_stop_token_ends_the_response_and_is_part_of_it():
    model = new_model()
    (prompt,) = prompts_of(5)
    greedy = greedy_of(copy.deepcopy(model), prompt, 30).tolist()
    stop = greedy[7]
    end = greedy.index(stop) + 1

    async def main():
        engine = TorchEngine(model)
        stopped, free = await asyncio.gather(
            engine.generate(prompt, Limits(30, temperature=0.0, stop=(VOCAB, stop))),
            engine.generate(prompt, Limits(30, temperature=0.0)),
        )
        assert (stopped.tokens.tolist(), stopped.finish) == (greedy[:end], "stop")
        assert (free.tokens.tolist(), free.finish) == (greedy, "length")
        await engine.close()

    asyncio.run(main())


def test_abort_returns_what_is_there():
    prompts = prompts_of(5, 6, 7)
    limits = [Limits(60, key=i) for i in range(3)]

    async def main():
        engine = TorchEngine(new_model(), slots=2)
        whole = await asyncio.gather(*map(engine.generate, prompts, limits))
        tasks = await started(engine, *map(engine.generate, prompts, limits, "abc"))
        await steps(5)
        engine.abort(["a", "c", "unknown"])
        cut, going, unborn = await asyncio.gather(*tasks)
        assert engine.stats()["running"] == 0
        await engine.close()
        return whole, cut, going, unborn

    whole, cut, going, unborn = asyncio.run(main())
    assert 0 < len(cut.tokens) < 60 and cut.finish == "abort" and cut.runs == [(0, len(cut.tokens))]
    np.testing.assert_array_equal(cut.tokens, whole[0].tokens[: len(cut.tokens)])
    np.testing.assert_array_equal(going.tokens, whole[1].tokens)
    assert (len(unborn.tokens), unborn.runs, unborn.finish) == (0, [], "abort")


def kept_logprobs(old, new, prompt, response, switch):
    """The truth of `kv_policy: keep`: the old weights read the tokens before the switch, the new ones the others."""
    tokens = torch.as_tensor(np.concatenate([prompt, response]).astype(np.int64))[None]
    fed = len(prompt) + switch - 1
    cache = DynamicCache(config=old.config)
    with torch.no_grad():
        first = old(tokens[:, :fed], past_key_values=cache).logits[0]
        rest = new(tokens[:, fed:], past_key_values=cache).logits[0]
    logits = torch.cat([first, rest])[len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.as_tensor(response).long()[:, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["qwen2", "granite"])
@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_update_in_flight(policy, kind):
    model, new = new_model(kind), new_model(kind, seed=1)
    old = copy.deepcopy(model)
    prompts = prompts_of(4, 11, 1, 11)

    async def main():
        engine = TorchEngine(model, kv_policy=policy)
        tasks = await started(engine, *(engine.generate(p, Limits(30, key=i)) for i, p in enumerate(prompts)))
        update = update_of(new, 7)
        await engine.load(update)
        assert (engine.version, engine.digest) == (7, update.digest)
        done = await asyncio.gather(*tasks)
        stats = engine.stats()
        assert stats["updates"] == 1 and stats["pause_seconds"] > 0
        assert (stats["recompute_seconds"] > 0) == (policy == "recompute")
        await engine.close()
        return done

    for prompt, completion in zip(prompts, asyncio.run(main()), strict=True):
        (before, switch), (after, rest) = completion.runs
        assert (before, after, switch + rest) == (0, 7, 30) and switch >= 4
        tokens = completion.tokens
        if policy == "keep":
            expected = kept_logprobs(old, new, prompt, tokens, switch)
        else:
            made_by_old = logprobs_of(old, prompt, tokens)[:switch]
            expected = np.concatenate([made_by_old, logprobs_of(new, prompt, tokens)[switch:]])
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_loaded_weights_are_the_published_bits():
    """Also where the fused decoder holds several parameters in one tensor."""
    model, new = new_model("qwen3"), new_model("qwen3", seed=1)

    async def main():
        engine = TorchEngine(model)
        update = update_of(new, 1)
        await engine.load(update)
        assert state_of(model, "float32").digest() == update.digest == engine.digest
        await engine.close()

    asyncio.run(main())


def test_an_uninterruptible_engine_finishes_under_the_old_weights():
    prompts = prompts_of(4, 5, 6)

    async def main():
        engine = TorchEngine(new_model(), interruptible=False)
        order = []

        async def noted(name, awaitable):
            result = await awaitable
            order.append(name)
            return result

        first, second = await started(
            engine,
            noted("short", engine.generate(prompts[0], Limits(10))),
            noted("long", engine.generate(prompts[1], Limits(20))),
        )
        loads = [asyncio.create_task(noted(f"load {v}", engine.load(update_of(new_model(seed=v), v)))) for v in (1, 2)]
        await steps(1)
        late = asyncio.create_task(noted("late", engine.generate(prompts[2], Limits(3))))
        done = await asyncio.gather(first, second, late, *loads)
        await engine.close()
        assert order[:2] == ["short", "long"] and sorted(order[2:4]) == ["load 1", "load 2"] and order[4] == "late"
        assert [c.runs for c in done[:3]] == [[(0, 10)], [(0, 20)], [(2, 3)]]
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


def test_a_cancelled_caller_frees_its_slot():
    prompts = prompts_of(4, 5, 6)

    async def main():
        engine = TorchEngine(new_model(), slots=1)
        (running,) = await started(engine, engine.generate(prompts[0], Limits(100)))
        waiting = asyncio.create_task(engine.generate(prompts[1], Limits(100)))
        last = asyncio.create_task(engine.generate(prompts[2], Limits(5)))
        await steps(2)
        waiting.cancel()
        running.cancel()
        assert len((await last).tokens) == 5
        assert running.cancelled() and waiting.cancelled()
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0
        assert engine.stats()["joins"] == 2
        await engine.close()

    asyncio.run(main())


def test_equal_prompts_are_prefilled_once():
    group, other = prompts_of(9, 12)
    rows = []

    async def main():
        engine = TorchEngine(new_model())
        prefill = engine._decoder.prefill
        engine._decoder.prefill = lambda tokens, positions: (rows.append(tokens.shape), prefill(tokens, positions))
        await asyncio.gather(*(engine.generate(p, Limits(3, key=i)) for i, p in enumerate([group] * 8 + [other])))
        await engine.close()

    asyncio.run(main())
    assert rows == [(2, 11)]


def test_refused_requests_harm_nobody():
    (prompt,) = prompts_of(8)

    async def main():
        engine = TorchEngine(new_model())
        (good,) = await started(engine, engine.generate(prompt, Limits(30)))
        for tokens, limit, message in [
            (prompt, 121, "positions"),
            (prompt, 0, "max_tokens"),
            (prompt[:0], 5, "at least one prompt token"),
            (np.array([0, VOCAB]), 5, "token ids"),
            (np.array([-1]), 5, "token ids"),
        ]:
            with pytest.raises(ValueError, match=message):
                await engine.generate(tokens, Limits(limit))
        assert len((await good).tokens) == 30
        assert len((await engine.generate(prompt, Limits(120))).tokens) == 120
        await engine.close()

    asyncio.run(main())


def test_close_hands_back_what_is_there():
    prompts = prompts_of(4, 5)

    async def main():
        engine = TorchEngine(new_model(), slots=1, interruptible=False)
        (running,) = await started(engine, engine.generate(prompts[0], Limits(100)))
        waiting = asyncio.create_task(engine.generate(prompts[1], Limits(100)))
        load = asyncio.create_task(engine.load(update_of(new_model(seed=1), 1)))
        await steps(2)
        await engine.close()
        await load
        assert [(await c).finish for c in (running, waiting)] == ["abort", "abort"]
        assert len((await running).tokens) >= 4 and (await running).runs[0][0] == 0
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(prompts[0], Limits(1))

    asyncio.run(main())


def test_sliding_windows_are_refused():
    config = MistralConfig(**SHAPE, sliding_window=8)
    qwen = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="full attention"):
        TorchEngine(AutoModelForCausalLM.from_config(qwen))

    async def main():
        engine = TorchEngine(AutoModelForCausalLM.from_config(config))
        with pytest.raises(ValueError, match="full attention"):
            await engine.generate(np.arange(4), Limits(2))
        await engine.close()

    asyncio.run(main())


def test_knobs_are_checked():
    with pytest.raises(ValueError, match="slots"):
        TorchEngine(new_model(), slots=0)
    with pytest.raises(ValueError, match="kv_policy"):
        TorchEngine(new_model(), kv_policy="forget")


def test_write_state_reaches_the_fused_memory():
    """An update changes what the fused decoder computes, not only the module's parameters."""
    model, new = new_model("llama"), new_model("llama", seed=1)
    (prompt,) = prompts_of(6)

    async def main():
        engine = TorchEngine(model)
        write_state(state_of(new, "float32"), dict(model.named_parameters()))
        done = await engine.generate(prompt, Limits(12, temperature=0.0))
        np.testing.assert_array_equal(done.tokens, greedy_of(new, prompt, 12))
        await engine.close()

    asyncio.run(main())
