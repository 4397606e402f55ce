"""Metrics of a step by staleness, against NumPy; of a batch, against numbers computed by hand."""

import numpy as np
import pytest
import torch

from areal_like.types import Batch, Group, Sample
from learners.batch_metrics import batch_metrics
from learners.collectives import Ranks
from learners.diagnostics import TokenTally, drift, mismatch
from tests.seeds import seeded


def test_a_tally_has_means_and_peaks_by_one_copy(monkeypatch):
    """That ranks make the same together: `test_ranks`."""
    rng = seeded(1)
    columns = {name: rng.random(40) for name in ("ratio", "gate", "factor")} | {"clip_share": rng.random(40) < 0.3}
    staleness = rng.integers(0, 9, 40)
    tally, copies, cpu = TokenTally(), [], torch.Tensor.cpu
    for part in (slice(0, 25), slice(25, 40)):
        observed = {name: torch.tensor(values[part]) for name, values in columns.items()}
        tally.add(observed, torch.tensor(staleness[part]), "loss/")
    tally.add({"entropy": torch.ones(3)}, torch.zeros(3))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copies.append(tensor.shape), cpu(tensor))[1])
    metrics = tally.metrics(Ranks(1))
    assert len(copies) == 1
    ratio, gate, factor, clipped = (columns[name] for name in ("ratio", "gate", "factor", "clip_share"))
    for suffix, here in (("", staleness >= 0), ("/staleness_1", staleness == 1), ("/staleness_4", staleness // 4 == 1)):
        assert metrics[f"loss/ratio/max{suffix}"] == pytest.approx(ratio[here].max())
        assert metrics[f"loss/ratio/mean{suffix}"] == pytest.approx(ratio[here].mean())
        assert metrics[f"loss/clip_share{suffix}"] == pytest.approx(clipped[here].mean())
        assert metrics[f"loss/gate{suffix}"] == pytest.approx(gate[here].mean())
        of_factors = factor[here].mean() ** 2 / (factor[here] ** 2).mean()
        assert metrics[f"loss/factor/ess{suffix}"] == pytest.approx(of_factors)
    assert metrics["entropy"] == metrics["entropy/staleness_0"] == 1.0 and TokenTally().metrics(Ranks(1)) == {}


def test_drift_by_staleness_is_that_of_the_tokens_there():
    moved, tally = seeded(0).normal(0, 0.3, 50), TokenTally()
    tally.add(drift(torch.tensor(moved)), torch.arange(50) % 2)
    metrics = tally.metrics(Ranks(1))
    for suffix, d in (("", moved), ("/staleness_0", moved[::2]), ("/staleness_1", moved[1::2])):
        w = np.exp(d)
        assert metrics[f"kl/k1{suffix}"] == pytest.approx(np.mean(-d))
        assert metrics[f"kl/k3{suffix}"] == pytest.approx(np.mean(w - 1 - d))
        assert metrics[f"ess{suffix}"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
        assert metrics[f"ratio/mean{suffix}"] == pytest.approx(w.mean())
        assert metrics[f"ratio/max{suffix}"] == pytest.approx(w.max())


def test_mismatch_is_of_tokens_before_and_after_an_update_in_flight():
    moved, updated = seeded(3).normal(0, 0.1, 40), np.arange(40) % 3 == 0
    found = mismatch(moved, updated)
    for suffix, members in (("", ~updated), ("/in_flight", updated)):
        d = moved[members]
        assert found[f"mismatch_kl{suffix}"] == pytest.approx(np.mean(np.exp(d) - 1 - d))
        assert found[f"mismatch_max{suffix}"] == pytest.approx(np.abs(d).max())
    assert "mismatch_kl" not in mismatch(moved[updated], updated[updated])


def sample(reward: float, runs: list[tuple[int, int]], trained: int | None = None) -> Sample:
    length = sum(n for _, n in runs)
    mask = np.arange(length) < (length if trained is None else trained)
    return Sample(np.zeros(2 + length, np.int32), 2, np.zeros(length, np.float32), mask, runs, reward, "stop")


def test_a_small_batch_by_hand():
    groups = [
        Group(0, [sample(1.0, [(4, 3)]), sample(0.0, [(2, 1), (4, 4)])]),
        Group(1, [sample(0.5, [(3, 2)], trained=1), sample(0.5, [(3, 1), (4, 1)])]),
    ]
    groups[0].samples[0].parts, groups[1].samples[1].parts = {"form": 0.5, "right": 3.0}, {"form": 1.0}
    metrics = batch_metrics(Batch(7, 5, groups))
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(np.sqrt(0.125)),
        "reward/part/form": 0.75,
        "reward/part/right": 3.0,
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
