"""Latent attention (DeepSeek-V2's, with experts): a server's derived weights follow each patch."""

import asyncio
import os

import pytest
from transformers import DeepseekV2Config

from tests.sglang import inside, servers
from tests.sglang.servers import SHAPE, Published, engine_for, generate, prompts_of

pytestmark = pytest.mark.integration
LATENT = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
"""A server without a GPU supports no other angles of latent attention."""
IN_CHECKPOINTS = {"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False}
"""SGLang requires them, and transformers does not set them."""
CONFIG = DeepseekV2Config(
    **SHAPE | LATENT | EXPERTS | IN_CHECKPOINTS | {"num_key_value_heads": 4}, rope_parameters=YARN
)


def test_what_a_server_derives_follows_patches_in_flight(tmp_path, monkeypatch):
    inside.offer_absorbing(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the choice of experts is compiled, by triton
    monkeypatch.setitem(servers.CONFIGS, "deepseek_v2", CONFIG)
    published = Published("deepseek_v2")

    async def check():
        async with servers.serving(engine_for(published, tmp_path), published) as engine:
            whole, prompts = engine.stats()["whole_updates"], prompts_of(4, 9, 17)
            async with servers.slowed(engine, 0.02):
                asked = [asyncio.create_task(generate(engine, each, 30, key=n)) for n, each in enumerate(prompts)]
                for share in (0.3, 0.005, 0.02):
                    await asyncio.sleep(0.15)
                    await engine.load(published.step(share))
                done = await asyncio.gather(*asked)
            assert any(len(completion.runs) > 1 for completion in done)
            for prompt, completion in zip(prompts, done, strict=True):
                servers.assert_sampled_by(published.models, prompt, completion)
            stats = engine.stats()
            assert (stats["whole_updates"], stats["restarts"]) == (whole, 0)

    asyncio.run(check())
