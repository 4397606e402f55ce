"""A critic: a linear value head on the policy's own last hidden states. The learner drives it.

`V(state)` is computed at the position of the next token's logits. So a value belongs to the state in which a token was
chosen, and costs one dot product beside the policy's forward pass. The head starts at 0, has its own AdamW, is never
published, and is part of the checkpoint. Every rank of a learner has the same head, and sums its gradient over ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_like.types import Batch, Sample
from learners.collectives import Ranks


class Critic:
    """`lr` > 0 is the head's learning rate. `trunk` scales the value loss's gradient into the policy's weights; 0: only
    the policy loss trains the policy. `clip` bounds how far a value moves in a train step (None: not at all)."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks, *, lr: float, trunk: float, clip: float | None = None):
        dtype = torch.promote_types(model.dtype, torch.float32)
        self._head = nn.Linear(model.config.hidden_size, 1, device=model.device, dtype=dtype)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=lr, weight_decay=0.0)
        self._trunk, self._clip, self._ranks = trunk, clip, ranks

    def values(self, hidden: Tensor) -> Tensor:
        """Values [N] of states [N, hidden size]."""
        inputs = hidden.detach()
        if self._trunk and hidden.requires_grad:
            inputs = inputs + self._trunk * (hidden - inputs)
        return self._head(inputs.to(self._head.weight.dtype))[:, 0]

    def loss(
        self, values: Tensor, before: Tensor, targets: Tensor, share: Tensor | None, denominator: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Half the squared error, summed over tokens with their shares and divided: a scalar; and what it observes.

        `before` has the values at the start of the step. With `clip`, a token's error is the larger of two: that of its
        value, and that of its value cut to `before` ± clip. So a value that moved further towards its target has no
        gradient. This is PPO2's value clipping (OpenAI baselines), as in TRL, verl and AReaL.
        """
        errors = (values - targets) ** 2
        observed = {"value_error": errors.detach()}
        if self._clip is not None:
            clipped = (before + (values - before).clamp(-self._clip, self._clip) - targets) ** 2
            observed["value_clip_share"] = clipped.detach() > errors.detach()
            errors = torch.maximum(errors, clipped)
        return 0.5 * (errors if share is None else errors * share).sum() / denominator, observed

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Make one step; skip a gradient that is not finite."""
        for p in self._head.parameters():
            if p.grad is not None:
                self._ranks.sum_tensor(p.grad)
        if all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in self._head.parameters()):
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"head": self._head.state_dict(), "adamw": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["adamw"])


def one_token_further(batch: Batch) -> tuple[Batch, np.ndarray]:
    """The batch with one more trained token at the end of each answer that was cut at the limit of length and has
    trained tokens; and bool [M]: which trained tokens are the added ones. An added token would be chosen in the state
    after the answer."""
    chosen = [s.finish == "length" and bool(s.loss_mask.any()) for s in batch.samples]
    flags = iter(chosen)
    groups = [replace(g, samples=[_longer(s) if next(flags) else s for s in g.samples]) for g in batch.groups]
    further = replace(batch, groups=groups)
    trained = np.array([np.count_nonzero(s.loss_mask) for s in further.samples], np.int64)
    behind = np.zeros(trained.sum(), bool)
    behind[np.cumsum(trained)[chosen] - 1] = True
    return further, behind


def _longer(sample: Sample) -> Sample:
    """With one more token, 0, whose id and logprob are never used."""
    version, n = sample.runs[-1]
    return replace(
        sample,
        tokens=np.append(sample.tokens, sample.tokens.dtype.type(0)),
        logprobs=np.append(sample.logprobs, np.float32(0.0)),
        loss_mask=np.append(sample.loss_mask, True),
        runs=[*sample.runs[:-1], (version, n + 1)],
    )
