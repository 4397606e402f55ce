"""Batch metrics against numbers computed by hand."""

import numpy as np
import pytest

from areal_like.types import Batch, Group, Sample
from learners.batch_metrics import batch_metrics


def sample(reward: float, runs: list[tuple[int, int]], trained: int | None = None) -> Sample:
    length = sum(n for _, n in runs)
    mask = np.arange(length) < (length if trained is None else trained)
    return Sample(np.zeros(2 + length, np.int32), 2, np.zeros(length, np.float32), mask, runs, reward, "stop")


def test_a_small_batch_by_hand():
    groups = [
        Group(0, [sample(1.0, [(4, 3)]), sample(0.0, [(2, 1), (4, 4)])]),
        Group(1, [sample(0.5, [(3, 2)], trained=1), sample(0.5, [(3, 1), (4, 1)])]),
    ]
    metrics = batch_metrics(Batch(7, 5, groups))
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(np.sqrt(0.125)),
        "zero_variance_share": 0.5,
        "response_length/mean": 3.0,
        "response_length/p95": pytest.approx(4.7),
        "response_length/max": 5,
        "tokens": 11,
        "staleness/mean": 2.0,
        "staleness/max": 3,
        "staleness/histogram": {"1": 1, "2": 2, "3": 1},
        "version_span/mean": 0.75,
        "version_span/max": 2,
    }
