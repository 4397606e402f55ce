"""The gated losses against the formula, token by token."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from learners.losses.contract import is_single_pass, needs_uniform, plan_of, with_plan
from learners.losses.delightful import dg, dg_kondo
from tests.learners.losses.token_batches import arrays, batch_of, value_and_gradient
from tests.seeds import torch_seeded


@pytest.mark.parametrize(("temperature", "threshold"), [(1.0, 0.0), (0.5, 0.3), (3.0, -1.0)])
def test_dg_gates_by_advantage_times_surprisal(temperature, threshold):
    batch = batch_of()
    current, _, _, advantages = arrays(batch)
    chi = advantages * -current
    gate = np.array([1 / (1 + math.exp(-(x - threshold) / temperature)) for x in chi])
    value, gradient, seen = value_and_gradient(
        partial(dg, gate_temperature=temperature, gate_threshold=threshold), batch, 7.0
    )
    np.testing.assert_allclose(gradient, -gate * advantages / 7, rtol=1e-12)
    assert value == pytest.approx(-(gate * advantages * current).sum() / 7)
    np.testing.assert_allclose(seen["gate"], gate)


def test_a_cold_gate_is_an_indicator_and_its_limit():
    batch = batch_of()
    current, _, _, advantages = arrays(batch)
    _, hard, _ = value_and_gradient(partial(dg, gate_temperature=0.0, gate_threshold=0.2), batch, 1.0)
    _, cold, _ = value_and_gradient(partial(dg, gate_temperature=1e-6, gate_threshold=0.2), batch, 1.0)
    np.testing.assert_allclose(hard, -advantages * (advantages * -current > 0.2))
    np.testing.assert_allclose(cold, hard, atol=1e-12)


def test_a_cold_gate_drops_what_carries_no_delight():
    batch = batch_of()
    batch.advantages = torch.zeros_like(batch.advantages)
    assert not value_and_gradient(partial(dg, gate_temperature=0.0), batch, 1.0)[2]["gate"].any()


def test_a_hot_gate_is_half_of_reinforce():
    batch = batch_of()
    _, gradient, _ = value_and_gradient(partial(dg, gate_temperature=1e9), batch, 1.0)
    np.testing.assert_allclose(gradient, -arrays(batch)[3] / 2, rtol=1e-6)


def test_dg_knows_no_behaviour():
    batch = batch_of()
    expected = value_and_gradient(dg, batch, 1.0)[1]
    batch.behaviour = torch.full_like(batch.behaviour, torch.nan)
    np.testing.assert_array_equal(value_and_gradient(dg, batch, 1.0)[1], expected)


def test_drawn_gates_are_the_gates_on_average():
    batch = batch_of(masked=0.0)
    expected = value_and_gradient(dg, batch, 1.0)[1]
    draws = []
    for i in range(400):
        batch.uniform = torch.rand(60, dtype=torch.float64, generator=torch_seeded(i))
        draws.append(value_and_gradient(partial(dg, bernoulli=True), batch, 1.0)[1])
    advantages = arrays(batch)[3]
    assert all(np.all((d == 0) | np.isclose(d, -advantages)) for d in draws)
    np.testing.assert_allclose(np.mean(draws, 0), expected, atol=5 * np.abs(advantages).max() * 0.5 / 20)
    assert needs_uniform(dg)


@pytest.mark.parametrize("keep", [0.03, 0.2, 1.0])
def test_kondo_keeps_the_top_share_by_delight_and_divides_by_all(keep):
    batch = batch_of()
    current, _, _, advantages = arrays(batch)
    chi = advantages * -current
    top = sorted(range(len(chi)), key=lambda i: -chi[i])[: math.ceil(keep * len(chi))]
    kept = np.isin(np.arange(len(chi)), top)
    loss = partial(dg_kondo, keep=keep)
    value, gradient, _ = value_and_gradient(loss, batch, float(len(chi)))
    np.testing.assert_allclose(gradient, -(kept * advantages) / len(chi), rtol=1e-12)
    assert value == pytest.approx(-(kept * advantages * current).sum() / len(chi))
    assert plan_of(loss).skips


def test_kondo_never_keeps_a_token_without_advantage():
    batch = batch_of()
    batch.advantages = torch.zeros_like(batch.advantages)
    assert not with_plan(partial(dg_kondo, keep=1.0), batch).weights.any()


def test_both_are_for_a_single_pass():
    assert is_single_pass(dg) and is_single_pass(partial(dg_kondo, keep=0.5))


def test_senseless_knobs_are_refused():
    with pytest.raises(ValueError, match="gate_temperature"):
        dg(batch_of(), 1.0, gate_temperature=-1.0)
    for keep in (0.0, 1.5):
        with pytest.raises(ValueError, match="keep"):
            with_plan(partial(dg_kondo, keep=keep), batch_of())
