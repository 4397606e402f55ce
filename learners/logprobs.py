"""Logprobs and entropies of trained tokens under a model, from one packed forward pass.

The output head runs on the positions that predict a trained token only, some of them at a time: logits of a large
vocabulary are never whole in memory. What a piece of them gives is two numbers per token; the backward pass makes the
piece again. Temperature is applied as the engines apply it: logits / temperature, so the numbers compare with the
behaviour logprobs that came with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from learners.packing import MicroBatch

CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Keys of models that change logits behind their head."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` int64 [N] and entropies (nats), float32 [N] (float64 of such), from logits [N, V]."""
    logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    # A probability of 0 would give 0 · −inf.
    entropy = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)
    return chosen, entropy


class LogprobHead:
    """In place of a head's `forward`: states [1, N, H] → logprob and entropy of each, [1, N, 2], where `targets` int64
    [N] are set; logits where they are not. At most `max_logits` logits are made at once (but those of one token)."""

    def __init__(self, forward: Callable[[Tensor], Tensor], vocabulary: int, max_logits: int):
        self._forward, self._rows = forward, max(1, max_logits // vocabulary)
        self.targets: Tensor | None = None
        self.temperature = 1.0

    def __call__(self, states: Tensor) -> Tensor:
        if self.targets is None:
            return self._forward(states)
        targets, temperature = self.targets, self.temperature
        if len(targets) <= self._rows:
            return self._piece(states, targets, temperature)
        pieces = [
            checkpoint(self._piece, piece, some, temperature, use_reentrant=False, preserve_rng_state=False)
            for piece, some in zip(states.split(self._rows, 1), targets.split(self._rows), strict=True)
        ]
        return torch.cat(pieces, 1)

    def _piece(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logprobs, entropy = token_logprobs(self._forward(states)[0], targets, temperature)
        return torch.stack([logprobs[None], entropy[None]], -1)


def use_logprob_head(model: PreTrainedModel, max_logits: int) -> None:
    """Make a model's head give logprobs in pieces. Raises ValueError for models whose logits are not their head's."""
    changed = [key for key in CHANGES_LOGITS if getattr(model.config, key, None) is not None]
    if changed or max_logits < 1:
        raise ValueError(
            f"max_logits must be positive (got {max_logits}), and the model must not change logits {changed}"
        )
    head = model.get_output_embeddings()
    head.forward = LogprobHead(head.forward, model.config.vocab_size, max_logits)


def forward_logprobs(model: PreTrainedModel, microbatch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies, float32 [N], of a micro-batch's trained tokens.

    The model must have been through `learners.attention.use_packed_attention` and `use_logprob_head`.
    """
    return _forward(model, microbatch, temperature)[:2]


def forward_with_states(
    model: PreTrainedModel, microbatch: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `forward_logprobs`, and the last hidden states [N, hidden size] from which each token was chosen."""
    logprobs, entropy, output = _forward(model, microbatch, temperature, output_hidden_states=True)
    return logprobs, entropy, output.hidden_states[-1][0][microbatch.outputs]


def _forward(
    model: PreTrainedModel, microbatch: MicroBatch, temperature: float, **more: Any
) -> tuple[Tensor, Tensor, Any]:
    head: nn.Module = model.get_output_embeddings()
    state: LogprobHead = head.forward  # type: ignore[assignment]
    state.targets, state.temperature = microbatch.targets, temperature
    try:
        output = model(
            input_ids=microbatch.input_ids,
            position_ids=microbatch.position_ids,
            use_cache=False,
            logits_to_keep=microbatch.outputs,
            layout=microbatch.layout,
            **more,
        )
    finally:
        state.targets = None
    logprobs, entropy = output.logits[0].unbind(-1)
    return logprobs, entropy, output
