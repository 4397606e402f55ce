"""The cosine of consecutive gradients, and its bound, against NumPy."""

from functools import partial

import numpy as np
import pytest
import torch

from learners.advantages import group
from learners.alignment import Alignment
from learners.collectives import Ranks
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from tests.learners.batches import make_batch, tiny_model
from tests.seeds import seeded


def cosine(a, b) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("cap", [0.3, 0.05])
def test_what_is_too_alike_is_turned_until_the_cosine_is_the_bound(cap):
    rng = seeded(0)
    before, across = rng.normal(size=40), rng.normal(size=40)
    gradient = before + across
    assert cosine(gradient, before) > 0.5
    alignment, turned = Alignment(cap, Ranks(1)), torch.tensor(gradient)
    alignment.bound(torch.tensor(before), float(np.linalg.norm(before)))
    norm = alignment.bound(turned, float(np.linalg.norm(gradient)))
    assert cosine(turned.numpy(), before) == pytest.approx(cap)
    assert norm == pytest.approx(np.linalg.norm(turned.numpy()))
    unit = before / np.linalg.norm(before)
    expected = gradient - (gradient @ unit) * unit
    np.testing.assert_allclose(turned.numpy() - (turned.numpy() @ unit) * unit, expected, atol=1e-12)
    assert alignment.take() == pytest.approx({"grad_cosine": cosine(gradient, before), "grad_cosine_cut": 1.0})
    third = torch.tensor(before.copy())
    alignment.bound(third, float(np.linalg.norm(before)))
    assert cosine(third.numpy(), gradient) == pytest.approx(cap), "held against the gradient as it was"


@pytest.mark.parametrize("gradient", [[1.0, 0.0, 0.0], [-3.0, 0.1, 0.0], [0.0, 0.0, 0.0]])
def test_what_is_not_too_alike_stays_as_it_is(gradient):
    alignment, kept = Alignment(0.5, Ranks(1)), torch.tensor(gradient)
    alignment.bound(torch.tensor([0.1, 1.0, 0.0]), 1.005)
    alignment.bound(kept, float(kept.norm()))
    assert kept.tolist() == pytest.approx(gradient)


def learner_of(**knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), ppo, partial(group), 1.0, 0, lr=1e-6, num_minibatches=1, **knobs)


def test_a_bound_of_one_only_measures():
    plain, measured = learner_of(), learner_of(grad_cosine_cap=1.0)
    batch = make_batch(seeded(0))
    for _ in range(2):
        expected, metrics = plain.train(batch), measured.train(batch)
    assert plain.snapshot().digest() == measured.snapshot().digest()
    assert metrics["grad_cosine"] > 0.3 and metrics["grad_cosine_cut"] == 0 and "grad_cosine" not in expected


def test_a_resumed_learner_knows_the_gradient_before(tmp_path):
    batch, learners = make_batch(seeded(0)), [learner_of(grad_cosine_cap=0.1) for _ in range(2)]
    learners[0].train(batch)
    learners[0].save_state(tmp_path)
    learners[1].load_state(tmp_path)
    first, second = (learner.train(batch) for learner in learners)
    assert first["grad_cosine"] == second["grad_cosine"] and first["grad_cosine_cut"] == 1.0
    assert learners[0].snapshot().digest() == learners[1].snapshot().digest()


@pytest.mark.parametrize("cap", [0.0, 1.1])
def test_senseless_bounds_are_refused(cap):
    with pytest.raises(ValueError, match="grad_cosine_cap"):
        Alignment(cap, Ranks(1))
