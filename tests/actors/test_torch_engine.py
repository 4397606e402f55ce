"""The embedded engine against transformers: `generate` and forward are the reference, as sequences join and leave."""

import asyncio
import copy

import numpy as np
import pytest

from actors.engines import decoders
from actors.engines.torch_engine import TorchEngine
from areal_like.sampling import uniforms
from areal_like.types import Limits
from tests.actors.tiny_models import (
    CONFIGS,
    FUSED,
    VOCAB,
    decode_as_on_a_gpu,
    greedy_of,
    logits_of,
    logprobs_of,
    new_model,
    prompts_of,
    sampled,
    started,
    steps,
)


@pytest.mark.parametrize("step", ["usual", "static"])
@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_equals_generate_whatever_joins_or_leaves(kind, own_forward, step, monkeypatch):
    if own_forward:
        monkeypatch.setattr(decoders.FusedDecoder, "fits", lambda model: False)
    if step == "static":
        decode_as_on_a_gpu(monkeypatch)
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


@pytest.mark.parametrize("step", ["usual", "static"])
@pytest.mark.parametrize("kind", ["qwen2", "granite"])
def test_sampling_is_the_inverse_cdf_of_keyed_uniforms(kind, step, monkeypatch):
    if step == "static":
        decode_as_on_a_gpu(monkeypatch)
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


@pytest.mark.parametrize("step", ["usual", "static"])
def test_preempted_sequences_go_on_as_if_nothing_had_happened(step, monkeypatch):
    """Memory is too small for all: some sequences are put back, and all get the tokens that a large engine samples."""
    if step == "static":
        decode_as_on_a_gpu(monkeypatch)
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
