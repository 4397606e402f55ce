"""Products with a model's matrices on the CPU or a GPU: `x W^T + b`, by the fastest library for their size and dtype.

torch's float32 products on the CPU go through MKL, which reaches half of an AMD core's peak, or less; oneDNN reaches
most of it on any x86 processor, and takes the weights as stored. It costs 10 µs more per call, too much for tiny
matrices. bfloat16 products are oneDNN's in torch as well.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

ONEDNN_FROM = 1 << 16
"""Elements of a matrix from which oneDNN is faster than MKL, measured with 64 rows."""


BLOCK = 64
"""Rows of one product where their number must be the same: 32 cost 3.5 times as much for the 512 rows of a prefill,
64 cost 2.4 times; for two rows 64 cost 1.4 times as much."""


class Product(Protocol):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, in] → [n, out]; with `residual` float32 [n, out], the sum of both, which may be in its memory."""
        ...


def product(weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False) -> Product:
    """The product with a matrix [out, in]. Its memory is read at each call, so new values count.
    `batch_invariant`, on a CPU: a row's result does not depend on the other rows. In float32 oneDNN keeps to that from
    two rows on, in bfloat16 only where their number is the same; MKL has other kernels for the last few rows."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if batch_invariant:
        invariant = _FromTwoRows if weight.dtype == torch.float32 else _RowBlocks
        return invariant(_OneDnn(weight, bias))
    if weight.dtype != torch.float32:
        return _Rounded(weight, bias)
    # The choice must not depend on time measured here: equal runs have equal bits.
    if weight.device.type == "cpu" and weight.numel() >= ONEDNN_FROM and torch.backends.mkldnn.is_available():
        return _OneDnn(weight, bias)
    return _Plain(weight, bias)


class _FromTwoRows:
    """oneDNN is row-invariant only for >= 2 rows: duplicates a single row."""

    def __init__(self, product: Product):
        self._product = product

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) > 1:
            return self._product(x, residual)
        out = self._product(x.repeat(2, 1))[:1]
        return out if residual is None else residual.add_(out)


class _RowBlocks:
    """As many rows at a time as `BLOCK`, zeros included."""

    def __init__(self, product: Product):
        self._product = product

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        blocks = F.pad(x, (0, 0, 0, -len(x) % BLOCK)).split(BLOCK)
        out = torch.cat([self._product(block) for block in blocks])[: len(x)]
        return out if residual is None else residual.add_(out)


class _Plain:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._transposed, self._bias = weight.t(), bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        plus = self._bias if residual is None else residual
        assert residual is None or self._bias is None
        return torch.mm(x, self._transposed) if plus is None else torch.addmm(plus, x, self._transposed)


class _OneDnn:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x.to(self._weight.dtype), self._weight, self._bias, "none", [], "")
        return out if residual is None else residual.add_(out)


class _Rounded:
    """In the weights' dtype; what comes in is rounded to it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = F.linear(x.to(self._weight.dtype), self._weight, self._bias)
        return out if residual is None else residual.add_(out)
