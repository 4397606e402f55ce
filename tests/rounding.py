"""How far apart two computations of one thing may come out: tolerances derived from the precision, the length of the
sums and the size of their terms, so that they hold on every CPU and with every kernel.

Two kinds of claim:
- *Equal but for rounding*: compute in float64 (`tests.learners.exact`) and compare by `summed`.
- *float32 or bfloat16 lose no more than they must*: compare both ways with the float64 truth by `assert_rounds_alike`.
  (AdamW makes a move of size lr out of any gradient above its `eps`, and so out of the rounding of a zero.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CONFIDENCE = 8.0
"""λ of `summed`: an error above the bound has a probability below 2·exp(−λ²/2) = 3e-14 for each number compared."""


def summed(dtype: torch.dtype, length: int, depth: int = 1, scale: float = 1.0) -> dict[str, float]:
    """`rtol` and `atol` for numbers that come out of `depth` sums of at most `length` products, one fed by another.

    A sum of n products rounded to precision u is off by at most λ·√n·u·Σ|terms| (Higham & Mary 2019, doi
    10.1137/18M1226312: rounding errors are independent with mean 0); two orders of summation by twice that, 2·u = eps.
    `depth` sums in a chain add up. `scale` is the size of the terms where they cancel: the largest of the numbers.
    """
    relative = CONFIDENCE * length**0.5 * depth * torch.finfo(dtype).eps
    return {"rtol": relative, "atol": relative * scale}


def adamw_moved(gradient_atol: float, lr: float, eps: float = 1e-8) -> float:
    """How far apart weights may be after one step of AdamW on gradients that differ by `gradient_atol`: the first step
    is lr·g/(|g| + eps); its slope in g is at most lr/eps, and it never exceeds 2·lr."""
    return min(2 * lr, lr * gradient_atol / eps)


def assert_rounds_alike(
    found: Tensor | Sequence[Tensor], plain: Tensor | Sequence[Tensor], truth: Tensor | Sequence[Tensor]
) -> None:
    """`found` is no further from `truth` (L2, relative) than three times what `plain` is, which has the same precision.

    Both have errors of the same distribution, of which norms over many numbers differ little; an error of another kind
    is larger by orders. Where the plain way rounds by luck not at all, one unit in the last place of the result is let.
    """
    flat = [_flat(found), _flat(plain), _flat(truth)]
    off, least = (flat[0] - flat[2]).norm(), (flat[1] - flat[2]).norm()
    size = flat[2].norm() * torch.finfo(torch.float32).eps
    assert off <= 3 * least + size, f"off by {off:.3g}, where the plain way is by {least:.3g}"


def _flat(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    parts = [tensors] if isinstance(tensors, Tensor) else tensors
    return torch.cat([part.detach().double().flatten() for part in parts])
