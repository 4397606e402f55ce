"""What tests have run inside a real SGLang server: a plugin, and another custom loader (`--custom-weight-loader`)."""

from pathlib import Path

import torch

LOAD_FORMAT = "tests.sglang.inside.load"


@torch.no_grad()
def load(model, named_tensors):
    """Falsify what the server computes with, behind the digest's back: turn all angles of the rotary embedding, which
    are tables that the server has made itself, and no parameters."""
    for module in model.modules():
        if hasattr(module, "cos_sin_cache"):
            module.cos_sin_cache.copy_(module.cos_sin_cache.roll(3, dims=0))


def offer_absorbing(folder: Path) -> None:
    """Write a package without code into `folder`: a server that has it on its path runs `absorb`."""
    about = folder / "absorbing-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: absorbing\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nabsorbing = {__name__}:absorb\n")


def absorb() -> None:
    """Have the server attend to prompts as it does to later tokens, where attention is latent. On a GPU a prompt's keys
    and values are written out (MHA). The attention of a server without AMX (`torch_native`) can't: it reads the cache
    of latents. The absorbed form, which multiplies by parts of `kv_b_proj`, is what it can compute."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
