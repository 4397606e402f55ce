"""Every loss with every correction against NumPy (value and gradient), the contracts that all of them keep, the trap of
each paper, and presets against the papers' own formulas."""

import json
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch

from areal_like.config.registry import COMPONENTS, ConfigError, bind, resolve
from areal_like.config.run_config import load
from learners.losses.bounded import dppo, gspo, second_moment_mask
from learners.losses.clipped import clipped_surrogate, decoupled_ppo, ppo
from learners.losses.contract import LossBatch, marks_of, planned_for, total
from learners.losses.corrections import Corrected, capped, none, ratio, tis
from learners.losses.delightful import dg, dg_kondo, kondo_gate
from learners.losses.trial import BadLoss, try_loss
from learners.losses.weighted import pmpo, preference_weights, reinforce, target_weights, tpo
from scripts.contracts.losses import claims
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
    assert "masked_share" in cases


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


def test_at_the_very_bounds_a_token_has_its_gradient_and_the_dual_clip_is_for_negative_advantages() -> None:
    """Binary fractions, so that ratio and bound are equal."""
    moved = torch.tensor([1.25, 0.75, 1.5, 1.5 + 1e-9, 9.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0, 2.0], dtype=torch.float64)
    objective, flat = clipped_surrogate(moved, advantages, 0.25, None, dual_clip=1.5)
    assert flat.tolist() == [False, False, False, True, True]
    assert objective.tolist() == [1.25, -0.75, -1.5, -1.5, 2.5]


def test_dg_has_no_use_for_behaviour_logprobs_and_a_cold_gate_is_shut_without_an_advantage() -> None:
    batch = batch_of()
    expected = value_and_gradient(dg, batch, 1.0)[1]
    batch.behaviour = torch.full_like(batch.behaviour, torch.nan)
    np.testing.assert_array_equal(value_and_gradient(dg, batch, 1.0)[1], expected)
    batch.advantages = torch.zeros_like(batch.advantages)
    assert not value_and_gradient(partial(dg, gate_temperature=0.0), batch, 1.0)[2]["gate"].any()


def test_kondo_keeps_nothing_without_an_advantage_and_of_equal_delights_the_earlier() -> None:
    batch = batch_of(masked=0.0)
    batch.current = torch.full_like(batch.behaviour, -0.7)
    kept = kondo_gate(replace(batch, advantages=torch.ones_like(batch.advantages)), keep=0.3)[0]
    assert kept.sum() == 18 and kept[:18].all()
    assert not kondo_gate(replace(batch, advantages=torch.zeros_like(batch.advantages)), keep=1.0)[0].any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_m2po_and_dppo_trust_exactly_their_threshold(sign) -> None:
    batch = batch_of(masked=0.0)
    ends = torch.zeros_like(batch.behaviour), torch.full_like(batch.behaviour, 0.5).log()
    current, behaviour = ends if sign > 0 else ends[::-1]
    batch = replace(batch, current=current, behaviour=behaviour, advantages=torch.full_like(behaviour, sign))
    limit = float((current.exp() - behaviour.exp())[0].abs())
    assert not dppo(batch, 1.0, tv=limit)[1]["masked_share"].any()
    assert dppo(batch, 1.0, tv=limit - 1e-6)[1]["masked_share"].all()
    batch = replace(batch, current=torch.full_like(behaviour, -1.0), behaviour=torch.full_like(behaviour, -1.5))
    assert second_moment_mask(batch, threshold=0.25)[0].all()
    assert not second_moment_mask(batch, threshold=0.2499)[0].any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_pmpo_without_one_of_the_signs(sign) -> None:
    batch = batch_of(masked=0.0)
    batch.advantages = sign * batch.advantages.abs()
    batch.advantages[::3] = 0.0
    value, gradient, _ = value_and_gradient(partial(pmpo, beta=0.0), batch, 60.0)
    assert np.isfinite(value) and not gradient[::3].any() and (np.sign(gradient[1::3]) == -sign).all()


def test_tpo_rests_at_its_target_and_a_certain_target_stays_finite() -> None:
    """z is ±1, so the sums of behaviour and current must differ by 2."""
    batch = batch_of(masked=0.0)
    behaviour = batch.current.detach().clone()
    for first in range(0, 60, 2 * LENGTH):
        better = first if batch.advantages[first] > batch.advantages[first + LENGTH] else first + LENGTH
        behaviour[better] -= 2.0
    np.testing.assert_allclose(value_and_gradient(tpo, replace(batch, behaviour=behaviour), 60.0)[1], 0.0, atol=1e-12)
    sharp = replace(batch, current=batch.current.detach())
    assert torch.isfinite(target_weights(sharp, temperature=1e-3)[0]).all()


def test_tpo_of_equal_scores_of_lone_answers_and_of_groups_that_are_numbered_from_anywhere() -> None:
    """Three sequences of six tokens: two of one group, one of the next, which counts as a group."""
    batch = batch_of(tokens=18, masked=0.0)
    batch.current = batch.current.detach()
    weights, alone = target_weights(batch)[0], target_weights(rows(batch, torch.arange(12)))[0]
    assert alone.any() and not weights[12:].any()
    torch.testing.assert_close(weights[:12] / (18 / 2), alone / 12)
    assert torch.equal(target_weights(replace(batch, group=batch.group + 3))[0], weights)
    assert target_weights(rows(batch, torch.arange(0)))[0].shape == (0,)
    left = target_weights(replace(batch, mask=batch.sequence != 0))[1]["target_gap"]
    assert not left[:12].any(), "a sequence without trained tokens is in no target, so the other is alone"


@pytest.mark.parametrize("weigh", [target_weights, preference_weights])
def test_plans_ask_the_device_nothing(weigh) -> None:
    """On the meta device there are no values, so any read of one fails."""
    batch = batch_of()
    known = {each.name: getattr(batch, each.name) for each in fields(batch)}
    there = {name: x.detach().to("meta") if isinstance(x, torch.Tensor) else x for name, x in known.items()}
    assert weigh(replace(batch, **there | {"sequences": 10}))[0].is_meta


def test_marks_of_losses_and_of_their_corrections() -> None:
    around = partial(decoupled_ppo, proximal="interpolate")
    recomputed = (decoupled_ppo, partial(gspo, proximal="recompute"), tis(tis(dg, pair="behaviour_proximal")))
    assert all(marks_of(each).wants_proximal for each in recomputed)
    assert not any(marks_of(each).wants_proximal for each in (ppo, gspo, around, capped(around), tis(dg)))
    losses = (decoupled_ppo, around, ppo, gspo, dg)
    own = ["proximal_current", "proximal_current", "behaviour_current", "behaviour_current", None]
    assert [marks_of(each).own_ratio for each in losses] == own
    assert marks_of(partial(dg_kondo, keep=0.5)).plan.skips
    assert none(ppo) is ppo and marks_of(tis(dg)).single_pass
    assert marks_of(ratio(dg_kondo)).plan and not marks_of(ratio(reinforce)).plan
    batch = replace(batch_of(), proximal=None)
    capped(around)(batch, 1.0)
    with pytest.raises(ValueError, match="proximal"):
        decoupled_ppo(batch, 1.0)


@pytest.mark.parametrize(
    ("argv", "loss", "links"),
    [
        ([], "decoupled_ppo", [("behaviour_proximal", "ratio", 5.0)]),
        (["loss=tis"], "reinforce", [("behaviour_current", "none", None)]),
        (
            ["loss={name: dg_kondo, correction: {reject: k3, high: 1, correction: tis}}"],
            "dg_kondo",
            [("behaviour_current", "k3", 1), ("behaviour_current", "none", None)],
        ),
    ],
)
def test_a_config_names_any_correction_for_any_loss(argv, loss, links) -> None:
    bound = bind("loss", load(["quickstart", *argv]).loss)
    assert isinstance(bound, Corrected) and bound.loss.func.__name__ == loss
    assert [(link.pair, link.reject, link.high) for link in bound.links] == links
    assert bind("loss", load(["quickstart", "loss.correction=none"]).loss).func is decoupled_ppo


SENSELESS = [
    ("ppo", "tis", "weight"),
    ("decoupled_ppo", {"name": "capped", "pair": "behaviour_current"}, "pair"),
    ("decoupled_ppo", {"weight_high": 2}, ""),
    ("is_pg", {"weight": "token"}, ""),
    ("dg", {"correction": {"name": "ratio", "low": 2}}, "correction.low"),
    ("tis", {"name": "tis", "weight_high": 0.5}, "weight_high"),
    ("dg", {"name": "ratio", "weight": "none"}, "weight"),
    ("dg", {"weight": "none", "reject": "k1", "high": 1.0, "weight_high": 2.0}, "weight_high"),
    ("dg", {"high": 2.0}, "high"),
    ("dg", {"over": "sum"}, "over"),
    ("dg", {"reject": "k3"}, "high"),
    ("dg", {"reject": "k3", "low": 0.1, "high": 1.0}, "low"),
    ("dg", {"reject": "ratio", "high": 0.9}, "high"),
    ("dg", {"reject": "k1", "low": 0.1}, "low"),
    ("dg", "tiss", ""),
    ("dg", 7, ""),
]


@pytest.mark.parametrize(("loss", "correction", "key"), SENSELESS, ids=str)
def test_a_senseless_correction_is_refused_when_the_config_is_read(loss, correction, key, tmp_path) -> None:
    spec = {"extends": "quickstart", "loss": {"name": loss, "correction": correction}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(spec))
    with pytest.raises(ConfigError) as refused:
        load([str(tmp_path / "recipe.yaml")])
    assert f"loss.correction{'.' if key else ''}{key}" in str(refused.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda batch, by: (total(batch.current.detach() * batch.advantages, batch, by), {}),
        lambda batch, by: ((batch.current * 0.0).sum(), {}),
        lambda batch, by: (total(batch.current * float("nan"), batch, by), {}),
        lambda batch, by: ((batch.current - batch.current.detach()).abs().sqrt().sum(), {}),
        lambda batch, by: (batch.current * batch.advantages, {}),
        lambda batch, by: total(batch.current * batch.advantages, batch, by),
        lambda batch, by: (ppo(batch, by)[0], {"ratio": torch.ones(())}),
        lambda batch, by: (batch.advantage, {}),
    ],
    ids=["detached", "constant", "NaN", "steep", "per token", "alone", "mean", "raising"],
)
def test_a_loss_that_trains_nothing_is_refused_by_its_name(loss) -> None:
    with pytest.raises(BadLoss, match="loss mine:loss"):
        try_loss(loss, "mine:loss")


def test_every_shipped_correction_leaves_fresh_samples_alone() -> None:
    batch = batch_of(spread=0.0)
    same = replace(batch, behaviour=batch.current.detach(), proximal=batch.current.detach())
    expected, gradient, _ = value_and_gradient(reinforce, same, 7.0)
    for name in set(COMPONENTS["correction"]) - {"ratio"}:
        value, found, _ = value_and_gradient(bind("loss", {"name": "reinforce", "correction": name}), same, 7.0)
        assert value == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(found, gradient, rtol=1e-12)


OF_PPO = {"name": "ppo", "clip": 0.2, "clip_high": None, "dual_clip": None}
PRESETS = {
    "grpo": (OF_PPO, True, "sequence_mean", 0.04),
    "dapo": (OF_PPO | {"clip_high": 0.28}, True, "token_mean", 0),
    "dr_grpo": (OF_PPO, False, "response_limit", 0),
    "gspo": ({"name": "gspo", "clip": 3e-4, "clip_high": 4e-4}, True, "sequence_mean", 0),
}


@pytest.mark.parametrize(("name", "paper"), PRESETS.items(), ids=PRESETS)
def test_a_preset_is_the_papers_and_leaves_nothing_of_the_recipe_that_it_is_used_with(name, paper, tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "extends: quickstart\nloss: {name: ppo, clip_high: 0.5, dual_clip: 3}\n"
        "advantage: {name: batch}\nlearner: {kl_reward: 0.1, kl_loss: 1.0, normalise: 7}\n"
    )
    config = load([str(recipe), f"algorithm={name}"])
    loss, std, normalise, kl = paper
    assert loss.items() <= config.loss.items() and config.advantage == {"name": "group", "std": std}
    assert [config.learner[knob] for knob in ("normalise", "kl_loss", "kl_reward")] == [normalise, kl, 0]
    assert config.filter["name"] == ("zero_variance" if name == "dapo" else "none")
    assert load([str(recipe), f"algorithm={name}", "learner.kl_loss=0.5"]).learner["kl_loss"] == 0.5, "what is set wins"
