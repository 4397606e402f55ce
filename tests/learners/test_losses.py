"""The losses against NumPy written from the formulas, and the contracts that every loss keeps."""

from functools import partial

import numpy as np
import pytest
import torch

from learners.losses import LossBatch, decoupled_ppo, needs_proximal, ppo

LOSSES = {
    "ppo": ppo,
    "ppo dual": partial(ppo, clip=0.1, clip_high=0.3, dual_clip=1.2),
    "decoupled": decoupled_ppo,
    "decoupled clamp": partial(decoupled_ppo, clip_high=0.28, dual_clip=1.5, behaviour_cap=1.1, cap_mode="clamp"),
    "decoupled uncapped": partial(decoupled_ppo, behaviour_cap=None),
}


def batch_of(tokens: int = 60, seed: int = 0, spread: float = 0.4, masked: float = 0.2) -> LossBatch:
    """Random logprobs in float64 whose ratios fall on both sides of every clip and cap."""
    rng = np.random.default_rng(seed)
    behaviour = -rng.exponential(1.5, tokens)
    proximal = behaviour + rng.normal(0, spread, tokens)
    current = proximal + rng.normal(0, spread, tokens)
    return LossBatch(
        current=torch.tensor(current, requires_grad=True),
        behaviour=torch.tensor(behaviour),
        proximal=torch.tensor(proximal),
        advantages=torch.tensor(rng.normal(0, 1, tokens)),
        mask=torch.tensor(rng.random(tokens) >= masked),
        sequence=torch.arange(tokens) // 6,
        staleness=torch.tensor(rng.integers(0, 4, tokens)),
    )


def rows(batch: LossBatch, index: torch.Tensor) -> LossBatch:
    fields = ("current", "behaviour", "proximal", "advantages", "mask", "sequence", "staleness")
    return LossBatch(**{name: getattr(batch, name)[index] for name in fields})


def arrays(batch: LossBatch) -> tuple[np.ndarray, ...]:
    tensors = (batch.current, batch.behaviour, batch.proximal, batch.advantages)
    return tuple(t.detach().numpy()[batch.mask.numpy()] for t in tensors)


def truth_of_clip(ratio, advantage, low, high, dual=None):
    """One token's objective and its derivative by the ratio, case by case."""
    if advantage >= 0:
        return (ratio * advantage, advantage) if ratio < 1 + high else ((1 + high) * advantage, 0.0)
    if ratio < 1 - low:
        return (1 - low) * advantage, 0.0
    if dual is not None and ratio > dual:
        return dual * advantage, 0.0
    return ratio * advantage, advantage


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, None, None), (0.1, 0.3, None), (0.2, 0.28, 1.3)])
def test_ppo_is_the_clipped_surrogate_of_current_over_behaviour(low, high, dual):
    batch = batch_of()
    loss, metrics = ppo(batch, 7.0, clip=low, clip_high=high, dual_clip=dual)
    loss.backward()
    current, behaviour, _, advantages = arrays(batch)
    ratio = np.exp(current - behaviour)
    cases = [
        truth_of_clip(r, a, low, low if high is None else high, dual) for r, a in zip(ratio, advantages, strict=True)
    ]
    value, slope = np.array(cases).T
    assert loss.item() == pytest.approx(-value.sum() / 7, rel=1e-12)
    np.testing.assert_allclose(batch.current.grad[batch.mask], -slope * ratio / 7, rtol=1e-12)
    assert metrics["clip_share"].item() == np.count_nonzero(slope == 0) > 3
    assert metrics["ratio/mean"].item() == pytest.approx(ratio.sum())
    assert metrics["ratio/max"].item() == pytest.approx(ratio.max())


@pytest.mark.parametrize("mode", ["mask", "clamp"])
def test_decoupled_ppo_weighs_by_proximal_over_behaviour_and_clips_current_over_proximal(mode):
    batch = batch_of(seed=1)
    loss, metrics = decoupled_ppo(batch, 5.0, clip=0.15, behaviour_cap=1.4, cap_mode=mode)
    loss.backward()
    current, behaviour, proximal, advantages = arrays(batch)
    weight, ratio = np.exp(proximal - behaviour), np.exp(current - proximal)
    used = np.where(weight > 1.4, 0.0 if mode == "mask" else 1.4, weight)
    value, slope = np.array([truth_of_clip(r, a, 0.15, 0.15) for r, a in zip(ratio, advantages, strict=True)]).T
    assert loss.item() == pytest.approx(-(used * value).sum() / 5, rel=1e-12)
    np.testing.assert_allclose(batch.current.grad[batch.mask], -used * slope * ratio / 5, rtol=1e-12)
    assert metrics["capped_share"].item() == np.count_nonzero(weight > 1.4) > 3
    assert metrics["behaviour_weight/mean"].item() == pytest.approx(weight.sum())
    assert metrics["behaviour_weight/max"].item() == pytest.approx(weight.max())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradient_agrees_with_finite_differences(loss):
    batch = batch_of(tokens=24, seed=2)

    def value(current):
        moved = rows(batch, torch.arange(24))
        moved.current = current
        return loss(moved, 3.0)[0]

    assert torch.autograd.gradcheck(value, batch.current.detach().requires_grad_())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_how_micro_batches_are_cut_changes_neither_loss_nor_gradient_nor_metrics(loss):
    batch = batch_of()
    whole, whole_metrics = loss(batch, 11.0)
    (expected,) = torch.autograd.grad(whole, batch.current)
    pieces = [loss(rows(batch, i), 11.0) for i in torch.randperm(60).split([1, 20, 7, 32])]
    total = sum(value for value, _ in pieces)
    (gradient,) = torch.autograd.grad(total, batch.current)
    assert total.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    for name, value in whole_metrics.items():
        parts = [metrics[name].item() for _, metrics in pieces]
        assert (max(parts) if name.endswith("/max") else sum(parts)) == pytest.approx(value.item())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(loss):
    batch = batch_of(spread=0.0)
    loss(batch, 60.0)[0].backward()
    torch.testing.assert_close(batch.current.grad, torch.where(batch.mask, -batch.advantages / 60, 0.0))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_masked_tokens_have_no_say_whatever_they_hold(loss):
    batch = batch_of()
    expected, expected_metrics = loss(rows(batch, batch.mask), 9.0)
    expected.backward()
    expected_gradient, batch.current.grad = batch.current.grad, None
    for poison in (torch.nan, torch.inf, -torch.inf):
        for name in ("behaviour", "proximal", "advantages"):
            getattr(batch, name)[~batch.mask] = poison
        loss_value, metrics = loss(batch, 9.0)
        loss_value.backward()
        assert loss_value.item() == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(batch.current.grad, expected_gradient)
        assert {k: v.item() for k, v in metrics.items()} == pytest.approx(
            {k: v.item() for k, v in expected_metrics.items()}
        )
        batch.current.grad = None


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_impossible_tokens_stay_finite(loss):
    extremes = torch.tensor([0.0, -1e4, -3e38, -torch.inf])
    current, other, advantages = (
        x.flatten() for x in torch.meshgrid(extremes[:3], extremes, torch.tensor([-2.0, 0.0, 2.0]), indexing="ij")
    )
    for behaviour, proximal in ((other, current), (current, other), (other, other)):
        batch = LossBatch(
            current=current.clone().requires_grad_(),
            behaviour=behaviour,
            proximal=proximal.clamp(min=-3e38),
            advantages=advantages,
            mask=torch.ones(36, dtype=torch.bool),
            sequence=torch.arange(36),
            staleness=torch.zeros(36, dtype=torch.int64),
        )
        value, metrics = loss(batch, 36.0)
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(batch.current.grad).all()
        assert all(torch.isfinite(m) for m in metrics.values())


def test_a_micro_batch_without_trained_tokens_is_zero():
    for loss in LOSSES.values():
        value, metrics = loss(batch_of(masked=1.1), 4.0)
        assert value.item() == 0.0
        assert all(m.item() == 0.0 for m in metrics.values())


def test_no_gradient_flows_into_the_behaviour_weight():
    batch = batch_of()
    batch.proximal.requires_grad_()
    decoupled_ppo(batch, 1.0)[0].backward()
    assert batch.proximal.grad is None


def test_losses_say_whether_they_want_proximal_logprobs():
    assert needs_proximal(decoupled_ppo) and needs_proximal(partial(decoupled_ppo, clip=0.1))
    assert not needs_proximal(ppo) and not needs_proximal(partial(ppo, clip=0.1))
    batch = batch_of()
    batch.proximal = None
    with pytest.raises(ValueError, match="proximal"):
        decoupled_ppo(batch, 1.0)


@pytest.mark.parametrize("knobs", [{"clip": 0.0}, {"clip": 1.5}, {"clip_high": -0.1}, {"dual_clip": 1.0}])
def test_senseless_clips_are_refused(knobs):
    for loss in (ppo, decoupled_ppo):
        with pytest.raises(ValueError, match=next(iter(knobs))):
            loss(batch_of(), 1.0, **knobs)


def test_an_unknown_cap_mode_is_refused():
    with pytest.raises(ValueError, match="cap_mode"):
        decoupled_ppo(batch_of(), 1.0, cap_mode="drop")
