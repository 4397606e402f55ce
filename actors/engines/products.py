"""Products with a model's matrices on the CPU or a GPU: `x W^T + b`, by the fastest library for their size and dtype.

torch's float32 products on the CPU go through MKL, which reaches at most half of an AMD core's peak; oneDNN reaches
most of it, but costs 10 µs more per call. bfloat16 products are oneDNN's in torch as well.
"""

from __future__ import annotations

from collections.abc import Callable
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
    single = weight.dtype == torch.float32

    def onednn(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")

    def from_two_rows(x: torch.Tensor) -> torch.Tensor:
        return onednn(x) if len(x) > 1 else onednn(x.repeat(2, 1))[:1]

    def by_blocks(x: torch.Tensor) -> torch.Tensor:
        blocks = F.pad(x, (0, 0, 0, -len(x) % BLOCK)).split(BLOCK)
        return torch.cat([onednn(block) for block in blocks])[: len(x)]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(weight.dtype), weight, bias)

    if batch_invariant:
        return _with_residual(from_two_rows if single else by_blocks)
    if not single:
        return _with_residual(rounded)
    # The choice must not depend on time measured here: equal runs have equal bits.
    if weight.device.type == "cpu" and weight.numel() >= ONEDNN_FROM and torch.backends.mkldnn.is_available():
        return _with_residual(onednn)

    def plain(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        plus = bias if residual is None else residual
        return torch.mm(x, weight.t()) if plus is None else torch.addmm(plus, x, weight.t())

    return plain


def _with_residual(multiply: Callable[[torch.Tensor], torch.Tensor]) -> Product:
    def call(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = multiply(x)
        return out if residual is None else residual.add_(out)

    return call
