"""Answers that were cut at the limit of length (finish "length"): to leave them out, or to look behind them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from areal_like.types import Batch, Sample


def without_cut_answers(batch: Batch) -> Batch:
    """The batch with all tokens of cut answers masked out: DAPO's overlong filtering (arXiv 2503.14476, section 3.4),
    `mask_truncated_completions` in TRL. As there, their rewards still count in their groups' baselines."""
    return _with_samples(batch, lambda s: replace(s, loss_mask=np.zeros_like(s.loss_mask)) if _is_cut(s) else s)


def one_token_further(batch: Batch) -> tuple[Batch, np.ndarray]:
    """The batch with one more trained token at the end of each cut answer that has trained tokens; and bool [M]: which
    trained tokens are the added ones. An added token would be chosen in the state after the answer."""
    chosen = [_is_cut(s) and bool(s.loss_mask.any()) for s in batch.samples]
    further = _with_samples(batch, lambda s: _longer(s) if _is_cut(s) and s.loss_mask.any() else s)
    trained = np.array([np.count_nonzero(s.loss_mask) for s in further.samples], np.int64)
    behind = np.zeros(trained.sum(), bool)
    behind[np.cumsum(trained)[chosen] - 1] = True
    return further, behind


def _is_cut(sample: Sample) -> bool:
    return sample.finish == "length"


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


def _with_samples(batch: Batch, change: Callable[[Sample], Sample]) -> Batch:
    groups = [replace(group, samples=[change(sample) for sample in group.samples]) for group in batch.groups]
    return replace(batch, groups=groups)
