"""Values exactly at a limit: which knobs are refused, and what happens to a token on a cap, a clip or a tie."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from learners.losses.clipped import decoupled_ppo, gspo, ppo, sapo
from learners.losses.contract import LossBatch
from learners.losses.corrections import capped, ratio, tis
from learners.losses.delightful import dg, kondo_gate
from learners.losses.targets import preference_weights, target_weights
from learners.losses.trusted import dppo, second_moment_mask
from learners.losses.weighted import reinforce, vespo, vtrace
from tests.learners.losses.token_batches import batch_of, rows, value_and_gradient


def named(case: partial) -> str:
    """An id that is the same in each worker of the tests."""
    return f"{case.func.__name__} {case.keywords}"


REFUSED = [
    partial(ppo, clip=0.0),
    partial(ppo, clip=1.001),
    partial(ppo, clip_high=0.0),
    partial(ppo, dual_clip=1.0),
    partial(gspo, clip=0.0),
    partial(gspo, clip_high=0.0),
    partial(sapo, temperature=0.0),
    partial(sapo, temperature_negative=0.0),
    partial(dg, gate_temperature=-1e-9),
    partial(dppo, tv=0.0),
    partial(dppo, tv=1.001),
    partial(dppo, tv_high=0.0),
    partial(dppo, tv_high=1.001),
    partial(vtrace, rho_bar=0.0),
    partial(vtrace, c_bar=0.0),
]
ALLOWED = [
    partial(ppo, clip=1.0),
    partial(dg, gate_temperature=0.0),
    partial(dppo, tv=1.0, tv_high=1.0),
]
PLANS_REFUSED = [
    partial(kondo_gate, keep=0.0),
    partial(kondo_gate, keep=1.001),
    partial(preference_weights, alpha=-1e-9),
    partial(preference_weights, alpha=1.001),
    partial(preference_weights, beta=-1e-9),
    partial(target_weights, temperature=0.0),
    partial(second_moment_mask, threshold=0.0),
]
PLANS_ALLOWED = [
    partial(kondo_gate, keep=1.0),
    partial(preference_weights, alpha=0.0),
    partial(preference_weights, alpha=1.0),
    partial(preference_weights, beta=0.0),
]


@pytest.mark.parametrize("loss", REFUSED, ids=named)
def test_a_knob_just_outside_its_range_is_refused(loss):
    with pytest.raises(ValueError, match="got "):
        loss(batch_of(), 1.0)


@pytest.mark.parametrize("loss", ALLOWED, ids=named)
def test_a_knob_at_the_end_of_its_range_is_not(loss):
    assert loss(batch_of(), 1.0)[0].isfinite()


@pytest.mark.parametrize("plan", PLANS_REFUSED, ids=named)
def test_a_plan_refuses_them_as_well(plan):
    with pytest.raises(ValueError, match="got "):
        plan(batch_of())


@pytest.mark.parametrize("plan", PLANS_ALLOWED, ids=named)
def test_a_plan_takes_the_ends_of_its_ranges(plan):
    assert plan(batch_of())[0].isfinite().all()


def on_policy() -> LossBatch:
    """All ratios are exactly 1."""
    batch = batch_of(masked=0.0)
    return replace(batch, behaviour=batch.current.detach().clone(), proximal=batch.current.detach().clone())


@pytest.mark.parametrize(
    ("loss", "share"),
    [(capped(decoupled_ppo, high=1.0), "masked_share"), (tis(reinforce, weight_high=1.0), "capped_share")],
)
def test_a_weight_that_equals_the_cap_is_not_capped(loss, share):
    _, gradient, seen = value_and_gradient(loss, on_policy(), 1.0)
    assert not seen[share].any() and (gradient != 0).all()


def test_a_probability_that_has_moved_by_exactly_the_limit_is_trusted():
    batch = batch_of(masked=0.0)
    current = torch.zeros_like(batch.current.detach()).requires_grad_()
    behaviour = torch.log(torch.full_like(batch.behaviour, 0.5))
    risen = float((1.0 - behaviour.exp())[0])
    batch = replace(batch, current=current, behaviour=behaviour, advantages=torch.ones_like(batch.advantages))
    assert not value_and_gradient(partial(dppo, tv=risen), batch, 1.0)[2]["masked_share"].any()
    assert value_and_gradient(partial(dppo, tv=risen - 1e-6), batch, 1.0)[2]["masked_share"].all()
    fallen = replace(
        batch,
        current=behaviour.clone().requires_grad_(),
        behaviour=torch.zeros_like(behaviour),
        advantages=-torch.ones_like(batch.advantages),
    )
    assert not value_and_gradient(partial(dppo, tv=risen), fallen, 1.0)[2]["masked_share"].any()
    assert value_and_gradient(partial(dppo, tv=risen - 1e-6), fallen, 1.0)[2]["masked_share"].all()


def test_tokens_without_an_advantage_are_neither_good_nor_bad():
    batch = batch_of(masked=0.0)
    batch.advantages[::3] = 0.0
    weights, _ = preference_weights(batch)
    assert (weights[::3] == 0).all() and (weights[1::3] != 0).all()
    alone = replace(batch, advantages=batch.advantages.clamp(min=0.0))
    assert (preference_weights(alone)[0] >= 0).all()


def test_a_second_moment_of_exactly_the_threshold_is_small_enough():
    """Binary fractions: each log ratio is a half."""
    batch = batch_of(masked=0.0)
    batch = replace(
        batch, current=torch.full_like(batch.behaviour, -1.0), behaviour=torch.full_like(batch.behaviour, -1.5)
    )
    assert second_moment_mask(batch, threshold=0.25)[0].all()
    assert not second_moment_mask(batch, threshold=0.2499)[0].any()


def test_a_minibatch_without_tokens_has_no_targets():
    weights, seen = target_weights(rows(batch_of(), torch.arange(0)))
    assert weights.shape == (0,) and seen == {}


def test_a_group_with_one_answer_has_nothing_to_learn_and_counts_as_a_group():
    """Three sequences of six tokens: two of one group, one of the next."""
    batch = batch_of(tokens=18, masked=0.0)
    weights, _ = target_weights(batch)
    alone, _ = target_weights(rows(batch, torch.arange(12)))
    assert alone.any() and not weights[12:].any()
    torch.testing.assert_close(weights[:12] / (18 / 2), alone / (12 / 1))


def observed(loss, advantage: float) -> dict[str, torch.Tensor]:
    """What a loss observes where every token has this advantage."""
    batch = batch_of(masked=0.0)
    return loss(replace(batch, advantages=torch.full_like(batch.advantages, advantage)), 1.0)[1]


@pytest.mark.parametrize(
    "loss",
    [
        partial(dppo, tv=0.01),
        ratio(reinforce, weight="none", reject="ratio", low=0.9, high=1.1, where="negative"),
        tis(reinforce, weight_high=1.1, where="negative"),
    ],
    ids=["dppo", "rejected", "cut"],
)
def test_a_token_without_an_advantage_is_not_counted_as_held_back(loss):
    """It has no gradient in any case; the shares that people watch are of tokens that would have one."""
    for advantage, some in ((0.0, False), (-1.0, True)):
        seen = observed(loss, advantage)
        assert any(seen[share].any() for share in ("masked_share", "capped_share") if share in seen) == some


@pytest.mark.parametrize(("loss", "seen", "like"), [(vespo, "kernel", 1.0), (sapo, "soft_gate", -1.0)])
def test_a_token_without_an_advantage_has_the_knobs_of_one_side(loss, seen, like):
    """VESPO's other knobs are for A < 0, SAPO's first temperature for A > 0."""
    none, same, other = (observed(loss, advantage)[seen] for advantage in (0.0, like, -like))
    assert torch.equal(none, same) and not torch.equal(none, other)


def test_of_equal_delights_the_earlier_tokens_stay():
    batch = on_policy()
    batch = replace(
        batch,
        current=torch.full_like(batch.current.detach(), -0.7).requires_grad_(),
        advantages=torch.ones_like(batch.advantages),
    )
    weights, _ = kondo_gate(batch, keep=0.3)
    kept = int(weights.sum())
    assert kept == 18 and weights[:kept].all(), "three tenths of 60, the first ones"
