"""The contracts that every loss keeps: gradient, cuts, masks, shares, limits, extremes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from areal_like.config.registry import COMPONENTS, resolve
from learners.losses.contract import LossBatch, is_supervised, plan_of, with_plan
from learners.losses.corrections import Corrected
from learners.losses.supervised import sft
from learners.losses.weighted import reinforce
from tests.learners.losses.token_batches import (
    LENGTH,
    LOSSES,
    POLICY_GRADIENT,
    batch_of,
    pieces_of,
    rows,
    value_and_gradient,
)

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)

WEIGHS_BY_CURRENT = ("decoupled interpolated", "is_pg", "is_pg token", "tis", "cispo", "vtrace", "vtrace wide")
WEIGHS_BY_CURRENT += (
    "topr",
    "vespo",
    "seq_mis",
    "is_pg normalised",
    "geo_mask",
    "sequence_mask",
    "dg corrected",
    "dg_kondo corrected",
)
SMOOTH = [name for name in LOSSES if name not in (*WEIGHS_BY_CURRENT, "dg", "dg hard", "dg bernoulli")]
"""Losses that hold no function of the current policy constant; the others' gradients are tested by formula."""


def test_every_registered_loss_is_tested_here():
    plain = [loss.loss if isinstance(loss, Corrected) else loss for loss in LOSSES.values()]
    tested = {getattr(loss, "func", loss) for loss in plain}
    assert tested == {resolve("loss", name) for name in COMPONENTS["loss"]}


def test_every_registered_correction_is_tested_here():
    """By the bounds and kinds that it sets; the numbers may be others."""

    def said(links):
        return [
            (link.weight, link.reject, link.over, link.where, link.low is None, link.high is None) for link in links
        ]

    tested = [said(loss.links) for loss in LOSSES.values() if isinstance(loss, Corrected)]
    for name in set(COMPONENTS["correction"]) - {"none"}:
        assert said(resolve("correction", name)(reinforce).links) in tested, name


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_agrees_with_finite_differences(name):
    batch = with_plan(LOSSES[name], batch_of(tokens=24, seed=2))

    def value(current):
        return LOSSES[name](replace(batch, current=current), 3.0)[0]

    assert torch.autograd.gradcheck(value, batch.current.detach().requires_grad_())


@every_loss
def test_how_micro_batches_are_cut_changes_neither_loss_nor_gradient_nor_observations(loss):
    batch = with_plan(loss, replace(batch_of(), share=torch.rand(60, dtype=torch.float64)))
    whole, seen = loss(batch, 11.0)
    (expected,) = torch.autograd.grad(whole, batch.current)
    pieces = [loss(piece, 11.0) for piece in pieces_of(batch, [1, 4, 2, 3])]
    total = sum(value for value, _ in pieces)
    (gradient,) = torch.autograd.grad(total, batch.current)
    assert total.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    order = [piece.mask for piece in pieces_of(batch, [1, 4, 2, 3])]
    for name, values in seen.items():
        parts = torch.cat([observed[name][mask] for (_, observed), mask in zip(pieces, order, strict=True)])
        torch.testing.assert_close(parts.double().sort()[0], values[batch.mask].double().sort()[0])


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_on_policy_these_losses_share_the_policy_gradient(name):
    batch = batch_of(spread=0.0)
    _, gradient, seen = value_and_gradient(LOSSES[name], batch, 60.0)
    np.testing.assert_allclose(gradient, -batch.advantages[batch.mask] / 60, rtol=1e-12)
    for share in ("clip_share", "capped_share", "masked_share"):
        assert not seen.get(share, np.zeros(1)).any()


@every_loss
def test_masked_tokens_have_no_say_whatever_they_hold(loss):
    batch = batch_of()
    expected, gradient, seen = value_and_gradient(loss, rows(batch, batch.mask), 9.0)
    for poison in (torch.nan, torch.inf, -torch.inf):
        for name in ("behaviour", "proximal", "advantages"):
            getattr(batch, name)[~batch.mask] = poison
        value, poisoned_gradient, poisoned_seen = value_and_gradient(loss, batch, 9.0)
        assert value == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(poisoned_gradient, gradient, rtol=1e-9, atol=1e-15)
        for name, values in seen.items():
            np.testing.assert_allclose(poisoned_seen[name], values)


@every_loss
def test_padding_behind_each_sequence_changes_nothing(loss):
    """Three masked tokens of junk after every sequence, as in a padded batch."""
    batch = batch_of()
    index = torch.arange(60).view(-1, LENGTH)
    padded = rows(batch, torch.cat([index, index[:, :3]], dim=1).flatten())
    padding = (torch.arange(len(padded.mask)) % (LENGTH + 3)) >= LENGTH
    padded.mask = padded.mask & ~padding
    padded.current = torch.where(padding, -3.0, padded.current)
    expected, gradient, _ = value_and_gradient(loss, batch, 9.0)
    value, padded_gradient, _ = value_and_gradient(loss, padded, 9.0)
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(padded_gradient, gradient, rtol=1e-9, atol=1e-15)


@every_loss
def test_equal_shares_only_scale_the_sum(loss):
    """A share of 1/4 on every token equals a denominator four times as large."""
    batch = batch_of()
    plain = with_plan(loss, batch)
    shared = replace(plain, share=torch.full((60,), 0.25, dtype=torch.float64))
    assert loss(shared, 2.0)[0].item() == pytest.approx(loss(plain, 8.0)[0].item(), rel=1e-12)


@every_loss
def test_impossible_tokens_stay_finite(loss):
    extremes = torch.tensor([0.0, -1e4, -3e38, -torch.inf])
    current, other, advantages = (
        x.flatten() for x in torch.meshgrid(extremes, extremes, torch.tensor([-2.0, 0.0, 2.0]), indexing="ij")
    )
    for length in (1, 4):
        for behaviour, proximal in ((other, current), (current, other), (other, other)):
            leaf = current.clone().requires_grad_()
            batch = LossBatch(
                current=leaf,
                behaviour=behaviour,
                proximal=proximal,
                advantages=advantages,
                mask=torch.ones(48, dtype=torch.bool),
                sequence=torch.arange(48) // length,
                staleness=torch.arange(48) % 3,
                group=torch.arange(48) // 12,
                uniform=torch.linspace(0, 0.99, 48),
            )
            value, seen = loss(with_plan(loss, batch), 48.0)
            value.backward()
            assert torch.isfinite(value) and leaf.grad is not None and torch.isfinite(leaf.grad).all()
            assert all(torch.isfinite(v.double()).all() for v in seen.values())


@every_loss
def test_a_micro_batch_without_trained_tokens_is_zero(loss):
    batch = batch_of(masked=1.1)
    value, gradient, _ = value_and_gradient(loss, batch, 4.0)
    assert value == 0.0 and not gradient.any()


@every_loss
def test_float32_gives_float32(loss):
    batch = batch_of()
    for name in ("behaviour", "proximal", "advantages"):
        setattr(batch, name, getattr(batch, name).float())
    batch.current = batch.current.detach().float().requires_grad_()
    assert loss(with_plan(loss, batch), 4.0)[0].dtype == torch.float32


def test_only_sft_trains_what_somebody_wrote():
    assert [name for name, loss in LOSSES.items() if is_supervised(loss)] == [
        name for name, loss in LOSSES.items() if getattr(loss, "func", loss) is sft
    ]
    assert is_supervised(sft) and is_supervised(partial(sft))


def test_planned_losses_refuse_to_run_without_their_plan():
    for loss in LOSSES.values():
        if plan_of(loss):
            with pytest.raises(ValueError, match="plan"):
                loss(batch_of(), 1.0)
