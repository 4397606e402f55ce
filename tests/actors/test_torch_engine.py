"""The embedded engine against transformers: `generate` and forward are the reference, as sequences join and leave.
Through updates in flight each token comes from the right weights, and the bits are the published ones."""

import asyncio
import copy
import functools
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3MoeConfig

from actors.engines import decoders
from actors.engines.sampler import read_blocks, sample, sample_static
from actors.engines.slot_table import SlotTable
from actors.engines.static_step import StaticStep
from actors.engines.torch_engine import TorchEngine
from areal_like.models import compiling
from areal_like.models.causal_lm import publishable, state_of, write_state
from areal_like.sampling import uniforms
from areal_like.types import Limits
from areal_like.weights.replica import Changes, Update
from tests.actors.tiny_models import (
    CONFIGS,
    FUSED,
    SHAPE,
    VOCAB,
    experts_of,
    greedy_of,
    logits_of,
    logprobs_of,
    made,
    new_model,
    prompts_of,
    sampled,
    started,
    steps,
    update_of,
)
from tests.seeds import shifted

FORWARDS = [*((kind, False) for kind in CONFIGS), *((kind, True) for kind in FUSED)]
"""(kind, whether by the model's own forward, although a fused one is there)"""


@pytest.fixture(params=["usual", "static"])
def step(request, monkeypatch):
    """Static: steps of fixed shapes as on a GPU, without their capture."""
    if request.param == "static":
        monkeypatch.setattr("actors.engines.torch_engine.is_static", lambda device: True)
        monkeypatch.setattr("actors.engines.slot_cache.PooledCache.LEAST", 16)
        monkeypatch.setattr("actors.engines.static_step.LEAST_TIME", 16)
    return request.param


@pytest.mark.parametrize(("kind", "own_forward"), FORWARDS)
def test_greedy_equals_generate_whatever_joins_or_leaves(kind, own_forward, step, monkeypatch):
    if own_forward:
        monkeypatch.setattr(decoders.FusedDecoder, "fits", lambda model: False)
    model = new_model(kind)
    assert decoders.FusedDecoder.fits(model) == (kind in FUSED and not own_forward)
    prompts, counts = prompts_of(1, 7, 7, 20, 2, 33, 5), [20, 3, 40, 11, 1, 17, 26]
    done, stats = sampled(model, prompts, [Limits(n, temperature=0.0) for n in counts], late=3, slots=3)
    assert stats["tokens"] == sum(counts)
    for prompt, count, completion in zip(prompts, counts, done, strict=True):
        np.testing.assert_array_equal(completion.tokens, greedy_of(model, prompt, count))
        np.testing.assert_allclose(completion.logprobs, logprobs_of(model, prompt, completion.tokens), atol=1e-4)
        assert (completion.tokens.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
        assert (completion.finish, completion.runs) == ("length", [(0, count)])


@pytest.mark.parametrize("kind", ["qwen2", "granite"])
def test_sampling_is_the_inverse_cdf_of_keyed_uniforms(kind, step):
    model = new_model(kind)
    prompts, temperatures = prompts_of(3, 9, 4, 9), [0.7, 1.0, 0.0, 1.5]
    limits = [Limits(25, temperature=t, key=11 + i) for i, t in enumerate(temperatures)]
    together, _ = sampled(model, prompts, limits)
    alone, _ = sampled(model, prompts, limits, slots=1)
    for prompt, limit, one, other in zip(prompts, limits, together, alone, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        temperature = limit.temperature or 1.0
        np.testing.assert_allclose(one.logprobs, logprobs_of(model, prompt, one.tokens, temperature), atol=1e-4)
        if limit.temperature:
            logits = logits_of(model, [*prompt, *one.tokens])[len(prompt) - 1 : -1].double() / temperature
            cdf = logits.softmax(-1).cumsum(-1).numpy()
            draws = uniforms(np.full(25, limit.key, np.uint64), np.arange(25))
            np.testing.assert_array_equal(one.tokens, (cdf <= draws[:, None]).sum(-1))


@pytest.mark.parametrize("kind", ["qwen2", "granite"])
@pytest.mark.parametrize("step", ["static"], indirect=True)
def test_a_step_that_begins_ahead_changes_no_bit(step, kind, monkeypatch):
    """Of tokens and logprobs, where the shapes of steps and prefills are the same; sequences stop, join and leave."""
    for name in ("prefill.PREFILL_TOKENS", "prefill.LEAST_PREFILL_TOKENS"):
        monkeypatch.setattr(f"actors.engines.{name}", 1)
    monkeypatch.setattr("actors.engines.static_step.LEAST_TIME", 128)
    monkeypatch.setattr("actors.engines.static_step.rounded_up", lambda n: 8)
    begin, append, seen = StaticStep._begin, SlotTable.append, []
    monkeypatch.setattr(StaticStep, "_begin", lambda *a, **kw: seen.append(len(a[1])) or begin(*a, **kw))
    monkeypatch.setattr(SlotTable, "append", lambda *args: seen.append(0) or append(*args))
    prompts = prompts_of(*[1 + 5 * i % 17 for i in range(16)])
    limits = [Limits(9 + i, temperature=i % 3 / 2, key=i, stop=tuple(range(i, i + i % 4))) for i in range(16)]
    runs = []
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr(TorchEngine, "_goes_on", lambda engine: False)
        seen.clear()
        done, stats = sampled(new_model(kind), prompts, limits, late=1, slots=8)
        twice = any(one and other for one, other in pairwise(seen))
        assert (twice, sum(seen) > stats["tokens"]) == (ahead, ahead), "some are for ended sequences"
        runs.append([(each.tokens.tolist(), each.logprobs.tolist(), each.finish, each.runs) for each in done])
    assert runs[0] == runs[1] and {finish for _, _, finish, _ in runs[0]} == {"stop", "length"}


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


def test_abort_returns_what_is_there(step):
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


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_prompt_of_a_group_is_prefilled_once_whenever_its_samples_come(compute_dtype):
    """There are fewer slots than samples, and two groups alternate: a sequence that joins later copies from a running
    one."""
    model, groups = new_model(), prompts_of(9, 12)
    prompts, limits = [groups[i // 5 % 2] for i in range(20)], [Limits(3 + i % 7, key=i) for i in range(20)]
    done, stats = sampled(model, prompts, limits, slots=4, compute_dtype=compute_dtype)
    assert stats["prefill_tokens"] + stats["shared_tokens"] == sum(len(p) - 1 for p in prompts)
    assert stats["prefill_tokens"] == 2 * (8 + 11), "one prefill each time that a group begins"
    for prompt, completion in zip(prompts, done, strict=True):
        expected = logprobs_of(model, prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4 if compute_dtype == "float32" else 0.4)


def test_preempted_sequences_go_on_as_if_nothing_had_happened(step, monkeypatch):
    """Memory is too small for all: some sequences are put back, and all get the tokens that a large engine samples."""
    prompts, counts, held = prompts_of(3, 9, 4, 4, 20, 6, 11, 2), [40, 12, 60, 30, 25, 50, 8, 33], []
    limits = [Limits(n, key=i) for i, n in enumerate(counts)]
    decode = TorchEngine._decode

    def noted(engine):
        held.append((len(engine._table), engine._cache.keys.shape))
        return decode(engine)

    plain, none = sampled(new_model(), prompts, limits, slots=6)
    monkeypatch.setattr(TorchEngine, "_decode", noted)
    small, stats = sampled(new_model(), prompts, limits, slots=6, kv_tokens=130)
    assert none["preemptions"] == 0 and none["limit"] == 6
    assert stats["preemptions"] >= 2 and stats["tokens"] == sum(counts) == none["tokens"]
    assert max(shape[1] * shape[3] for _, shape in held) <= 130, "slots times positions that are held in memory"
    assert max(n for n, _ in held) > 1 and stats["limit"] < 6
    for ours, theirs in zip(small, plain, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        assert (ours.finish, ours.runs) == (theirs.finish, theirs.runs)


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


@pytest.mark.parametrize("kind", ["qwen2", "granite"])
@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_update_in_flight(policy, kind, step):
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


def test_a_prompt_that_old_weights_have_read_is_not_shared(step):
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


def test_an_uninterruptible_engine_finishes_under_the_old_weights(step):
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


def test_broken_weights_reach_every_caller_and_good_ones_heal(step):
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


def test_a_token_without_weight_is_never_drawn():
    for vocab in (3, 5000):  # the second is drawn in two steps
        logits = torch.full((3, vocab), -torch.inf)
        logits[:, vocab // 2] = 0.0
        tokens, logprobs = sample(logits, np.ones(3, np.float32), np.array([0.0, 0.5, 1 - 2.0**-53]))
        assert (tokens == vocab // 2).all() and (logprobs == 0).all()


@pytest.mark.parametrize("vocab", [4096, 5000])
def test_the_sampler_for_a_compiler_draws_the_same(vocab):
    made = torch.Generator().manual_seed(shifted(0))
    logits, draws = 3 * torch.randn(64, vocab, generator=made), torch.rand(64, dtype=torch.float64, generator=made)
    logits[0, 1:], logits[1, 5] = -torch.inf, torch.nan
    temperatures = torch.tensor([0.0, 1.0, 0.7, 2.0]).repeat(16)
    expected, found = (sample_static(logits.clone(), temperatures, draws, read) for read in (None, read_blocks))
    assert torch.equal(found[0][2:], expected[0][2:]) and found[0][0] == 0
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5, equal_nan=True)
    assert found[1].isnan().nonzero().tolist() == [[1]]


@pytest.mark.parametrize(
    "kind, decoder", [(k, d) for k in ("qwen2", "qwen3") for d in ("fused", "as on a GPU")] + [("granite", "own")]
)
def test_bfloat16_keeps_the_published_bits_and_close_logprobs(kind, decoder, monkeypatch, caplog):
    if decoder == "as on a GPU":
        for name in ("HALF_HEAD", "COMPILED"):
            monkeypatch.setattr(decoders, name, {"cpu"})
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
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
    assert model.get_output_embeddings().weight.dtype == (torch.bfloat16 if decoder == "as on a GPU" else torch.float32)
    assert not [each for each in caplog.records if each.name == compiling.__name__], "what should be compiled is"
    assert state_of(model, "bfloat16").digest() == published.digest()
    exact = [logprobs_of(new, p, c.tokens) for p, c in zip(prompts, done, strict=True)]
    off = np.abs(np.concatenate([c.logprobs for c in done]) - np.concatenate(exact))
    assert 0 < off.mean() < 0.05 and off.max() < 0.4


CONFIG = Qwen3MoeConfig(
    **SHAPE, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
)


@pytest.mark.parametrize("knobs", [{"slots": 3}, {"slots": 3, "kv_tokens": 50}], ids=["whole", "preempted"])
def test_experts_are_those_of_the_models_own_forward(knobs, step):
    model, prompts = made(CONFIG, shifted(0)), prompts_of(6, 9, 1, 6)
    prompts.append(prompts[1])
    limits = [Limits(16 + i, key=i, experts_from=i if i != 2 else 0) for i in range(4)]
    limits.append(Limits(4, trained=False))
    done, stats = sampled(model, prompts, limits, return_experts=True, **knobs)
    assert (stats["preemptions"] > 0) == ("kv_tokens" in knobs)
    assert done.pop().experts is None
    for prompt, each, asked in zip(prompts, done, limits, strict=False):
        expected = experts_of(model, np.concatenate([prompt, each.tokens]))[asked.experts_from :]
        assert each.experts.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(each.experts, -1), expected)


def test_after_an_update_earlier_tokens_keep_the_experts_under_which_they_were_sampled(step):
    old, new, prompts = made(CONFIG, shifted(0)), made(CONFIG, shifted(1)), prompts_of(4, 11, 11)
    prompts.append(prompts[1])
    limits, update = [Limits(16, key=i) for i in range(4)], update_of(new, 7)
    done, _ = sampled(old, prompts, limits, return_experts=True, meanwhile=lambda engine: engine.load(update))
    for prompt, each in zip(prompts, done, strict=True):
        (_, before), _ = each.runs
        tokens, switch = np.concatenate([prompt, each.tokens]), len(prompt) + before - 1
        found, by_old, by_new = np.sort(each.experts, -1), experts_of(old, tokens), experts_of(new, tokens)
        np.testing.assert_array_equal(found[:switch], by_old[:switch])
        np.testing.assert_array_equal(found[switch:], by_new[switch:])
        assert (by_old[switch:] != by_new[switch:]).any()


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="needs a mixture-of-experts model"):
        TorchEngine(new_model(), return_experts=True)
