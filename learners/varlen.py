"""Attention over sequences of any lengths side by side, by PyTorch's own kernel (flash attention) where available.

The kernel needs CUDA, half precision and heads of at most 256; everything else is computed in blocks
(`learners.attention`). A process compares its first call with those blocks, and stops using the kernel if the results
differ on this machine.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learners.layout import Layout

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
NEEDED = {"scale", "window_size", "enable_gqa", "num_splits"}
"""Keyword parameters that some versions lack."""
TOLERANCE = 2e-2
"""Half precision has three digits."""
AMPERE = (8, 0)
"""The oldest GPU generation that the kernel supports."""


def _usable(kernel: Any) -> bool:
    return kernel is not None and set(inspect.signature(kernel).parameters) >= NEEDED


KERNEL: Callable[..., Any] | None = varlen_attn if _usable(varlen_attn) else None


class Trust:
    """Result of the first call, for plain sequences and for shared prefixes; None before that call."""

    agrees: bool | None = None
    agrees_shared: bool | None = None


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Can the kernel compute these?"""
    if KERNEL is None or Trust.agrees is False or not query.is_cuda:
        return False
    halves = all(x.dtype in (torch.bfloat16, torch.float16) for x in (query, key, value))
    width = query.shape[-1]
    return halves and width <= 256 and width % 8 == 0 and torch.cuda.get_device_capability(query.device) >= AMPERE


def attend(inputs: tuple[Tensor, Tensor, Tensor], layout: Layout, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention: [H, S, D] over [K, S, D] (twice) → [S, H, D]. Where prefixes are shared, keys and values are
    laid out path by path; the kernel aligns the last query of a sequence with its last key. The kernel's splits are
    turned off: a sequence's result must not depend on its neighbours."""
    assert KERNEL
    q, k, v = (x.transpose(0, 1).contiguous() for x in inputs)
    key_ends, longest_key = layout.ends, layout.longest
    if layout.paths is not None and layout.path_ends is not None:
        k, v = k[layout.paths], v[layout.paths]
        key_ends, longest_key = layout.path_ends, layout.longest_path
    left = -1 if window is None else window - 1
    how = {"scale": scaling, "window_size": (left, 0), "enable_gqa": q.shape[1] != k.shape[1], "num_splits": 1}
    return KERNEL(q, k, v, layout.ends, key_ends, layout.longest, longest_key, **how)


def is_right(output: Tensor, truth: Callable[[], Tensor], *, shared: bool = False) -> bool:
    """Does the kernel compute the right thing on this machine? Only the first call of each kind compares."""
    kind = "agrees_shared" if shared else "agrees"
    if getattr(Trust, kind) is None:
        with torch.no_grad():
            setattr(Trust, kind, torch.allclose(output, truth(), rtol=TOLERANCE, atol=TOLERANCE))
        if not getattr(Trust, kind):
            log.warning("torch's varlen_attn disagrees with scaled_dot_product_attention here: falling back to blocks")
            Trust.agrees = False
    return getattr(Trust, kind)
