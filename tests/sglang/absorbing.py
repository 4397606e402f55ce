"""Has a real SGLang server without a GPU attend to prompts as it does to later tokens, where attention is latent.

On a GPU a prompt's keys and values are written out (MHA). The attention of a server without AMX (`torch_native`) can't:
it reads the cache of latents. The absorbed form, which multiplies by parts of `kv_b_proj`, is what it can compute. Runs
inside the server, as another custom loader (`--custom-weight-loader`), before the first request.
"""

LOAD_FORMAT = "tests.sglang.absorbing.load"


def load(model, named_tensors):
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
