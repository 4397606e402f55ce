"""KL estimators and the penalty on length against their definitions."""

import numpy as np
import pytest
import torch

from learners.objective import kl_estimate, overlong_penalty


def test_estimators_are_right_on_average_over_a_small_vocabulary():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    truth = (policy * (policy / reference).log()).sum().item()
    for estimator in ("k1", "k3"):
        mean = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum().item()
        assert mean == pytest.approx(truth)
    assert (kl_estimate(policy.log(), reference.log(), "k3") >= 0).all()
    torch.testing.assert_close(kl_estimate(policy.log(), reference.log(), "k2"), (policy / reference).log() ** 2 / 2)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_cut_estimate_is_within_its_bounds_and_has_no_gradient_beyond(estimator):
    """verl's k3 in a loop over tokens: kl = reference - policy within ±20, then exp(kl) - kl - 1 within ±10."""
    policy = torch.tensor([-0.1, -9.0, -30.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, -1.0, -0.5, -20.0], dtype=torch.float64)
    found = kl_estimate(policy, reference, estimator, cut=10.0)
    expected = []
    for p, r in zip(policy.tolist(), reference.tolist(), strict=True):
        d = min(max(r - p, -20.0), 20.0)
        expected.append({"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - d - 1}[estimator])
    np.testing.assert_allclose(found.detach(), np.clip(expected, -10, 10))
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert not gradient[np.abs(expected) > 10].any() and gradient[0]


def test_as_a_loss_k2_has_the_kls_gradient_and_k1_none():
    """Means of the estimators' gradients under the policy, against the gradient of the KL."""
    logits = torch.tensor([0.3, -0.4, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    held = logprobs.detach().exp()
    (truth,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    gradients = {
        name: torch.autograd.grad((held * kl_estimate(logprobs, reference, name)).sum(), logits, retain_graph=True)[0]
        for name in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(gradients["k2"], truth)
    torch.testing.assert_close(gradients["k1"], torch.zeros(3, dtype=torch.float64))
    assert torch.cosine_similarity(gradients["k3"], truth, dim=0) > 0.5


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_agree_with_finite_differences_and_stay_finite(estimator):
    policy = torch.tensor([-0.5, -3.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -0.2, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, reference, estimator), policy)
    impossible = torch.tensor([0.0, -torch.inf])
    policy, reference = torch.meshgrid(impossible, impossible, indexing="ij")
    assert torch.isfinite(kl_estimate(policy, reference, estimator)).all()


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_the_penalty_on_length_is_dapos_soft_punishment():
    lengths = np.array([1, 80, 81, 90, 99, 100])
    truth = [0.0 if n <= 100 - 20 else -((100 - 20) - n) / 20 for n in lengths]
    np.testing.assert_allclose(overlong_penalty(lengths, limit=100, buffer=20), truth)
    assert overlong_penalty(np.array([150]), limit=100, buffer=20) == 1.0
    np.testing.assert_array_equal(overlong_penalty(lengths, limit=100, buffer=0), [0, 0, 0, 0, 0, 1])
