"""How much of a gradient is noise: against samples whose expected gradients are known, and the learner's own."""

from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from areal_like.types import Batch
from learners.advantages import gae, group
from learners.collectives import Ranks
from learners.gradient_noise import DRAWN, EVERY, Cut, DrawnWeights, NoiseEstimates, Parts, estimates
from learners.learner import TorchLearner
from tests.learners.batches import tiny_model
from tests.learners.test_diagnostics import DECOUPLED
from tests.learners.test_learner import batches


def learner_of(advantage=group, **knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), DECOUPLED, partial(advantage), 1.0, 0, **knobs)


@pytest.mark.parametrize(("groups", "size"), [(8, 4), (5, 7), (2, 2)])
def test_expected_gradient_and_both_kinds_of_noise_are_told_apart(groups: int, size: int) -> None:
    dice, weights = np.random.default_rng(0), 6
    expected, tau, omega = np.full(weights, 0.6), 0.5, 1.0
    found = []
    for _ in range(4000):
        prompts = dice.normal(0, tau, (groups, 1, weights))
        samples = (expected + prompts + dice.normal(0, omega, (groups, size, weights))).reshape(-1, weights)
        cut = Cut(np.arange(groups * size), np.repeat(np.arange(groups), size), (0, 0))
        parts = np.stack([samples[part].sum(0) for part in cut.parts])
        found.append(estimates(parts @ parts.T, cut.some, groups, size))
    mean, error = np.mean(found, 0), np.std(found, 0) / np.sqrt(len(found))
    truth = (groups * size) ** 2 * np.array([expected @ expected, weights * tau**2, weights * omega**2])
    assert (abs(mean - truth) < 4 * error).all() and (error < 0.2 * truth).all()


def test_a_minibatch_is_cut_between_groups_and_within_those_before() -> None:
    samples, groups = np.array([6, 7, 8, 0, 1, 2, 3, 4, 5]), np.repeat([0, 1, 2], 3)
    cut = Cut(samples, groups, (1, 2))
    few, rest, others = cut.parts
    assert len(few) == 1 and sorted([*few, *rest]) == [6, 7, 8] and others.tolist() == [0, 1, 2, 3, 4, 5]
    drawn = {tuple(Cut(samples, groups, (1, index)).parts[0]) for index in range(20)}
    assert len(drawn) == 3, "always the first would be those that are done first"


@pytest.mark.parametrize(
    ("samples", "groups"), [([0, 1, 2, 3], [0] * 4), ([0, 1], [0, 1]), ([0, 1, 2], [0, 0, 1]), ([0], [0])]
)
def test_what_can_not_be_told_apart_is_not_measured(samples: list[int], groups: list[int]) -> None:
    parts = Parts(DrawnWeights(1, 0, Ranks(1)))
    cut = parts.cut(np.array(samples), np.array(groups), (0, 0), torch.zeros(1), piece=None)
    assert [part.tolist() for part in cut.parts] == [[], [], samples]
    parts.note(2, torch.ones(1))
    parts.tell(noise := NoiseEstimates(), torch.ones(1))
    assert noise.metrics() == {}


def test_products_of_drawn_weights_are_those_of_all_but_for_chance() -> None:
    torch.manual_seed(0)
    size = 3 * DRAWN
    first, second = torch.randn(size), torch.randn(size) + 0.5
    drawn = DrawnWeights(size, 0, Ranks(1))
    found = drawn.products([drawn.of(first).double(), drawn.of(second).double()])
    truth = torch.stack([first, second]).double()
    assert found == pytest.approx((truth @ truth.T).numpy(), rel=0.01, abs=0.003 * size)
    few = DrawnWeights(3, 0, Ranks(1))
    assert few.products([few.of(torch.ones(3)), few.of(torch.tensor([0.0, 1, 2]))]).tolist() == [[3, 3], [3, 5]]


def test_a_gradient_that_is_not_finite_is_no_evidence() -> None:
    noise = NoiseEstimates()
    noise.note(np.full((3, 3), np.inf), 1, 2, 2)
    assert noise.metrics() == {}


# ---- in the learner -------------------------------------------------------------------------------------------------


def gradients(batch: Batch, parts: list[np.ndarray]) -> list[torch.Tensor]:
    """Of parts of a batch, each by a learner of its own, under the whole batch's denominator and advantages."""
    found = []
    for part in parts:
        learner = learner_of(num_minibatches=1, publish_dtype="float32", clip_grad=0.0)
        begin = learner._begin(batch)
        denominator = learner.objective.denominator(begin.columns, np.arange(len(batch.samples)))
        learner._zero_grad()
        learner._backward(begin, begin.columns, part, denominator, at_start=True)
        found.append(learner.optimizer.gradient.double().clone())
    return found


def test_the_learner_measures_the_products_of_its_own_gradient() -> None:
    batch = batches(1, version=3)[0]
    learner = learner_of(num_minibatches=1, publish_dtype="float32", clip_grad=0.0, gradient_noise=True)
    metrics = learner.train(batch)
    order = np.random.default_rng((0, batch.index, 0)).permutation(len(batch.groups))
    size = len(batch.groups[0].samples)
    samples = np.concatenate([np.arange(g * size, (g + 1) * size) for g in order])
    cut = Cut(samples, np.repeat(np.arange(len(batch.groups)), size), (0, batch.index))
    parts = torch.stack(gradients(batch, cut.parts))
    signal, between, within = estimates((parts @ parts.T).numpy(), cut.some, cut.groups, size)
    found = [metrics[f"gradient/{name}"] for name in ("signal", "between", "within")]
    assert found == pytest.approx([signal, between, within], rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(parts.sum(0).norm().item(), rel=1e-5)


@pytest.mark.parametrize(
    "knobs", [{}, {"micro_batch_tokens": 40}, {"grad_norm_by_staleness": True}, {"advantage": gae, "critic_lr": 1e-2}]
)
def test_measuring_changes_a_step_by_rounding_only(knobs: dict) -> None:
    batch = batches(1, version=3)[0]
    knobs = {"num_minibatches": 1, "publish_dtype": "float32", "entropy_bonus": 0.05} | knobs
    plain, measured = learner_of(**knobs), learner_of(**knobs, gradient_noise=True)
    expected, metrics = plain.train(batch), measured.train(batch)
    torch.testing.assert_close(measured.optimizer.gradient, plain.optimizer.gradient, rtol=1e-3, atol=1e-5)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert "gradient/signal" in metrics and "gradient/signal" not in expected


def streams(**knobs) -> TorchLearner:
    knobs = {"num_minibatches": 1, "publish_dtype": "float32", "clip_grad": 0.0, "gradient_noise": True} | knobs
    return learner_of(stream=True, **knobs)


@pytest.mark.parametrize("at_once", [1, 2, 99])
def test_of_a_stream_every_sixth_piece_is_halved(at_once: int) -> None:
    """Of several groups half of them."""
    batch = batches(1, version=3, groups=14)[0]
    metrics = streams(stream_groups=at_once).train(batch)
    size, found, some = len(batch.groups[0].samples), ([], [], []), 0
    for piece, first in enumerate(range(0, 14, at_once)):
        samples = np.arange(min(at_once, 14 - first) * size)
        halved = 0.0 if piece % EVERY else 1.0 if at_once == 1 else 0.5
        cut = Cut(samples, samples // size, (0, batch.index, piece), halved)
        some += cut.some
        for all_of_it, part in zip(found, cut.parts, strict=True):
            all_of_it.extend((part + first * size).tolist())
    assert some == {1: 3, 2: 2, 99: 7}[at_once] and sorted(chain(*found)) == list(range(14 * size))
    parts = torch.stack(gradients(batch, [np.array(part) for part in found]))
    measured = [metrics[f"gradient/{name}"] for name in ("signal", "between", "within")]
    assert measured == pytest.approx(estimates((parts @ parts.T).numpy(), some, 14, size), rel=1e-3)


@pytest.mark.slow
def test_of_streams_of_samples_whose_gradients_are_known_the_estimates_are_right() -> None:
    """As for whole minibatches above; pieces of one group."""
    dice, weights, groups, size = np.random.default_rng(0), 6, 9, 4
    expected, tau, omega = np.full(weights, 0.6), 0.5, 1.0
    found = []
    for number in range(3000):
        prompts = dice.normal(0, tau, (groups, 1, weights))
        samples = expected + prompts + dice.normal(0, omega, (groups, size, weights))
        parts, noise, gradient = Parts(DrawnWeights(weights, 0, Ranks(1))), NoiseEstimates(), np.zeros(weights)
        for piece, each in enumerate(samples):
            so_far = torch.from_numpy(gradient.copy())
            cut = parts.cut(np.arange(size), np.zeros(size, int), (0, number), so_far, piece=piece)
            for part, some in enumerate(cut.parts):
                if len(some):
                    gradient += each[some].sum(0)
                    parts.note(part, torch.from_numpy(gradient))
        parts.tell(noise, torch.from_numpy(gradient), denominator=2.0)
        found.append(list(noise.metrics().values()))
    mean, error = np.mean(found, 0), np.std(found, 0) / np.sqrt(len(found))
    truth = (groups * size / 2) ** 2 * np.array([expected @ expected, weights * tau**2, weights * omega**2])
    assert (abs(mean - truth) < 4 * error).all() and (error < 0.2 * truth).all()


@pytest.mark.parametrize(
    "knobs", [{}, {"micro_batch_tokens": 40}, {"stream_groups": 2}, {"advantage": gae, "critic_lr": 1e-2}]
)
def test_measuring_changes_a_streamed_step_by_rounding_only(knobs: dict) -> None:
    batch = batches(1, version=3)[0]
    plain, measured = streams(**knobs, gradient_noise=False), streams(**knobs)
    expected, metrics = plain.train(batch), measured.train(batch)
    torch.testing.assert_close(measured.optimizer.gradient, plain.optimizer.gradient, rtol=1e-3, atol=1e-5)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert "gradient/signal" in metrics and "gradient/signal" not in expected


def test_a_streamed_batch_is_measured_alike_whenever_its_groups_came() -> None:
    early, late = streams(), streams()
    for batch in batches(2, version=3):
        early.take(replace(batch, groups=batch.groups[:3]))
        found = early.train(batch)
        assert found == late.train(batch) and "gradient/signal" in found
    early.take(replace(batch, index=7, groups=batch.groups[:2]))  # of a batch that never comes
    again = replace(batch, index=8)
    assert early.train(again) == late.train(again)


def test_a_streamed_batch_that_can_not_tell_says_nothing_of_noise() -> None:
    """One group; groups of several sizes, in one piece and in several; a group that lacks a sample to train."""
    (batch,) = batches(1, version=3)
    assert "gradient/signal" in streams().train(batch)
    assert "gradient/signal" not in streams().train(replace(batch, groups=batch.groups[:1]))
    fewer = replace(batch.groups[2], samples=batch.groups[2].samples[:2])
    uneven = replace(batch, groups=[*batch.groups[:2], fewer, *batch.groups[3:]])
    for at_once in (1, 2, 99):
        assert "gradient/signal" not in streams(stream_groups=at_once).train(uneven)
    batch.groups[2].samples[0].loss_mask[:] = False
    assert "gradient/signal" not in streams().train(batch)
