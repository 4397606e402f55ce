"""Has a real SGLang server without a GPU attend to prompts as it does to later tokens, where attention is latent.

On a GPU a prompt's keys and values are written out (MHA). The attention of a server without AMX (`torch_native`) can't:
it reads the cache of latents. The absorbed form, which multiplies by parts of `kv_b_proj`, is what it can compute. A
plugin of the server: so it is there before the first request, which is the server's own.
"""

from pathlib import Path


def offer(folder: Path) -> None:
    """Write a package without code into `folder`: a server that has it on its path runs `install`."""
    about = folder / "absorbing-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: absorbing\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nabsorbing = {__name__}:install\n")


def install() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
