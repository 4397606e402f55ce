"""Models that compute in float64 throughout, for claims of equality that rounding must not blur. transformers' norms
and rotary angles go through float32 in a model of any dtype; here they do not. Two orders of summation then differ by
1e-16 of the terms, far below AdamW's `eps`."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.rounding import adamw_moved, summed

ADAMW_EPS = 1e-6
"""For tests that compare what comes of several steps: AdamW blows rounding up by lr/eps."""
SUMMED = summed(torch.float64, length=2048, depth=40, scale=0.1)
"""A gradient of a tiny model from given weights: its sums go over at most 2,048 tokens and 64 inputs, and 2 layers of 7
matrices, norms, attention and the head, forwards and backwards, are some 40 of them; entries are of size 0.1."""
STEPPED = {"rtol": 1e-7, "atol": 3 * adamw_moved(SUMMED["atol"], lr=1e-2, eps=ADAMW_EPS)}
"""Weights after up to three steps with `ADAMW_EPS` and lr ≤ 0.01 (1e-8), and what is computed from them, where a
weight's error may grow tenfold."""


class _Norm(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return self.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class _Rotary(nn.Module):
    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].to(states.dtype) * self.inv_freq.to(states.dtype)
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """Change the model in place to compute in float64 throughout, with the same weights."""
    for module in model.double().modules():
        for ending, replacement in (("RMSNorm", _Norm), ("RotaryEmbedding", _Rotary)):
            if type(module).__name__.endswith(ending):
                module.__class__ = replacement
    return model
