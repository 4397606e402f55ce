"""Metrics of a step by staleness, against NumPy; of a batch, by hand. The learner's half of the probe of what engines
serve, and the tokens that it records."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_like.models.causal_lm import publishable
from areal_like.run.samples import TrainedSamples, chosen, read
from areal_like.types import Batch, Group, Sample
from areal_like.wire.messages import Manifest, Probe
from learners.advantages import group
from learners.batch_metrics import batch_metrics
from learners.collectives import Ranks
from learners.diagnostics import TokenTally, drift, mismatch
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.probe import Reference
from tests.learners.batches import make_batch, tiny_model
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
    groups[0].samples[1].finish = "length"
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
        "response_length/truncated_share": 0.25,
        "tokens": 11,
        "staleness/mean": 2.0,
        "staleness/max": 3,
        "staleness/histogram": {"1": 1, "2": 2, "3": 1},
        "version_span/mean": 0.75,
        "version_span/max": 2,
    }


SEQUENCES = [[1, 2], [3, 1, 4, 1, 5, 9], [2, 7, 1]]


def learner_of(**knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), decoupled_ppo, partial(group), 0.7, lr=1e-2, **knobs)


@pytest.mark.parametrize(
    "knobs", [{}, {"micro_batch_tokens": 4}, {"lora": {"rank": 2}}], ids=["whole", "in parts", "adapters"]
)
def test_logprobs_are_those_of_the_model_at_temperature_1(knobs):
    learner = learner_of(**knobs)
    found, dtype = learner.logprobs_of(SEQUENCES)
    assert dtype == ("bfloat16" if "lora" in knobs else "float32")
    model = tiny_model()
    if "lora" not in knobs:
        model.load_state_dict(learner.model.state_dict())
    else:
        publishable(model)
    for tokens, row in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            every = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = every[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_a_probe_changes_no_bit_of_training():
    probed, plain = learner_of(), learner_of()
    for index in range(2):
        probed.logprobs_of(SEQUENCES)
        for learner in (probed, plain):
            learner.train(make_batch(seeded(index), index=index))
    for ours, theirs in zip(probed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_only_some_versions_come_with_a_probe_and_none_with_numbers_that_are_none():
    said = iter([[[-1.0]], [[float("nan")]]])
    reference = Reference([[1, 2]], 2, lambda sequences: (next(said), "float32"))
    manifests = []
    for version in (0, 1, 2):
        reference.take(version)
        manifests.append(reference.added_to(Manifest(version, "")))
    assert manifests[0].probe == Probe([[1, 2]], [[-1.0]], "float32")
    assert not any(manifest.probe for manifest in manifests[1:])


def learner_with(loss=decoupled_ppo, **knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), loss, partial(group), 1.0, 0, **knobs)


def column(batch: Batch, found: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    """One number per response token of the batch; NaN for samples without trained tokens."""
    pairs = zip(found, batch.samples, strict=True)
    return np.concatenate([each.get(name, np.full(s.response_length, np.nan, np.float32)) for each, s in pairs])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_each_trained_token_has_its_own_numbers(minibatches: int) -> None:
    batch, trainer = make_batch(seeded(0)), learner_with(num_minibatches=minibatches, entropy_bonus=0.1)
    for sample in batch.samples:
        sample.loss_mask[0] = False
    before = [np.array(sample.logprobs) for sample in batch.samples]
    metrics = trainer.train(batch)
    ids = [each.id for each in batch.groups]
    found = [values for each in ids for values in trainer.numbers(each)]
    trained = np.concatenate([sample.loss_mask for sample in batch.samples])
    for name, metric in {"loss/ratio": "loss/ratio/mean", "entropy": "entropy"}.items():
        values = column(batch, found, name)
        assert np.isnan(values[~trained]).all() and np.isfinite(values[trained]).all()
        assert values[trained].mean() == pytest.approx(metrics[metric], rel=1e-5), "the metric's own numbers"
    for values, sample in zip(found, batch.samples, strict=True):
        of_group = next(each for each in batch.groups if any(s is sample for s in each.samples))
        advantage = sample.reward - np.mean([s.reward for s in of_group.samples])
        if sample.loss_mask.any():
            np.testing.assert_allclose(values["advantage"][sample.loss_mask], advantage, atol=1e-6)
    drift = column(batch, found, "proximal") - np.concatenate(before)
    assert np.exp(drift[trained]).mean() == pytest.approx(metrics["ratio/mean"], rel=1e-4)


def test_one_at_random_and_the_best_take_turns(tmp_path: Path) -> None:
    batches = [make_batch(seeded(index), index=index) for index in range(40)]
    for batch in batches:
        rewards = [sample.reward for sample in chosen(batch).samples]
        if batch.index % 2:
            assert max(rewards) == max(sample.reward for sample in batch.samples)
        assert chosen(batch).id == chosen(batch).id, "the same when trained again"
    assert len({chosen(batch).id for batch in batches if batch.index % 2 == 0}) > 1
    run = SimpleNamespace(samples_bytes=10_000_000, steps=40)
    samples, trainer = TrainedSamples(tmp_path, run, 0), learner_with()
    trainer.train(batches[0])
    samples.keep(batches[0], 1, trainer.numbers)
    samples.keep(batches[1], 2, None)
    found = list(read(tmp_path))
    assert {each.step for each in found} == {1, 2}
    assert {each.step for each in found if "advantage" in each.numbers} == {1}, "where the trainer tells them"
    TrainedSamples(tmp_path / "none", SimpleNamespace(samples_bytes=0, steps=4), 0).keep(batches[0], 1, None)
    assert not (tmp_path / "none").exists()
