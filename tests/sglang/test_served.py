"""The probe on a real server: a right one is not suspected, one that is falsified behind the digest's back is found."""

import asyncio
import copy
from functools import partial

import pytest
import torch

from actors.engines.sglang_weights import serialised
from actors.probe_check import EXACT, ROUNDED, ServedProbe
from areal_like.wire.messages import Manifest
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.probe import Reference
from tests.sglang import inside
from tests.sglang.servers import VOCAB, Published, engine_for, generate, prompts_of, serving

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_that_computes_with_other_weights_than_it_attests_is_found(dtype, tmp_path):
    published = Published("qwen2")
    prompts = [each.tolist() for each in prompts_of(2, 7, 33, 60)]
    assert any(VOCAB - 1 in each for each in prompts), "SGLang does not score the last token of its vocabulary"

    async def probed(engine, probe):
        """The mean error and the number of alarms after a probe of the present version."""
        learner = TorchLearner(copy.deepcopy(published.model), decoupled_ppo, partial(group), 1.0, 0)
        reference = Reference(prompts, 1, learner.logprobs_of)
        reference.take(published.version)
        probe.begin(reference.added_to(Manifest(published.version, engine.digest)))
        await probe._task
        return probe.stats()["mean:served/logprob_error"], probe.stats()["sum:served/alarms"]

    async def check():
        engine = engine_for(published, tmp_path, dtype=dtype)
        (server,) = engine._servers
        server.arguments += ["--custom-weight-loader", inside.LOAD_FORMAT]
        probe = ServedProbe(engine, "actor-0", None)
        async with serving(engine, published):
            for _ in range(3):  # each would find what is kept of the same prompts under older weights
                await generate(engine, prompts_of(60)[0], 4)
                await engine.load(published.step(share=0.3))
                error, alarms = await probed(engine, probe)
                assert error < (1e-5 if dtype == "float32" else ROUNDED / 2) and not alarms
            tensors = serialised([("none", torch.zeros(1))], server.ranks)
            body = {"serialized_named_tensors": tensors, "load_format": inside.LOAD_FORMAT, "flush_cache": False}
            await server.post("/begin_weight_update", {})
            await server.post("/update_weights_from_tensor", body)
            await server.post("/end_weight_update", {})
            whole = engine.stats()["whole_updates"]
            await engine.load(published.step())
            assert engine.stats()["whole_updates"] == whole and server.digest == engine.digest, "a sweep sees nothing"
            error, alarms = await probed(engine, probe)
            assert error > (EXACT if dtype == "float32" else ROUNDED) and alarms == 1 and "SGLang server" in probe.note

    asyncio.run(check())
