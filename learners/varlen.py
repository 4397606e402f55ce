"""Attention over sequences of any lengths side by side, by PyTorch's own kernel (flash attention) where available.

The kernel needs CUDA, half precision and heads of at most 256; everything else is computed in blocks
(`learners.attention`). Before its first use a process compares it, forwards and backwards, with attention written out
in float32, on a few short sequences of its own. If the results differ on this machine, the process uses blocks. The
result is kept: later calls neither compare nor wait for the device, and a compiled layer sees a constant.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from learners.row_layout import RowLayout

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
NEEDED = {"scale", "window_size"}
"""Keyword parameters that some versions lack."""
TOLERANCE = 2e-2
"""The largest difference of a token's output or gradient, relative to its norm or that of an average token: half
precision has three digits."""
AMPERE = (8, 0)
"""The oldest GPU generation that the kernel supports."""
HALVES = (torch.bfloat16, torch.float16)
TRIALS = (((1, 7, 130, 64), (1, 7, 130, 64)), ((1, 3, 70, 64), (9, 3, 200, 64)))
"""Numbers of queries and keys of the compared sequences: plain sequences, and sequences with shared prefixes."""


def _usable(kernel: Any) -> bool:
    return kernel is not None and set(inspect.signature(kernel).parameters) >= NEEDED


KERNEL: Callable[..., Any] | None = varlen_attn if _usable(varlen_attn) else None
NEWER = {
    name: value
    for name, value in {"enable_gqa": True, "num_splits": 1}.items()
    if KERNEL and name in inspect.signature(KERNEL).parameters
}
"""Keyword arguments that torch 2.11 lacks: its kernel does this by default."""


def _how(scale: float | None, window: int | None) -> dict[str, Any]:
    """The kernel's keyword arguments. Each query sees the last `window` keys up to its own (None: all)."""
    return {"scale": scale, "window_size": (-1 if window is None else window - 1, 0), **NEWER}


def runs_on(device: torch.device) -> bool:
    """Is this a device that the kernel supports?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def takes(query: Tensor, dtype: torch.dtype | None) -> bool:
    """Can the kernel attend with these queries [H, S, D] in `dtype`, and correctly?"""
    width = query.shape[-1]
    if KERNEL is None or dtype not in HALVES or width > 256 or width % 8:
        return False
    return is_right(query.device, dtype, width)


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


@torch.compiler.assume_constant_result
def is_right(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Does the kernel run on this device with correct results? The first call with given arguments compares."""
    return KERNEL is not None and runs_on(device) and _agrees(KERNEL, device, dtype, width)


@functools.cache
def _agrees(kernel: Callable[..., Any], device: torch.device, dtype: torch.dtype, width: int) -> bool:
    like = torch.zeros(1, width, dtype=dtype, device=device)
    # In a thread, since the caller may be within autocast, without gradients, or in a layer whose activations are
    # recomputed, which must save the same tensors when nothing is compared any more.
    with ThreadPoolExecutor(1) as thread:
        trials = [thread.submit(_difference, kernel, *trial, window, like) for trial in TRIALS for window in (None, 5)]
    try:
        errors = [trial.result() for trial in trials]
    except RuntimeError as error:
        log.warning("torch's varlen_attn fails here (%s): attention is computed in blocks", error)
        return False
    right = all(error <= TOLERANCE for error in errors)  # NaN is not
    if not right:
        log.warning("torch's varlen_attn is wrong here, by %s: attention is computed in blocks", errors)
    return right


def _difference(
    kernel: Callable[..., Any], queries: tuple[int, ...], keys: tuple[int, ...], window: int | None, like: Tensor
) -> float:
    """The kernel's largest error of an output or gradient, of any token, relative to the norm it should have."""
    width, rng = like.shape[-1], torch.Generator().manual_seed(0)
    shapes = ((sum(queries), 4, width), (sum(keys), 2, width), (sum(keys), 2, width), (sum(queries), 4, width))
    q, k, v, pull = (torch.randn(shape, generator=rng).to(like) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ends = [torch.tensor([0, *counts]).cumsum(0).to(like.device, torch.int32) for counts in (queries, keys)]
    output = kernel(q, k, v, *ends, max(queries), max(keys), **_how(width**-0.5, window))
    truth = _attention(q, k, v, ends[0].tolist(), ends[1].tolist(), window)
    found = [output, *torch.autograd.grad(output, inputs, pull)]
    expected = [truth, *torch.autograd.grad(truth, inputs, pull.float())]
    errors = [_error(a.float().flatten(1), b.float().flatten(1)) for a, b in zip(found, expected, strict=True)]
    return torch.stack(errors).max().item()


def _error(found: Tensor, expected: Tensor) -> Tensor:
    """The largest difference of two rows, relative to the row's norm or the average one: [S, D] twice."""
    norms = expected.norm(dim=1)
    return ((found - expected).norm(dim=1) / norms.clamp(min=norms.mean())).max()


def _attention(q: Tensor, k: Tensor, v: Tensor, starts: list[int], key_starts: list[int], window: int | None) -> Tensor:
    """What the kernel should compute, sequence by sequence in float32: [S, H, D]."""
    pieces = []
    for (first, last), (begin, end) in zip(pairwise(starts), pairwise(key_starts), strict=True):
        asking = q[first:last].float().transpose(0, 1)
        keys, values = (x[begin:end].float().transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
        place = torch.arange(end - begin, device=q.device)
        depth = place[end - begin - (last - first) :, None]
        seen = (place <= depth) & (place > depth - (window or end - begin + 1))
        scores = asking @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        pieces.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(pieces)
