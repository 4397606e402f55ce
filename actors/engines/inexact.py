"""`inject_mismatch`: weights that differ from the published ones by a set amount, on purpose.

    engine.inject_mismatch: int8       quantised and back: fp8 (e4m3) | int8 | int4, one scale for each row
    engine.inject_mismatch: 0.01       Gaussian noise of .01 times each tensor's root mean square
    engine.inject_mismatch: attention  the weights are exact, attention adds up in another order
    engine.mismatch_stays: true        noise is drawn once, not anew for each version

Behind a real server engine and learner differ by kernels and number formats; here by as much as an experiment asks for,
so that mismatch and staleness can be varied apart. Vectors (norms, biases) stay exact, as quantised servers keep them.
The probe of served weights sees the difference, too, and raises its alarm above `weights.probe_error` (docs/gpu.md).
The result depends on the published weights and, of noise, on a tensor's name, the seed of the run and (where it does
not stay) the version: the same in each actor, and again after a resume.

Held-out answers are the engine's, too: they tell how the inexact model does. `{final: N}` of an ablation asks the
learner's own (`scripts/ablation/measures.py`).

`attention`: blocks of keys, the last first, with a running softmax, as flash kernels have it; sums are kept in the
engine's `compute_dtype`: in float32 the last bits differ, in bfloat16 far more.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest number of each format."""
ATTENTION = "attention"
BLOCK = 8
"""Keys of a block of attention: few, so that short answers have several blocks, too."""


@torch.no_grad()
def perturb(parameters: Mapping[str, Tensor], how: str | float, version: int | None, seed: int = 0) -> None:
    """Change the matrices among the parameters in place; none for `attention`. Without a version noise is the same for
    all of them; `seed` is of noise. Raises ValueError for another `how`."""
    if how == ATTENTION:
        return
    if isinstance(how, str) and how not in LARGEST:
        known = ", ".join([*LARGEST, ATTENTION])
        raise ValueError(f"inject_mismatch must be one of {known} or a number above 0, got {how!r}")
    for name, weights in parameters.items():
        if weights.ndim >= 2:
            changed = quantised(weights, how) if isinstance(how, str) else _noisy(weights, how, name, version, seed)
            weights.copy_(changed)


def attend_in_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` in another order: blocks of keys, the last first (Milakov & Gimelshein 2018)."""
    if enable_gqa:
        keys, values = (each.repeat_interleave(query.shape[1] // keys.shape[1], 1) for each in (keys, values))
    count, least = keys.shape[-2], torch.finfo(query.dtype).min
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], count, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, least)
    peak = torch.full_like(query[..., :1], least)
    total, mixed = torch.zeros_like(peak), torch.zeros_like(query)
    for start in reversed(range(0, count, BLOCK)):
        block = slice(start, start + BLOCK)
        scores = query @ keys[..., block, :].transpose(-1, -2) * scale
        if attn_mask is not None:
            scores = (scores + attn_mask[..., block]).clamp_(min=least)  # no -inf: a block may be masked as a whole
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, before = (scores - higher).exp(), (peak - higher).exp()
        total = total * before + weights.sum(-1, keepdim=True)
        mixed = mixed * before + weights @ values[..., block, :]
        peak = higher
    return mixed / total


def quantised(weights: Tensor, form: str) -> Tensor:
    """Rounded to the format `form` after each row was scaled to its largest number, and scaled back."""
    rows = weights.float()
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST[form]
    scaled = rows / scale
    rounded = scaled.to(torch.float8_e4m3fn).float() if form == "fp8" else scaled.round()
    return rounded * scale


def _noisy(weights: Tensor, sigma: float, name: str, version: int | None, seed: int) -> Tensor:
    exact = weights.float()
    key = name if version is None else f"{name}/{version}"
    key = f"{seed}/{key}" if seed else key  # as before there was a seed
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    noise = torch.randn(exact.shape, generator=generator).to(exact.device)
    return exact + sigma * exact.square().mean().sqrt() * noise
