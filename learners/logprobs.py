"""Logprobs and entropies of trained tokens under a model, from one packed forward pass.

The output head runs on the positions that predict a trained token only, some of them at a time: logits of a large
vocabulary are never whole in memory. What a piece of them gives is two numbers per token; the backward pass makes the
piece again. Temperature is applied as the engines apply it: logits / temperature, so the numbers compare with the
behaviour logprobs that came with the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
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


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(states.to(weight.dtype), weight, bias)


class _Chosen(torch.autograd.Function):
    """Logprobs and entropies of tokens under a linear head, `rows` of them at a time, without logits in the graph.

    Multiplied in the dtype of the weights whatever autocast says: ratios that losses clip within a few thousandths need
    more digits than half precision has. Kept for the backward pass are the logprobs of all words where they are made in
    one piece; else they are made again.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        """`states` [N, H], `weight` [V, H], `bias` [V], `targets` int64 [N] → [N] twice."""
        found = []
        with torch.autocast(states.device.type, enabled=False):
            for some, wanted in zip(states.split(rows), targets.split(rows), strict=True):
                logprobs = _Chosen._logprobs(some, weight, bias, temperature)
                chosen = logprobs.gather(-1, wanted[:, None])[:, 0]
                # A probability of 0 would give 0 · −inf.
                logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)
                found.append((chosen, -torch.einsum("nv,nv->n", logprobs.exp(), logprobs)))
        whole = logprobs if len(found) == 1 else None
        chosen, entropy = (torch.cat(column) for column in zip(*found, strict=True))
        ctx.save_for_backward(states, weight, bias, targets, entropy, whole)
        ctx.temperature, ctx.rows = temperature, rows
        return chosen, entropy

    @staticmethod
    def _logprobs(states: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
        logits = _logits(states, weight, bias).div_(temperature)
        return logits.sub_(logits.logsumexp(-1, keepdim=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_chosen: Tensor, for_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """d chosen / d logit = 1[target] − p; d entropy / d logit = −p (log p + entropy)."""
        states, weight, bias, targets, entropy, whole = ctx.saved_tensors
        of_states, of_weight = torch.empty_like(states), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(states), ctx.rows):
            part = slice(start, start + ctx.rows)
            logprobs = _Chosen._logprobs(states[part], weight, bias, ctx.temperature) if whole is None else whole
            pull, push = for_chosen[part, None], for_entropy[part, None]
            gradient = logprobs.exp()
            if push.any():
                gradient.mul_(-pull - push * (logprobs + entropy[part, None]))
            else:
                gradient.mul_(-pull)
            gradient.scatter_add_(1, targets[part, None], pull)
            gradient.div_(ctx.temperature)
            of_states[part] = gradient @ weight
            of_weight.addmm_(gradient.t(), states[part].to(weight.dtype))
            if of_bias is not None:
                of_bias += gradient.sum(0)
        return of_states, of_weight, of_bias, None, None, None


class LogprobHead:
    """In place of a head's `forward`: states [1, N, H] → logprob and entropy of each, [1, N, 2], where `targets` int64
    [N] are set; logits where they are not. At most `max_logits` logits are made at once (but those of one token)."""

    def __init__(self, head: nn.Module, vocabulary: int, max_logits: int):
        self._head, self._forward, self._rows = head, head.forward, max(1, max_logits // vocabulary)
        self.targets: Tensor | None = None
        self.temperature = 1.0

    def __call__(self, states: Tensor) -> Tensor:
        if self.targets is None:
            return self._forward(states)
        targets, temperature = self.targets, self.temperature
        if type(self._head) is nn.Linear and len(targets):
            weight, bias = self._head.weight, self._head.bias
            found = _Chosen.apply(states[0], weight, bias, targets, temperature, self._rows)
            return torch.stack(found, -1)[None]
        if len(targets) <= self._rows:
            return self._piece(states, targets, temperature)
        pieces = [
            checkpoint(self._piece, piece, some, temperature, use_reentrant=False, preserve_rng_state=False)
            for piece, some in zip(states.split(self._rows, 1), targets.split(self._rows), strict=True)
        ]
        return torch.cat(pieces, 1)

    def _piece(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Of a head that is more than a matrix, such as one with an adapter."""
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
    head.forward = LogprobHead(head, model.config.vocab_size, max_logits)


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
