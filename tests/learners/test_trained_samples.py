"""What the learner records for people: the tokens that it has trained, and from which groups."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from areal_like.run.samples import TrainedSamples, chosen, read
from areal_like.types import Batch
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from tests.learners.batches import make_batch, tiny_model
from tests.seeds import seeded


def learner(loss=decoupled_ppo, **knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), loss, partial(group), 1.0, 0, **knobs)


def column(batch: Batch, found: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    """One number per response token of the batch; NaN for samples without trained tokens."""
    pairs = zip(found, batch.samples, strict=True)
    return np.concatenate([each.get(name, np.full(s.response_length, np.nan, np.float32)) for each, s in pairs])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_each_trained_token_has_its_own_numbers(minibatches: int) -> None:
    batch, trainer = make_batch(seeded(0)), learner(num_minibatches=minibatches, entropy_bonus=0.1)
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
    samples, trainer = TrainedSamples(tmp_path, run, 0), learner()
    trainer.train(batches[0])
    samples.keep(batches[0], 1, trainer.numbers)
    samples.keep(batches[1], 2, None)
    found = list(read(tmp_path))
    assert {each.step for each in found} == {1, 2}
    assert {each.step for each in found if "advantage" in each.numbers} == {1}, "where the trainer tells them"
    TrainedSamples(tmp_path / "none", SimpleNamespace(samples_bytes=0, steps=4), 0).keep(batches[0], 1, None)
    assert not (tmp_path / "none").exists()
