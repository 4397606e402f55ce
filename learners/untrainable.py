"""A batch that can't be trained, through a fault of its data: it is set aside, and the run goes on with another.

A trainer says so by raising `Untrainable`, and is then as it was before the batch, without a gradient of it; so are all
ranks of it. The loop in `learners.main` has the buffer set the batch aside (`buffer.set_aside`) and asks for others in
its place. Without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from areal_like.types import Batch

DATA_FAULTS = (ArithmeticError, LookupError, RuntimeError, ValueError)
"""What the data of a batch may make a train step raise; files, memory and programs that do not fit raise others."""


class Untrainable(RuntimeError):
    """`moved`: the batch failed after an optimizer step of its own, so the weights are not those before it."""

    def __init__(self, text: str, moved: bool = False):
        super().__init__(text)
        self.moved = moved


def unknown_tokens(batch: Batch, vocab_size: int) -> str:
    """Which token of a batch the model does not know, in words; empty where it knows all."""
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
    """Not so for what leaves a GPU unusable for this process: "CUDA error: device-side assert triggered" and such."""
    return isinstance(error, DATA_FAULTS) and "CUDA error" not in str(error)


@contextmanager
def or_untrainable(
    batch: Batch, vocab_size: int, ranks: Any, forget: Callable[[], None], moved: Callable[[], bool]
) -> Iterator[None]:
    """Raises Untrainable for a fault of the batch's data, on all `ranks` alike; `forget` lets go of what was begun, and
    `moved` says whether the weights have. What shows on one rank in the middle of a step is raised as it is, since
    others may wait for that rank."""
    try:
        if fault := next(filter(None, ranks.gathered(unknown_tokens(batch, vocab_size))), ""):
            raise Untrainable(f"batch {batch.index} can't be trained: {fault}")
        yield
    except Exception as error:
        forget()
        if isinstance(error, Untrainable) or ranks.count > 1 or not is_of_the_data(error):
            raise
        text = f"batch {batch.index} can't be trained: {type(error).__name__}: {error}"
        raise Untrainable(text, moved()) from error
