"""Log-probabilities of given tokens, and of the likeliest ones beside them, from a model's logits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

POSITIONS = 256
"""Positions whose logits are worked on at once: they are as large as the vocabulary."""


class Ranked(NamedTuple):
    """What a model says of a sequence of n tokens, at temperature 1: `logprobs` float32 [n - 1] of all but the first;
    `top` int64 [n, k] and `top_logprobs` float32 [n, k]: the likeliest tokens after each one, the likeliest first."""

    logprobs: np.ndarray
    top: np.ndarray
    top_logprobs: np.ndarray


def ranked(logits: torch.Tensor, sequences: Sequence[np.ndarray], most: int) -> list[Ranked]:
    """`logits` [b, t, vocab] after each token of b sequences, padded to t → of each sequence its `most` likeliest."""
    width = logits.shape[1]
    chosen = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, tokens in zip(chosen, sequences, strict=True):
        row[: len(tokens) - 1] = torch.from_numpy(tokens[1:].astype(np.int64))
    parts: list[tuple[torch.Tensor, ...]] = []
    for at in range(0, width, POSITIONS):
        part = logits[:, at : at + POSITIONS].float()
        scale = part.logsumexp(-1, keepdim=True)
        top = part.topk(most, dim=-1)
        known = part.gather(-1, chosen[:, at : at + POSITIONS, None].to(part.device))
        parts.append(((known - scale)[..., 0], top.indices, top.values - scale))
    logprobs, tokens, values = (torch.cat(each, dim=1).cpu().numpy() for each in zip(*parts, strict=True))
    lengths = [len(each) for each in sequences]
    return [Ranked(logprobs[row, : n - 1], tokens[row, :n], values[row, :n]) for row, n in enumerate(lengths)]
