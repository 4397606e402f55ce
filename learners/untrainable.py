"""A batch that cannot be trained because of its data: the buffer sets it aside, and the run continues with another.

A trainer that raises `Untrainable` is in its state from before the batch, without any gradient of it; so are all ranks.
The loop in `learners.main` has the buffer set the batch aside (`buffer.set_aside`) and asks for another. No torch.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from areal_like.errors import UserError
from areal_like.types import Batch

log = logging.getLogger(__name__)

DATA_FAULTS = (ArithmeticError, LookupError, RuntimeError, ValueError)
"""Errors that a batch's data may cause in a train step; files, memory and programs cause others."""


class Untrainable(RuntimeError):
    """`moved`: the batch failed after one of its optimizer steps, so the weights have changed."""

    def __init__(self, text: str, moved: bool = False):
        super().__init__(text)
        self.moved = moved


class Interrupted(Untrainable):
    """The run was asked to end in the middle of a train step."""


class OutOfMemory(UserError):
    """A batch does not fit into the device's memory, nor does it in smaller micro-batches."""


def is_of_the_data(error: BaseException) -> bool:
    """False for a lack of memory, and for errors after which this process cannot use the GPU: "CUDA error: device-side
    assert triggered"."""
    return isinstance(error, DATA_FAULTS) and not re.search(r"CUDA error|out of memory|not enough memory", str(error))


def unknown_tokens(batch: Batch, vocab_size: int) -> str:
    """Describes a token of the batch that the model does not know; empty if it knows all."""
    for group in batch.groups:
        for sample in group.samples:
            for token in (int(sample.tokens.min()), int(sample.tokens.max())):
                if not 0 <= token < vocab_size:
                    return f"group {group.id}: got the token {token}, expected 0 to {vocab_size - 1}"
    return ""


class SettingAside:
    """Has the buffer replace untrainable batches, but not `run.max_untrainable` in a row."""

    def __init__(self, client: Any, config: Any):
        # A replay or a fixed age allows no other batch.
        self._possible = not (config.replay or config.inject_staleness is not None)
        self._client, self._most = client, config.run.max_untrainable
        self.in_a_row = 0

    def replace(self, index: int, fault: Untrainable) -> None:
        """Raises RuntimeError if batch `index` cannot be replaced, or too many failed in a row."""
        if not self._possible:
            raise fault
        log.warning("step %d: %s", index + 1, fault, exc_info=fault.__cause__)
        self._client.set_aside(index, str(fault))
        self.in_a_row += 1
        if fault.moved:
            raise RuntimeError(f"{fault}. It failed after one of its optimizer steps: training cannot continue")
        if self.in_a_row >= self._most:
            raise RuntimeError(f"{self._most} batches in a row (run.max_untrainable) were set aside: {fault}")
