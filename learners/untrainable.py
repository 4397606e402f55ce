"""A batch that cannot be trained because of its data: the buffer sets it aside, and the run continues with another.

A trainer that raises `Untrainable` is in its state from before the batch, without any gradient of it; so are all ranks.
The loop in `learners.main` has the buffer set the batch aside (`buffer.set_aside`) and asks for another. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from areal_like.types import Batch

DATA_FAULTS = (ArithmeticError, LookupError, RuntimeError, ValueError)
"""Errors that a batch's data may cause in a train step; files, memory and programs cause others."""


class Untrainable(RuntimeError):
    """`moved`: the batch failed after one of its optimizer steps, so the weights have changed."""

    def __init__(self, text: str, moved: bool = False):
        super().__init__(text)
        self.moved = moved


def unknown_tokens(batch: Batch, vocab_size: int) -> str:
    """Describes a token of the batch that the model does not know; empty if it knows all."""
    for group in batch.groups:
        for sample in group.samples:
            least, most = int(sample.tokens.min()), int(sample.tokens.max())
            if least < 0 or most >= vocab_size:
                return (
                    f"group {group.id} has the token {least if least < 0 else most}, and the model knows {vocab_size}: "
                    "does the actor that made it use the same task and model?"
                )
    return ""


def is_of_the_data(error: BaseException) -> bool:
    """False for errors after which this process cannot use the GPU: "CUDA error: device-side assert triggered"."""
    return isinstance(error, DATA_FAULTS) and "CUDA error" not in str(error)


@contextmanager
def or_untrainable(
    batch: Batch, fault_of: Callable[[Batch], str], ranks: Any, forget: Callable[[], None], moved: Callable[[], bool]
) -> Iterator[None]:
    """Turn a fault of the batch's data into Untrainable, on all `ranks` alike. `fault_of` describes one that can be
    seen before the step (empty: none); each rank looks at its own share. `forget` discards the begun step; `moved`:
    have the weights changed? An error on one rank in the middle of a step passes unchanged, since others may
    wait for that rank."""
    try:
        if fault := next(filter(None, ranks.gathered(fault_of(batch))), ""):
            raise Untrainable(f"batch {batch.index} can't be trained: {fault}")
        yield
    except Exception as error:
        forget()
        if isinstance(error, Untrainable) or ranks.count > 1 or not is_of_the_data(error):
            raise
        text = f"batch {batch.index} can't be trained: {type(error).__name__}: {error}"
        raise Untrainable(text, moved()) from error
