"""What a step reports, by staleness and by sign of the advantage, against NumPy."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from learners.advantages import group
from learners.collectives import Ranks
from learners.diagnostics import TokenTally, buckets, drift, mismatch, zero_variance_by_staleness
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.losses.corrections import capped
from learners.losses.delightful import dg
from tests.learners.batches import make_batch, tiny_model
from tests.learners.test_learner import batches
from tests.seeds import seeded

DECOUPLED = capped(decoupled_ppo)


def learner_of(loss=DECOUPLED, **knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), loss, partial(group), 1.0, 0, **knobs)


def test_buckets_are_powers_of_two_named_by_their_lower_end():
    staleness = np.array([0, 1, 2, 3, 4, 7, 8, 15, 16, 0])
    found = {suffix: np.flatnonzero(members).tolist() for suffix, members in buckets(staleness)}
    assert found == {
        "/staleness_0": [0, 9],
        "/staleness_1": [1],
        "/staleness_2": [2, 3],
        "/staleness_4": [4, 5],
        "/staleness_8": [6, 7],
        "/staleness_16": [8],
    }


def test_a_tally_means_peaks_and_spreads():
    tally, rng = TokenTally(), seeded(0)
    ratio, gate, clipped = rng.random(40), rng.random(40), rng.random(40) < 0.3
    staleness, advantages = rng.integers(0, 3, 40), rng.normal(size=40)
    for part in (slice(0, 25), slice(25, 40)):
        observed = {"ratio": ratio[part], "gate": gate[part], "clip_share": clipped[part]}
        tensors = {name: torch.tensor(values) for name, values in observed.items()}
        tally.add(tensors, torch.tensor(staleness[part]), torch.tensor(advantages[part]), "loss/")
    metrics = tally.metrics()
    assert metrics["loss/clip_share"] == pytest.approx(clipped.mean())
    for k in (0, 1, 2):
        assert metrics[f"loss/ratio/max/staleness_{k}"] == pytest.approx(ratio[staleness == k].max())
        assert metrics[f"loss/ratio/mean/staleness_{k}"] == pytest.approx(ratio[staleness == k].mean())
        assert metrics[f"loss/clip_share/staleness_{k}"] == pytest.approx(clipped[staleness == k].mean())
    assert metrics["loss/gate/positive/p95"] == pytest.approx(np.quantile(gate[advantages > 0], 0.95))
    assert metrics["loss/gate/negative/p05"] == pytest.approx(np.quantile(gate[advantages < 0], 0.05))
    here = (advantages < 0) & (staleness == 1)
    assert metrics["loss/gate/negative/p50/staleness_1"] == pytest.approx(np.median(gate[here]))


class Two(Ranks):
    """The first of two ranks, each in a thread; they meet at a barrier."""

    def __init__(self, rank, met, said):
        self.count, self.rank, self._met, self._said = 2, rank, met, said

    def gathered(self, thing):
        self._said[self.rank] = thing
        self._met.wait()
        both = list(self._said)
        self._met.wait()
        return both

    def sum_tensor(self, tensor):
        tensor.copy_(sum(self.gathered(tensor.clone())))

    def max_tensor(self, tensor):
        tensor.copy_(torch.maximum(*self.gathered(tensor.clone())))


def test_a_tally_is_one_copy_however_many_names_it_has(monkeypatch):
    tally, copies, cpu = TokenTally(), [], torch.Tensor.cpu
    for _ in range(3):
        numbers, staleness = torch.rand(4), torch.tensor([0, 1, 2, 5])
        tally.add({"a": numbers, "b": numbers > 0.5}, staleness, torch.ones(4))
        tally.add({"loss/gate": numbers}, staleness, torch.ones(4))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copies.append(tensor.shape), cpu(tensor))[1])
    assert set(tally.metrics()) >= {"a", "b", "loss/gate/mean", "a/staleness_4"}
    assert len(copies) == 1


def test_ranks_reduce_what_needs_no_quantiles_and_report_what_one_would():
    rng, met, said = seeded(1), threading.Barrier(2), [None, None]
    columns = {name: rng.random(40) for name in ("ratio", "gate", "clip_share")}
    staleness, advantages = rng.integers(0, 9, 40), rng.normal(size=40)
    alone, tallies = TokenTally(), (TokenTally(), TokenTally())
    for tally, part in ((alone, slice(None)), (tallies[0], slice(0, 13)), (tallies[1], slice(13, 40))):
        observed = {name: torch.tensor(values[part]) for name, values in columns.items()}
        tally.add(observed, torch.tensor(staleness[part]), torch.tensor(advantages[part]), "loss/")
    tallies[1].add({"entropy": torch.ones(3)}, torch.zeros(3), torch.zeros(3))
    alone.add({"entropy": torch.ones(3)}, torch.zeros(3), torch.zeros(3))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: tallies[rank].merge(Two(rank, met, said)), range(2)))
    assert set(tallies[0]._pieces) == {"loss/gate"}
    assert tallies[0].metrics() == tallies[1].metrics() == pytest.approx(alone.metrics())


def test_drift_by_staleness_is_that_of_the_tokens_there():
    moved, staleness = seeded(0).normal(0, 0.3, 50), np.arange(50) % 2
    sample = np.repeat(np.arange(10), 5)
    metrics = drift(moved, staleness, sample)
    for suffix, d in (("", moved), ("/staleness_0", moved[::2]), ("/staleness_1", moved[1::2])):
        w = np.exp(d)
        assert metrics[f"kl/k1{suffix}"] == pytest.approx(np.mean(-d))
        assert metrics[f"kl/k3{suffix}"] == pytest.approx(np.mean(w - 1 - d))
        assert metrics[f"ess{suffix}"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
        assert metrics[f"ratio/mean{suffix}"] == pytest.approx(w.mean())
        assert metrics[f"ratio/max{suffix}"] == pytest.approx(w.max())
        assert metrics[f"chi2{suffix}"] == pytest.approx(np.mean(w**2) - 1)
    products = np.array([np.exp(sum(moved[sample == s])) for s in range(10)])
    for suffix in ("", "/staleness_1"):  # each sample has a token of staleness 1
        expected = products.sum() ** 2 / (10 * (products**2).sum())
        assert metrics[f"sequence/ess{suffix}"] == pytest.approx(expected)
        assert metrics[f"sequence/chi2{suffix}"] == pytest.approx(np.mean(products**2) - 1)
    assert "sequence/ess/staleness_0" not in metrics
    assert drift(np.array([]), np.array([]), np.array([])) == {}


def test_zero_variance_by_staleness_goes_by_the_groups_oldest_token():
    batch = make_batch(seeded(0), groups=6, version=3)
    for g, made in enumerate(batch.groups):
        for sample in made.samples:
            sample.runs = [(3 - g % 3, sample.response_length)]
            if g in (0, 1, 4):
                sample.reward = 0.5
            else:
                sample.reward = float(sample is made.samples[0])
    assert zero_variance_by_staleness(batch) == {
        "zero_variance_share/staleness_0": 0.5,
        "zero_variance_share/staleness_1": 1.0,
        "zero_variance_share/staleness_2": 0.0,
    }


def test_a_train_step_reports_everything_by_staleness():
    batch = batches(1, version=3)[0]
    metrics = learner_of().train(batch)
    names = (
        "loss/clip_share", "loss/ratio/mean", "loss/ratio/max", "loss/behaviour_weight/max", "ess", "kl/k1", "kl/k3",
        "entropy", "zero_variance_share",
    )  # fmt: skip
    for name in names:
        assert name in metrics
        assert {key for key in metrics if key.startswith(f"{name}/staleness_")} >= {f"{name}/staleness_1"}, name
    gates = learner_of(dg).train(batch)
    assert {"loss/gate/positive/p50", "loss/gate/negative/p95", "loss/gate/mean/staleness_1"} <= set(gates)
    assert {"ratio/mean", "ratio/max/staleness_1"} <= set(gates), "also of losses that use no ratio"


def test_buckets_add_up_to_the_whole():
    batch = batches(1, version=3)[0]
    metrics = learner_of(num_minibatches=1).train(batch)
    stale = np.concatenate([np.repeat(3 - v, n) for s in batch.samples for v, n in s.runs])
    stale = stale[np.concatenate([s.loss_mask for s in batch.samples])]
    for name in ("entropy", "loss/clip_share", "kl/k3"):
        shares = sum(metrics[f"{name}{suffix}"] * members.mean() for suffix, members in buckets(stale))
        assert shares == pytest.approx(metrics[name])


def test_mismatch_is_of_tokens_before_and_after_an_update_in_flight():
    moved, updated = seeded(3).normal(0, 0.1, 40), np.arange(40) % 3 == 0
    found = mismatch(moved, updated)
    for suffix, members in (("", ~updated), ("/in_flight", updated)):
        d = moved[members]
        assert found[f"mismatch_kl{suffix}"] == pytest.approx(np.mean(np.exp(d) - 1 - d))
        assert found[f"mismatch_max{suffix}"] == pytest.approx(np.abs(d).max())
    assert "mismatch_kl" not in mismatch(moved[updated], updated[updated])
