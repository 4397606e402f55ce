"""AReaL's 144 settings (importance level, dual clip, bounds, form of rejection) by the table of docs/algorithms.md.

The truth is plain loops over what its `ppo_actor_loss_fn` does with them: rejected tokens leave the mask, not the
denominator.
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest

from learners.losses.clipped import decoupled_ppo, gspo
from learners.losses.corrections import ratio
from tests.learners.losses.test_clipped import truth_of_clip
from tests.learners.losses.token_batches import batch_of, value_and_gradient

AREAL = {  # metric of d = log proximal/behaviour; how it is said here
    "ratio": (lambda d: d, "ratio"),
    "kl_k1": (lambda d: d, "k1"),
    "kl_k2": (lambda d: d * d / 2, "k2"),
    "kl_k3": (lambda d: math.exp(-d) - 1 + d, "k3_reverse"),
}
AGGREGATES = {"sum": sum, "mean": np.mean, "max": max}
FORMS = [("token", "clamp", "ratio", None), ("sequence", "clamp", "ratio", "mean")]
FORMS += [("token", "mask", metric, None) for metric in AREAL]
FORMS += [("sequence", "mask", metric, agg) for metric, agg in itertools.product(AREAL, AGGREGATES)]
LOWER, UPPER = {"ratio": 0.8, "kl_k1": -0.2}, {"ratio": 1.25, "kl_k1": 0.2}


def said(form, low, high):
    """The row of the table."""
    level, action, metric, agg = form
    weight = "geometric" if level == "sequence" and metric == "ratio" else "token"
    if action == "clamp":
        return {"weight": weight, "weight_low": low or 0.0, "weight_high": high}
    over = agg or "token"
    if metric == "kl_k1":
        low, high, over = -high, None if low is None else -low, "min" if agg == "max" else over
    return {"weight": weight, "reject": AREAL[metric][1], "over": over, "low": low, "high": high}


def truth(batch, form, low, high, sequence_level, dual):
    """Value and gradient of the sum, token by token."""
    level, action, metric, agg = form
    mask = batch.mask.numpy().copy()
    moved = (batch.proximal - batch.behaviour).numpy()
    step = (batch.current.detach() - batch.proximal).numpy()
    own = {t: [i for i in np.flatnonzero(mask) if batch.sequence[i] == batch.sequence[t]] for t in np.flatnonzero(mask)}
    weight, kept = np.exp(moved), mask.copy()
    for t, members in own.items():
        if level == "sequence" and metric == "ratio":
            weight[t] = math.exp(np.mean([moved[i] for i in members]))
        values = [AREAL[metric][0](moved[i]) for i in (members if agg else [t])]
        found = AGGREGATES[agg](values) if agg else values[0]
        found = math.exp(found) if metric == "ratio" else found
        if action == "clamp":
            weight[t] = min(max(weight[t], low or 0.0), high)
        else:
            kept[t] = (low is None or found >= low) and found <= high
    value, gradient = 0.0, np.zeros(len(mask))
    for t in np.flatnonzero(kept):
        members = [i for i in own[t] if kept[i]] if sequence_level else [t]
        moving = math.exp(np.mean([step[i] for i in members]))
        objective, slope = truth_of_clip(moving, batch.advantages[t].item(), 0.2, 0.2, dual)
        value -= weight[t] * objective
        for i in members:
            gradient[i] -= weight[t] * slope * moving / len(members)
    return value / 7, gradient[mask] / 7


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(str(each) for each in form))
def test_each_form_is_said_by_a_row_of_the_table(form):
    assert len(FORMS) == 18
    batch = batch_of(tokens=30, seed=3, spread=0.2)
    metric = form[2]
    for bounds, sequence_level, dual in itertools.product(("upper", "both"), (False, True), (None, 1.2)):
        low, high = (
            LOWER.get(metric) if bounds == "both" else None,
            UPPER.get(metric, 0.05 if form[3] != "sum" else 0.1),
        )
        loss = partial(gspo, clip=0.2, clip_high=None, average=True) if sequence_level else decoupled_ppo
        loss = partial(loss, proximal="recompute", dual_clip=dual)
        value, gradient, _ = value_and_gradient(ratio(loss, **said(form, low, high)), batch, 7.0)
        expected, slope = truth(batch, form, low, high, sequence_level, dual)
        assert value == pytest.approx(expected, rel=1e-10, abs=1e-12)
        np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-12)
        assert slope.any()
