"""Attention over sequences of any lengths side by side, by PyTorch's own kernel (flash attention) where available: on
CUDA, in half precision, with heads of at most 256. Everything else is computed in blocks (`learners.attention`), as is
all attention of a process in which the kernel fails at its first call."""

import functools
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from learners.row_layout import RowLayout

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
AMPERE = (8, 0)
"""The oldest GPU generation that the kernel supports."""
HALVES = (torch.bfloat16, torch.float16)
_KNOWN = set(inspect.signature(varlen_attn).parameters) if varlen_attn is not None else set()
KERNEL: Callable[..., Any] | None = varlen_attn if {"scale", "window_size"} <= _KNOWN else None
"""None: an older torch, whose kernel lacks a parameter."""
NEWER = {name: value for name, value in {"enable_gqa": True, "num_splits": 1}.items() if name in _KNOWN}
"""Keyword arguments that torch 2.11 lacks: its kernel does this by default."""


def _how(scale: float | None, window: int | None) -> dict[str, Any]:
    """The kernel's keyword arguments. Each query sees the last `window` keys up to its own (None: all)."""
    return {"scale": scale, "window_size": (-1 if window is None else window - 1, 0), **NEWER}


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


@torch.compiler.assume_constant_result
def takes(device: torch.device, width: int, dtype: torch.dtype | None) -> bool:
    """Can the kernel attend here, with heads of this width, in `dtype`?"""
    if KERNEL is None or dtype not in HALVES or width > 256 or width % 8:
        return False
    return runs_on(device) and _works(KERNEL, device, dtype, width)


def attend(
    inputs: tuple[Tensor, Tensor, Tensor], layout: RowLayout, scaling: float | None, window: int | None
) -> Tensor:
    """Causal attention: [H, S, D] over [K, S, D] (twice), all in half precision → [S, H, D]. Where prefixes are shared,
    keys and values are laid out path by path; the kernel aligns the last query of a sequence with its last key. The
    kernel's splits are turned off: a sequence's result must not depend on its neighbours."""
    assert KERNEL
    q, k, v = (x.transpose(0, 1).contiguous() for x in inputs)
    key_ends, longest_key = layout.ends, layout.longest
    if layout.paths is not None and layout.path_ends is not None:
        k, v = k[layout.paths], v[layout.paths]
        key_ends, longest_key = layout.path_ends, layout.longest_path
    return KERNEL(q, k, v, layout.ends, key_ends, layout.longest, longest_key, **_how(scaling, window))


@functools.cache
def _works(kernel: Callable[..., Any], device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Does the kernel attend, forwards and backwards, with two short sequences?"""

    def attend() -> None:
        q, k, v = (torch.randn(10, heads, width, dtype=dtype, device=device, requires_grad=True) for heads in (4, 2, 2))
        ends = torch.tensor([0, 3, 10], dtype=torch.int32, device=device)
        kernel(q, k, v, ends, ends, 7, 7, **_how(None, 5)).sum().backward()

    # In a thread, since the caller may be within autocast, without gradients, or in a layer whose activations are
    # recomputed, which must save the same tensors at the second call.
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(attend).result()
    except RuntimeError as error:
        log.warning("torch's varlen_attn fails here (%s): attention is computed in blocks", error)
        return False
    return True
