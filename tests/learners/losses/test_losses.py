"""Every loss with every correction against NumPy (value and gradient), and the contracts that all of them keep."""

import numpy as np
import pytest
import torch

from areal_like.config.registry import COMPONENTS, ConfigError, resolve
from learners.losses.contract import LossBatch, marks_of, planned_for
from learners.losses.corrections import Corrected
from learners.losses.weighted import reinforce
from scripts.contracts.losses import claims
from tests.learners.losses.references import corrected
from tests.learners.losses.token_batches import (
    KNOBS,
    LINKS,
    LOSSES,
    POLICY_GRADIENT,
    batch_of,
    is_refused,
    loss_of,
    own_ratio,
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


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_on_policy_these_losses_share_the_policy_gradient(name) -> None:
    batch = batch_of(spread=0.0)
    _, gradient, seen = value_and_gradient(LOSSES[name], batch, 60.0)
    np.testing.assert_allclose(gradient, -batch.advantages[batch.mask] / 60, rtol=1e-12)
    for share in ("clip_share", "capped_share", "masked_share"):
        assert not seen.get(share, np.zeros(1)).any()


@every_loss
def test_each_keeps_the_contract_and_a_planned_one_refuses_to_run_without_its_plan(loss) -> None:
    for name, claim in claims(loss, "it").items():
        if "better answers" not in name:  # these knobs and corrections hold some back
            claim()
    if marks_of(loss).plan:
        with pytest.raises(ValueError, match="plan"):
            loss(batch_of(), 1.0)


@every_loss
def test_impossible_tokens_stay_finite_and_an_empty_micro_batch_is_zero_in_its_dtype(loss) -> None:
    extremes, place = torch.tensor([0.0, -1e4, -3e38, -torch.inf]), torch.arange(48)
    current, other, advantages = (
        x.flatten() for x in torch.meshgrid(extremes, extremes, torch.tensor([-2.0, 0.0, 2.0]), indexing="ij")
    )
    for behaviour, proximal in ((other, current), (current, other), (other, other)):
        leaf, mask = current.clone().requires_grad_(), torch.ones(48, dtype=torch.bool)
        batch = LossBatch(leaf, behaviour, proximal, advantages, mask, place // 4, place % 3)
        batch.group = place // 12
        value, seen = loss(planned_for(loss, batch)[0], 48.0)
        value.backward()
        assert value.dtype == torch.float32 and torch.isfinite(value) and torch.isfinite(leaf.grad).all()
        assert all(torch.isfinite(v.double()).all() for v in seen.values())
    value, gradient, _ = value_and_gradient(loss, batch_of(masked=1.1), 4.0)
    assert value == 0.0 and not gradient.any()
