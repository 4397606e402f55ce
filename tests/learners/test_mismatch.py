"""Engine against learner, scored by the weights that sampled the tokens."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from areal_like.types import Batch, Group, Sample
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.mismatch import mismatch
from learners.packing import Columns
from tests.learners.batches import make_batch, tiny_model
from tests.seeds import seeded

ETA = 2
"""Version of the train step − version of its tokens."""


def learner_of(**knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), decoupled_ppo, partial(group), lr=1e-2, **knobs)


def sampled(learner: TorchLearner, index: int, version: int) -> Batch:
    """A batch whose logprobs come from the learner's present weights, which have this version."""
    batch = make_batch(seeded(index), index=index, version=version)
    for sample in batch.samples:
        sample.runs, sample.logprobs = [(version, sample.response_length)], _logprobs(learner, sample)
    return batch


def _logprobs(learner: TorchLearner, sample: Sample) -> np.ndarray:
    """The logprobs of a model with the same weights; with adapters, the learner's own."""
    if learner._adapters:
        return _own_logprobs(learner, sample)
    model = tiny_model()
    model.load_state_dict(learner.model.state_dict())
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, tokens[0, 1:, None])[sample.prompt_length - 1 :, 0].numpy()


def _own_logprobs(learner: TorchLearner, sample: Sample) -> np.ndarray:
    columns = Columns(Batch(0, 0, [Group(0, [replace(sample, loss_mask=np.ones(sample.response_length, bool))])]))
    ((_, logprobs),) = learner._passes.logprobs(columns, [np.array([0])])
    return logprobs.numpy()


def trained(learner: TorchLearner, steps: int, engine: float = 0.0) -> list[dict[str, float]]:
    """Train on tokens from `ETA` versions ago, sampled by an engine whose logprobs are too high by `engine`."""
    waiting: list[Batch] = []
    rows = []
    for step in range(steps):
        version = step + ETA
        batch = sampled(learner, step, version)
        for sample in batch.samples:
            sample.logprobs = sample.logprobs + np.float32(engine)
        waiting.append(batch)
        batch = waiting.pop(0) if step >= ETA else make_batch(seeded(99), version=0)
        rows.append(learner.train(replace(batch, index=step, version=version)))
    return rows


def test_stale_tokens_are_scored_by_the_weights_that_sampled_them():
    rows = trained(learner_of(mismatch_every=2), 12, engine=0.01)
    probed = [row for row in rows if "mismatch_kl" in row]
    assert 2 <= len(probed) < len(rows) and not any("mismatch_kl/in_flight" in row for row in rows)
    for row in probed:
        assert row["mismatch_kl"] == pytest.approx(np.expm1(-0.01) + 0.01, rel=0.05)
        assert row["mismatch_max"] == pytest.approx(0.01, rel=0.01)
        assert row["kl/k3"] > 10 * row["mismatch_kl"], "the policy itself has moved much further"


def test_looking_changes_no_bit_of_the_run():
    looking, blind = learner_of(mismatch_every=1), learner_of(mismatch_every=0)
    rows, without = trained(looking, 6), trained(blind, 6)
    assert any("mismatch_kl" in row for row in rows) and not any("mismatch_kl" in row for row in without)
    assert [row["loss"] for row in rows] == [row["loss"] for row in without]
    for ours, theirs in zip(looking.model.parameters(), blind.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_adapters_are_scored_as_well():
    rows = trained(learner_of(mismatch_every=1, lora={"rank": 2}), 6, engine=0.01)
    probed = [row["mismatch_max"] for row in rows if "mismatch_max" in row]
    assert probed == pytest.approx([0.01] * len(probed), rel=0.01) and probed


def test_a_version_whose_tokens_never_come_is_given_up():
    learner = learner_of(mismatch_every=1)
    learner.train(replace(make_batch(seeded(0), version=0), version=5))
    assert learner._probe._version == 5
    learner.train(replace(make_batch(seeded(1), version=6), index=1, version=8, oldest_allowed=6))
    assert learner._probe._version == 8 and learner._probe._weights is not None


def test_tokens_behind_an_update_are_counted_apart():
    moved, in_flight = np.array([0.0, 0.1, -0.3]), np.array([False, False, True])
    found = mismatch(moved, in_flight)
    assert found["mismatch_max"] == pytest.approx(0.1) and found["mismatch_max/in_flight"] == pytest.approx(0.3)
    assert found["mismatch_kl"] == pytest.approx((np.expm1(0.1) - 0.1) / 2)
    assert mismatch(np.empty(0), np.empty(0, bool)) == {}
