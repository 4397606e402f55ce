"""The learner's bench compares like with like: one gradient whatever the padding, and lengths as stated."""

from functools import partial

import numpy as np
import pytest
import torch

import learners.learner
import learners.packing
from learners.advantages import group
from learners.losses.clipped import ppo
from scripts.bench import learner as bench
from tests.learners.batches import make_batch, tiny_model

torch.set_num_threads(1)


def test_padding_changes_the_time_and_not_the_gradient(monkeypatch):
    batch = make_batch(np.random.default_rng(0), masked=0.0)
    for made in batch.groups:
        prompt = made.samples[0].tokens[: made.samples[0].prompt_length]
        for sample in made.samples:
            sample.tokens[: sample.prompt_length] = prompt
    packed = learners.learner.TorchLearner(tiny_model(), ppo, partial(group), num_minibatches=1, micro_batch_tokens=40)
    expected = packed.train(batch)
    assert expected["computed_tokens"] < expected["backward_tokens"], "prompts are shared"
    monkeypatch.setattr(learners.learner, "forward_logprobs", learners.learner.forward_logprobs)  # to be put back
    monkeypatch.setattr(learners.learner, "Passes", learners.learner.Passes)
    monkeypatch.setattr(learners.packing, "is_worth", learners.packing.is_worth)
    bench.pad()
    padded = bench.PaddedLearner(tiny_model(), ppo, partial(group), num_minibatches=1, micro_batch_tokens=40)
    found = padded.train(batch)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    torch.testing.assert_close(padded.optimizer.gradient, packed.optimizer.gradient, rtol=1e-3, atol=1e-5)


def test_lengths_are_log_normal_with_the_tail_that_is_said():
    lengths = np.sort(bench.lengths(np.random.default_rng(0)).flatten() + bench.PROMPT)
    p50, p95 = np.quantile(lengths, [0.5, 0.95])
    assert 3.6 < p95 / p50 < 4.4
    assert (np.sort(bench.lengths(np.random.default_rng(1)).flatten() + bench.PROMPT) == lengths).all()


def test_the_batch_has_rewards_that_differ_within_each_group():
    batch = bench.made_batch(0)
    assert len(batch.groups) == bench.GROUPS and len(batch.samples) == bench.GROUPS * bench.SIZE
    assert all({sample.reward for sample in one.samples} == {0.0, 1.0} for one in batch.groups)
