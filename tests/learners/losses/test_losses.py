"""Every loss with every correction against NumPy (value and gradient), and the contracts that all of them keep."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_like.config.registry import COMPONENTS, ConfigError, bind, resolve
from learners.losses.contract import LossBatch, marks_of, planned_for
from learners.losses.corrections import Corrected
from learners.losses.trial import try_loss
from learners.losses.weighted import reinforce
from tests.learners.losses.references import corrected
from tests.learners.losses.token_batches import (
    KNOBS,
    LENGTH,
    LINKS,
    LOSSES,
    POLICY_GRADIENT,
    batch_of,
    is_refused,
    loss_of,
    own_ratio,
    pieces_of,
    rows,
    value_and_gradient,
)

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
CASES = [(name, knobs) for name, sets in KNOBS.items() for knobs in sets]


def test_every_registered_loss_and_correction_is_in_the_table() -> None:
    plain = [loss.loss if isinstance(loss, Corrected) else loss for loss in LOSSES.values()]
    tested = {getattr(loss, "func", loss) for loss in plain}
    assert tested == {resolve("loss", name) for name in COMPONENTS["loss"]}
    assert set(COMPONENTS["correction"]) <= {*LINKS, "ratio"}
    for name in set(COMPONENTS["correction"]) - {"none", "ratio"}:  # by the kinds of their bounds; numbers may differ
        shipped = [vars(link) for link in resolve("correction", name)(reinforce).links]
        ours = [vars(link) for link in loss_of("reinforce", {}, name).links]
        for one, other in zip(shipped, ours, strict=True):
            assert [one[k] for k in ("weight", "reject", "over", "where")] == [
                other[k] for k in ("weight", "reject", "over", "where")
            ]
            assert [one[k] is None for k in ("low", "high")] == [other[k] is None for k in ("low", "high")], name


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=lambda value: str(value))
def test_value_and_gradient_with_each_correction_are_those_of_plain_loops(name, knobs, shared) -> None:
    cases = set()
    for number, (correction, links) in enumerate(LINKS.items()):
        if name == "sft" and links:
            continue
        if is_refused(name, knobs, links):
            with pytest.raises((ConfigError, ValueError), match=r"weight|pair"):
                loss_of(name, knobs, correction)
            continue
        batch = batch_of(seed=number)
        if shared:
            batch.share = torch.tensor(np.random.default_rng(1).random(60) + 0.5)
        pair = "behaviour_proximal" if own_ratio(name, knobs) == "proximal_current" else "behaviour_current"
        expected, slope = corrected(name, knobs, links, pair, batch)
        value, gradient, seen = value_and_gradient(loss_of(name, knobs, correction), batch, 7.0)
        assert value == pytest.approx(expected / 7, rel=1e-9, abs=1e-12), correction
        np.testing.assert_allclose(gradient, slope[batch.mask.numpy()] / 7, rtol=1e-8, atol=1e-12, err_msg=correction)
        cases |= {share for share in ("masked_share", "capped_share") if share in seen and seen[share].any()}
    assert "masked_share" in cases or name == "sft"


@every_loss
def test_how_micro_batches_are_cut_changes_neither_loss_nor_gradient_nor_observations(loss) -> None:
    batch, _ = planned_for(loss, replace(batch_of(), share=torch.rand(60, dtype=torch.float64)))
    whole, seen = loss(batch, 11.0)
    (expected,) = torch.autograd.grad(whole, batch.current)
    parts = pieces_of(batch, [1, 4, 2, 3])
    pieces = [loss(piece, 11.0) for piece in parts]
    total = sum(value for value, _ in pieces)
    (gradient,) = torch.autograd.grad(total, batch.current)
    assert total.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    for name, values in seen.items():
        found = torch.cat([observed[name][piece.mask] for (_, observed), piece in zip(pieces, parts, strict=True)])
        torch.testing.assert_close(found.double().sort()[0], values[batch.mask].double().sort()[0])


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_on_policy_these_losses_share_the_policy_gradient(name) -> None:
    batch = batch_of(spread=0.0)
    _, gradient, seen = value_and_gradient(LOSSES[name], batch, 60.0)
    np.testing.assert_allclose(gradient, -batch.advantages[batch.mask] / 60, rtol=1e-12)
    for share in ("clip_share", "capped_share", "masked_share"):
        assert not seen.get(share, np.zeros(1)).any()


@every_loss
def test_masked_tokens_and_padding_have_no_say_whatever_they_hold(loss) -> None:
    batch = batch_of()
    expected, gradient, _ = value_and_gradient(loss, rows(batch, batch.mask), 9.0)
    index = torch.arange(60).view(-1, LENGTH)
    padded = rows(batch, torch.cat([index, index[:, :3]], dim=1).flatten())
    padded.mask = padded.mask & ((torch.arange(len(padded.mask)) % (LENGTH + 3)) < LENGTH)
    for each, poison in itertools.product((batch, padded), (torch.nan, torch.inf, -torch.inf)):
        for name in ("behaviour", "proximal", "advantages"):
            getattr(each, name)[~each.mask] = poison
        value, poisoned, _ = value_and_gradient(loss, each, 9.0)
        assert value == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(poisoned, gradient, rtol=1e-9, atol=1e-15)


@every_loss
def test_impossible_tokens_stay_finite_and_an_empty_micro_batch_is_zero_in_its_dtype(loss) -> None:
    extremes = torch.tensor([0.0, -1e4, -3e38, -torch.inf])
    current, other, advantages = (
        x.flatten() for x in torch.meshgrid(extremes, extremes, torch.tensor([-2.0, 0.0, 2.0]), indexing="ij")
    )
    place = torch.arange(48)
    others = ((other, current), (current, other), (other, other))
    for length, (behaviour, proximal) in itertools.product((1, 4), others):
        leaf, mask = current.clone().requires_grad_(), torch.ones(48, dtype=torch.bool)
        batch = LossBatch(leaf, behaviour, proximal, advantages, mask, place // length, place % 3)
        batch.group, batch.uniform = place // 12, torch.linspace(0, 0.99, 48)
        value, seen = loss(planned_for(loss, batch)[0], 48.0)
        value.backward()
        assert value.dtype == torch.float32 and torch.isfinite(value) and torch.isfinite(leaf.grad).all()
        assert all(torch.isfinite(v.double()).all() for v in seen.values())
    value, gradient, _ = value_and_gradient(loss, batch_of(masked=1.1), 4.0)
    assert value == 0.0 and not gradient.any()


@every_loss
def test_each_loss_passes_the_trial_and_a_planned_one_refuses_to_run_without_its_plan(loss) -> None:
    try_loss(loss, "it")
    if marks_of(loss).plan:
        with pytest.raises(ValueError, match="plan"):
            loss(batch_of(), 1.0)


# AReaL's 144 settings (importance level, dual clip, bounds, form of rejection) by the table of docs/algorithms.md

AREAL = {  # metric → our name for it
    "ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3_reverse",
}  # fmt: skip
FORMS = [("token", "clamp", "ratio", None), ("sequence", "clamp", "ratio", "mean")]
FORMS += [("token", "mask", metric, None) for metric in AREAL]
FORMS += [("sequence", "mask", metric, agg) for metric, agg in itertools.product(AREAL, ("sum", "mean", "max"))]
LOWER, UPPER = {"ratio": 0.8, "kl_k1": -0.2}, {"ratio": 1.25, "kl_k1": 0.2}


def in_our_words(form, low, high) -> dict:
    """The row of the table. AReaL's kl_k1 is log proximal/behaviour, the negative of ours."""
    level, action, metric, agg = form
    weight = "geometric" if level == "sequence" and metric == "ratio" else "token"
    if action == "clamp":
        return {"weight": weight, "weight_low": low or 0.0, "weight_high": high}
    over = agg or "token"
    if metric == "kl_k1":
        low, high, over = -high, None if low is None else -low, "min" if agg == "max" else over
    bounds = {name: bound for name, bound in (("low", low), ("high", high)) if bound is not None}
    return {"weight": weight, "reject": AREAL[metric], "over": over, **bounds}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(str(each) for each in form))
def test_each_form_of_areal_is_a_row_of_the_table(form) -> None:
    """The truth: `ppo_actor_loss_fn`'s weight and mask by plain loops; rejected tokens leave the mask, not the sum."""
    assert len(FORMS) == 18
    (level, action, metric, agg), batch = form, batch_of(tokens=30, seed=3, spread=0.2)
    measure = {"ratio": lambda d: d, "kl_k1": lambda d: d, "kl_k2": lambda d: d * d / 2}
    measure |= {"kl_k3": lambda d: math.exp(-d) - 1 + d}
    for bounds, sequence_level, dual in itertools.product(("upper", "both"), (False, True), (None, 1.2)):
        low = LOWER.get(metric) if bounds == "both" else None
        high = UPPER.get(metric, 0.05 if agg != "sum" else 0.1)
        moved, mask = (batch.proximal - batch.behaviour).numpy(), batch.mask.numpy()
        weight, kept = np.exp(moved), mask.copy()
        for t in np.flatnonzero(mask):
            own = [i for i in np.flatnonzero(mask) if batch.sequence[i] == batch.sequence[t]]
            if level == "sequence" and metric == "ratio":
                weight[t] = math.exp(np.mean(moved[own]))
            values = [measure[metric](moved[i]) for i in (own if agg else [t])]
            found = {"sum": sum, "mean": np.mean, "max": max}[agg](values) if agg else values[0]
            found = math.exp(found) if metric == "ratio" else found
            if action == "clamp":
                weight[t] = min(max(weight[t], low or 0.0), high)
            else:
                kept[t] = (low is None or found >= low) and found <= high
        name = "gspo" if sequence_level else "decoupled_ppo"
        knobs = {"clip": 0.2, "clip_high": None, "proximal": "recompute", "dual_clip": dual}
        knobs |= {"average": True} if sequence_level else {}
        narrowed = replace(batch, mask=torch.tensor(kept), share=torch.tensor(weight))
        expected, slope = corrected(name, knobs, [], "", narrowed)
        loss = bind("loss", {"name": name, **knobs, "correction": {"name": "ratio", **in_our_words(form, low, high)}})
        value, gradient, _ = value_and_gradient(loss, batch, 7.0)
        assert value == pytest.approx(expected / 7, rel=1e-10, abs=1e-12) and slope.any()
        np.testing.assert_allclose(gradient, slope[mask] / 7, rtol=1e-9, atol=1e-12)
