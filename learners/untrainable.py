"""A batch that cannot be trained because of its data: the buffer sets it aside, and the run continues with another.

A trainer that raises `Untrainable` is in its state from before the batch, without any gradient of it; so are all ranks.
The loop in `learners.main` has the buffer set the batch aside (`buffer.set_aside`) and asks for another. No torch.
"""

from __future__ import annotations

from areal_like.types import Batch

DATA_FAULTS = (ArithmeticError, LookupError, RuntimeError, ValueError)
"""Errors that a batch's data may cause in a train step; files, memory and programs cause others."""


class Untrainable(RuntimeError):
    """`moved`: the batch failed after one of its optimizer steps, so the weights have changed."""

    def __init__(self, text: str, moved: bool = False):
        super().__init__(text)
        self.moved = moved


def is_of_the_data(error: BaseException) -> bool:
    """False for errors after which this process cannot use the GPU: "CUDA error: device-side assert triggered"."""
    return isinstance(error, DATA_FAULTS) and "CUDA error" not in str(error)


def unknown_tokens(batch: Batch, vocab_size: int) -> str:
    """Describes a token of the batch that the model does not know; empty if it knows all."""
    for group in batch.groups:
        for sample in group.samples:
            for token in (int(sample.tokens.min()), int(sample.tokens.max())):
                if not 0 <= token < vocab_size:
                    return f"group {group.id}: got the token {token}, expected 0 to {vocab_size - 1}"
    return ""
