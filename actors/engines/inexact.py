"""`inject_mismatch`: weights that differ from the published ones by a set amount, on purpose.

    engine.inject_mismatch: int8       quantised and back: fp8 (e4m3) | int8 | int4, one scale for each row
    engine.inject_mismatch: 0.01       Gaussian noise of 0.01 times each tensor's root mean square, drawn once

So an experiment can vary mismatch and staleness apart. Vectors (norms, biases) stay exact, as quantised servers keep
them. Each actor has the same weights, again after a resume.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest number of each format."""


@torch.no_grad()
def perturb(parameters: Mapping[str, Tensor], how: str | float) -> None:
    """Change the matrices among the parameters in place."""
    for name, weights in parameters.items():
        if weights.ndim >= 2:
            weights.copy_(quantised(weights, how) if isinstance(how, str) else _noisy(weights, how, name))


def quantised(weights: Tensor, form: str) -> Tensor:
    """Rounded to the format `form` after each row was scaled to its largest number, and scaled back."""
    rows = weights.float()
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST[form]
    scaled = rows / scale
    rounded = scaled.to(torch.float8_e4m3fn).float() if form == "fp8" else scaled.round()
    return rounded * scale


def _noisy(weights: Tensor, sigma: float, name: str) -> Tensor:
    exact = weights.float()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(exact.shape, generator=generator).to(exact.device)
    return exact + sigma * exact.square().mean().sqrt() * noise
