"""From logits to tokens and behaviour logprobs, for all sequences of a decode step at once. Pure."""

from __future__ import annotations

import numpy as np
import torch


def sample(logits: torch.Tensor, temperatures: np.ndarray, draws: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """One token per row of logits [n, vocab] → ids int64 [n], logprobs float32 [n] of softmax(logits / temperature).

    `temperatures` float32 [n]: 0 takes the likeliest token, with the logprob at temperature 1. `draws` float64 [n] in
    [0, 1) picks the token by the inverse CDF (summed in float64, so that no token of a large vocabulary is lost);
    None where no row samples. Raises RuntimeError if a logprob is not a number.
    """
    logits = logits.float()
    greedy = torch.from_numpy(temperatures == 0).to(logits.device)
    if not (temperatures == 1).all():
        scale = torch.from_numpy(temperatures).to(logits.device).masked_fill(greedy, 1.0)
        logits = logits / scale[:, None]
    top, likeliest = logits.max(dim=-1, keepdim=True)
    weights = (logits - top).exp_()
    if draws is None:
        tokens, total = likeliest, weights.sum(dim=-1, keepdim=True)
    else:
        cdf = weights.cumsum(dim=-1, dtype=torch.float64)
        total = cdf[:, -1:]
        targets = torch.from_numpy(draws).to(logits.device)[:, None] * total
        drawn = torch.searchsorted(cdf, targets, right=True).clamp_(max=logits.shape[-1] - 1)
        tokens = torch.where(greedy[:, None], likeliest, drawn)
    logprobs = (logits.gather(-1, tokens) - top - total.log()).float().flatten().cpu().numpy()
    if np.isnan(logprobs).any():
        raise RuntimeError("the model's logits are NaN or infinite: its weights are broken")
    return tokens.flatten().cpu().numpy(), logprobs
