"""Sizes of a learner's passes on a GPU that the config leaves open, from the GPU's free memory.

They are measured at the first batch: model, optimizer and an engine on the same GPU then have their places. Two trials,
a forward and backward pass each, show how many bytes a token takes; they also have torch compile the layers. Sizes
change the order of sums, so the loop records them in the run's config, and a resume or a replay has the same ones.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_like.models.compiling import Compiling
from areal_like.types import Batch
from learners.logprobs import forward_logprobs, limit_logits
from learners.optim import MasterAdamW
from learners.packing import Columns
from learners.passes import Passes
from learners.sharding import recompute

log = logging.getLogger(__name__)
TRIAL_TOKENS, TRIAL_LOGITS = 2048, 1 << 24
UNIT, LEAST_TOKENS, MOST_TOKENS = 1024, 8192, 65536
"""Tokens of a micro-batch are a multiple of the first. Below the second, layers are recomputed; above the third, a
micro-batch is hardly faster."""
MOST_LOGITS, LOGIT_BYTES = 1 << 30, 16
LOGITS_SHARE, KEPT = 0.25, 0.1
"""Of the room for a pass: for logits. Of the device: stays free, for fragments and for what an engine takes later."""


@dataclass(frozen=True)
class Sizes:
    """The learner's knobs of these names; None: open."""

    micro_batch_tokens: int | None
    max_logits: int | None
    compile: bool | None
    checkpoint_activations: bool | None

    def at_first(self, compiles: bool) -> tuple[int, int, bool, bool]:
        """With what holds before the first batch, and always on a CPU, in place of None."""
        compiled = compiles if self.compile is None else self.compile
        return self.micro_batch_tokens or 16384, self.max_logits or 1 << 26, compiled, bool(self.checkpoint_activations)


class DeviceMemory:
    def __init__(self, device: torch.device):
        self._device = device

    def free(self) -> int:
        """Bytes that this process may take."""
        free, total = torch.cuda.mem_get_info(self._device)
        own = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + own - KEPT * total)

    def peak(self, run: Callable[[], int]) -> tuple[int, int]:
        """What `run` returns, and the bytes that it takes at most."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return run(), torch.cuda.max_memory_allocated(self._device) - before


class Sizing:
    """`given` has None for sizes that are open; `measure` chooses these. `found` then has them, by knob, as it has any
    chosen later for lack of memory, and `announce` is called with text for the user."""

    def __init__(self, given: Sizes, passes: Passes, optimizer: MasterAdamW, compiling: Compiling):
        self._given, self._passes, self._optimizer, self._compiling = given, passes, optimizer, compiling
        self._memory, self._ranks, self._model = DeviceMemory(passes.device), passes.ranks, passes.model
        self.open = passes.device.type == "cuda" and None in vars(given).values()
        self.found: dict[str, int | bool] = {}
        self.announce: Callable[[str], None] = log.info

    def measure(self, batch: Batch, models: Sequence[PreTrainedModel]) -> None:
        """Choose by trials on this rank's share of a batch; `models`: all whose logits are limited. A batch without
        trained tokens chooses nothing."""
        if not self._ranks.max(int(any(sample.loss_mask.any() for sample in batch.samples))):
            return
        self.open, given = False, self._given
        if self._compiling.on:
            self.announce(f"compiling the layers of {type(self._model).__name__}, about 20 s")
        recomputes = bool(given.checkpoint_activations)
        tokens, logits, free = self._fitting(batch)
        if given.checkpoint_activations is None and tokens < max(LEAST_TOKENS, given.micro_batch_tokens or 0):
            recomputes = True
            recompute(self._model)
            tokens, logits, free = self._fitting(batch)
        self._passes.micro_batch_tokens = given.micro_batch_tokens or tokens
        for model in models:
            limit_logits(model, logits)
        chosen = Sizes(self._passes.micro_batch_tokens, logits, self._compiling.on, recomputes)
        self.found = {name: value for name, value in vars(chosen).items() if getattr(given, name) is None}
        text = ", ".join(f"learner.{name}={value}" for name, value in self.found.items())
        self.announce(f"{free / (1 << 30):.1f} GiB free for train steps: {text}")

    def _fitting(self, batch: Batch) -> tuple[int, int, int]:
        """Tokens and logits that fit into the free bytes, and these, of the rank with the least."""
        limit_logits(self._model, TRIAL_LOGITS)
        # The longer trial first: libraries' workspaces then count for it, and a token is not taken for a smaller one.
        (many, high), (few, low) = self._tried(batch, 2 * TRIAL_TOKENS), self._tried(batch, TRIAL_TOKENS)
        per_token = (high - low) / (many - few) if many > few and high > low else high / many
        moments = 0 if self._optimizer.steps else 2 * self._optimizer.gradient.nbytes
        free = -self._ranks.max(-max(0, self._memory.free() - moments))
        room = free - max(0.0, high - per_token * many)
        logits = self._given.max_logits or int(min(MOST_LOGITS, max(TRIAL_LOGITS, LOGITS_SHARE * room / LOGIT_BYTES)))
        fitting = int((room - LOGIT_BYTES * logits) / per_token) // UNIT * UNIT
        return min(MOST_TOKENS, max(UNIT, fitting)), logits, free

    def _tried(self, batch: Batch, most: int) -> tuple[int, int]:
        tokens, peak = self._memory.peak(lambda: self._pass(batch, most))
        return self._ranks.max(tokens), self._ranks.max(peak)

    def _pass(self, batch: Batch, most: int) -> int:
        """A forward and backward pass over the first micro-batch of at most so many tokens; returns their number. It
        leaves no trace."""
        passes, usual = self._passes, self._passes.micro_batch_tokens
        passes.micro_batch_tokens = most
        try:
            part = next(passes.microbatches(Columns(batch), np.arange(len(batch.samples))))
            part = replace(part, experts=None)  # they would be counted
            with passes.precision():
                current, entropy = forward_logprobs(self._model, part, passes.temperature)
            (current.sum() + entropy.sum()).backward()
        finally:
            passes.micro_batch_tokens = usual
            self._optimizer.zero_grad()
        return max(1, part.input_ids.numel())
