"""Variance, noise and cosines of synthetic gradients against NumPy."""

import numpy as np
import pytest
import torch

from learners.scoring import Score
from scripts.analysis.gradient_statistics import GradientStatistics, cosines, summarise, title


def score(gradient: np.ndarray) -> Score:
    return Score(torch.from_numpy(gradient), ess=0.5, weight=1.0, active=1.0, tokens=10)


@pytest.fixture
def gradients() -> np.ndarray:
    """6 batches × 2 losses × 5 parameters."""
    return np.random.default_rng(0).normal(1.0, 0.5, size=(6, 2, 5)).astype(np.float32)


def statistics_of(gradients: np.ndarray) -> GradientStatistics:
    """The second bucket occurs only in every other batch."""
    statistics = GradientStatistics(["a", "b"])
    for number, (a, b) in enumerate(gradients):
        there = ["", "/staleness_0", *(["/staleness_4"] if number % 2 else [])]
        statistics.add({"a": {bucket: score(a) for bucket in there}, "b": {bucket: score(b) for bucket in there}})
    return statistics


def test_variance_is_the_trace_of_the_covariance(gradients: np.ndarray) -> None:
    statistics = statistics_of(gradients)
    for bucket, of in (("", gradients[:, 0]), ("/staleness_4", gradients[1::2, 0])):
        numbers = statistics.numbers("a", bucket)
        assert numbers["variance"] == pytest.approx(np.trace(np.cov(of.T.astype(np.float64))), rel=1e-6)
        assert numbers["noise"] == pytest.approx(numbers["variance"] / np.sum(of.mean(0) ** 2), rel=1e-6)
        assert numbers["norm"].mean == pytest.approx(np.linalg.norm(of, axis=1).mean(), rel=1e-6)
        assert (numbers["batches"], numbers["tokens"]) == (len(of), 10 * len(of))


def test_one_batch_has_no_variance(gradients: np.ndarray) -> None:
    assert np.isnan(statistics_of(gradients[:1]).numbers("a")["variance"])


def test_cosines_are_means_over_batches(gradients: np.ndarray) -> None:
    a, b = gradients[:, 0], gradients[:, 1]
    each = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    found = statistics_of(gradients).cosine()
    assert found[0, 1] == pytest.approx(each.mean(), rel=1e-6) and found[0, 0] == pytest.approx(1.0)
    assert statistics_of(gradients).cosine("/staleness_4")[0, 1] == pytest.approx(each[1::2].mean(), rel=1e-6)


def test_a_gradient_of_zero_has_no_cosine() -> None:
    found = cosines(np.array([[1.0, 0.0], [0.0, 0.0], [-2.0, 0.0]]))
    assert found[0, 2] == -1.0 and np.isnan(found[1]).all()


def test_tables_show_all_buckets_by_age(gradients: np.ndarray) -> None:
    statistics = statistics_of(gradients)
    assert [title(bucket) for bucket in statistics.buckets] == ["all", "staleness 0", "staleness 4–7"]
    assert "| a    | 4–7       | 30     |" in summarise(statistics)
    assert set(statistics.as_data()["by_loss"]["b"]) == {"all", "staleness 0", "staleness 4–7"}
