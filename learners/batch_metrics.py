"""Metrics of a batch that need no model: rewards, lengths, staleness. NumPy only, shared by all learners."""

from collections import Counter
from typing import Any

import numpy as np

from areal_like.types import Batch
from learners.advantages import varied


def batch_metrics(batch: Batch) -> dict[str, Any]:
    """Metrics of one batch, by the names used in `metrics.jsonl`.

    Lengths are in tokens, staleness and spans in versions. `zero_variance_share` is the share of groups whose rewards
    are all equal, `truncated_share` that of answers that end at their limit; `version_span` newest − oldest version of
    a sample. The histogram maps a staleness to a number of samples. `reward/part/NAME` is the mean of a reward's part,
    before its weight.
    """
    samples = batch.samples
    rewards = np.array([s.reward for s in samples], np.float64)
    names = sorted({name for sample in samples for name in sample.parts})
    parts = {name: [sample.parts[name] for sample in samples if name in sample.parts] for name in names}
    member = np.repeat(np.arange(len(batch.groups)), [len(g.samples) for g in batch.groups])
    lengths = np.array([s.response_length for s in samples])
    spans = np.array([s.newest_version - s.oldest_version for s in samples])
    staleness = batch.staleness()
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{f"reward/part/{name}": float(np.mean(each)) for name, each in parts.items()},
        "zero_variance_share": float(1.0 - varied(rewards, member).mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/p95": float(np.quantile(lengths, 0.95)),
        "response_length/max": int(lengths.max()),
        "response_length/truncated_share": float(np.mean([s.finish == "length" for s in samples])),
        "tokens": int(sum(np.count_nonzero(s.loss_mask) for s in samples)),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": max(staleness),
        "staleness/histogram": {str(age): count for age, count in sorted(Counter(staleness).items())},
        "version_span/mean": float(spans.mean()),
        "version_span/max": int(spans.max()),
    }
