"""The studies off policy: what actors sample from, what is trained, how variants are picked, what foretells a fall."""

import json
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.engines.inexact import perturb
from areal_like.errors import UserError
from areal_like.places import REPOSITORY
from scripts.claims import designs, foretelling, lagging, off_policy
from scripts.claims.designs import DESIGNS, Design, alone
from scripts.claims.foretelling import auc, auc_within, collapsed, foretold, looks
from scripts.claims.found import Found, at_step, numbers_of, read_csv, write_csv
from scripts.claims.gated import EMBEDDINGS, distributions, gated, roll_out
from scripts.claims.lagging import LAGGING, SIGNS, Actor, Method, Update, drift, inexact, passes, train
from scripts.claims.page import refreshed
from scripts.claims.stacks import Stack
from scripts.claims.studies import Cell
from scripts.claims.tokens import Draws, Rollouts

TASK = replace(LAGGING, length=3, prompts=4, samples=4)
METHODS = {"a": Method({"name": "decoupled_ppo"}), "b": Method({"name": "decoupled_ppo", "correction": "none"})}
CELLS = [Cell(name, 1e-2, seed) for name in METHODS for seed in (0, 1)]


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_quantised_actors_are_the_engines_own(form: str) -> None:
    exact = gated([3, 4], TASK)
    found = inexact(exact, form, [3, 4], 0, EMBEDDINGS)
    for learner in (0, 1):
        # The engine's matrices are [out, in], these [in, out]; embeddings have a row per token in both.
        turned = {name: name not in EMBEDDINGS for name in exact}
        wanted = {n: (v[learner].T if turned[n] else v[learner]).clone().contiguous() for n, v in exact.items()}
        perturb(wanted, form, 0)
        for name, values in wanted.items():
            there = found[name][learner]
            assert torch.equal(there.T if turned[name] else there, values), name


def test_scores_are_the_logprobs_that_were_sampled() -> None:
    parameters = gated([3, 4], TASK)
    prompts, answers, behaviour, rewards = roll_out(parameters, TASK, Draws([0, 1]), 0.0)
    each = distributions(parameters, prompts, answers)
    torch.testing.assert_close(each.exp().sum(-1), torch.ones(answers.shape))
    torch.testing.assert_close(each.gather(-1, answers[..., None])[..., 0], behaviour, rtol=1e-4, atol=1e-5)
    assert len(answers.unique()) == TASK.vocabulary and 0 < rewards.mean() < 1
    whole = roll_out(parameters, TASK, Draws([0, 1]), 1.0)
    assert not whole[1].any() and not whole[2].any(), "a broken actor says zeros and is sure of them"
    silent = roll_out(parameters, TASK, Draws([0, 1]), 1.0, silent=True)
    own = distributions(parameters, silent[0], silent[1])[..., 0]
    assert not silent[1].any()
    torch.testing.assert_close(silent[2], own, msg="a silent one reports its policy's own logprobs of them")
    half = roll_out(parameters, TASK, Draws([0, 1]), 0.5, silent=True)
    broken = ~half[1].any(-1)
    torch.testing.assert_close(half[2][~broken], behaviour[~broken])


def test_noise_is_of_its_size_and_the_same_for_a_seed_and_version() -> None:
    exact = gated([3, 3, 4], TASK)
    one, again, later = (inexact(exact, 0.1, [3, 3, 4], version, EMBEDDINGS)["prompts"] for version in (5, 5, 6))
    assert torch.equal(one, again) and torch.equal(one[0], one[1]) and not torch.equal(one, later)
    moved = (one - exact["prompts"])[0]
    assert float(moved.std() / exact["prompts"][0].square().mean().sqrt()) == pytest.approx(0.1, rel=0.3)
    assert inexact(exact, None, [3, 3, 4], 0, EMBEDDINGS) is exact


def rolled(actor: Actor):
    stack = Stack(gated([0, 1], TASK), torch.tensor([0.0, 0.0]))
    acting = inexact(stack.views(stack.flat), actor.mismatch, [0, 1], 0, EMBEDDINGS)
    prompts, answers, behaviour, rewards = roll_out(acting, TASK, Draws([0, 1]), 0.0)
    return stack, Rollouts(prompts, answers, behaviour, rewards - rewards.mean(-1, keepdim=True))


def test_an_exact_fresh_actor_shows_no_drift_and_an_inexact_one_does() -> None:
    for actor, zero in ((Actor(), True), (Actor(mismatch="int4"), False)):
        stack, rollouts = rolled(actor)
        signs = dict(zip(SIGNS, Update(stack, [(METHODS["a"], slice(0, 2))], actor)(rollouts), strict=True))
        assert all(signs[name].abs().max() < 1e-5 for name in ("kl", "chi2", "sequence_chi2")) is zero
        assert bool((signs["ess"] > 1 - 1e-5).all()) is zero


def test_drift_is_what_its_names_say() -> None:
    behaviour = torch.log(torch.tensor([[[[0.5, 0.25]], [[0.5, 0.5]]]]))
    proximal = torch.log(torch.tensor([[[[0.5, 0.5]], [[0.25, 0.5]]]]))
    w, whole = np.array([1, 2, 0.5, 1]), np.array([2, 0.5])
    wanted = [(w - 1 - np.log(w)).mean(), w.mean() ** 2 / (w**2).mean(), (w**2).mean() - 1]
    wanted += [whole.mean() ** 2 / (whole**2).mean(), (whole**2).mean() - 1, 2.0]
    np.testing.assert_allclose([float(value) for value in drift(behaviour, proximal)], wanted, rtol=1e-6)


def test_the_first_minibatch_has_the_gradient_of_the_policy_and_of_the_bonus() -> None:
    stack, rollouts = rolled(Actor())
    update = Update(stack, [(Method({"name": "reinforce"}, bonus=0.5), slice(0, 2))], Actor())
    proximal = distributions(stack.views(stack.flat), rollouts.prompts, rollouts.answers)
    proximal = proximal.gather(-1, rollouts.answers[..., None])[..., 0].detach()
    half = torch.arange(2)
    found, rejected = update._gradient(rollouts, proximal, half)
    assert not rejected.any()
    for learner in (0, 1):
        leaf = stack.flat.clone().requires_grad_()
        each = distributions(stack.views(leaf), rollouts.prompts[:, :2], rollouts.answers[:, :2])[learner]
        gained = (
            rollouts.advantages[learner, :2, :, None]
            * each.gather(-1, rollouts.answers[learner, :2, :, :, None])[..., 0]
        )
        (-gained.mean() + 0.5 * (each.exp() * each).sum(-1).mean()).backward()
        torch.testing.assert_close(found[learner], leaf.grad[learner], rtol=1e-4, atol=1e-6)


def test_a_learner_ends_the_same_alone_and_beside_others_and_methods_differ() -> None:
    knobs = {"actor": Actor(staleness=2, mismatch="int4"), "steps": 6, "every": 3, "task": TASK}
    together = train(CELLS, METHODS, **knobs)
    alone_ = train(CELLS[:1], METHODS, **knobs)
    np.testing.assert_allclose(together[0]["curve"], alone_[0]["curve"], rtol=1e-3, atol=1e-3)
    assert [entry[0] for entry in together[0]["curve"]] == [3, 6]
    assert together[0]["curve"] != together[2]["curve"]


def test_batches_are_exactly_so_old(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks, acted = [], []
    real = lagging.Stack

    class Kept(real):
        def __init__(self, *args: object):
            super().__init__(*args)
            stacks.append([self.flat.clone()])

        def step(self, gradient: torch.Tensor) -> None:
            super().step(gradient)
            stacks[-1].append(self.flat.clone())

    def seen(exact, how, seeds, version, embeddings):
        acted.append((torch.cat([values.flatten(1) for values in exact.values()], 1), version))
        return exact

    monkeypatch.setattr(lagging, "Stack", Kept)
    monkeypatch.setattr(lagging, "inexact", seen)
    train(CELLS[:1], METHODS, Actor(staleness=2), steps=5, every=5, task=TASK)
    for step, (weights, version) in enumerate(acted):
        assert version == max(0, step - 2)
        assert torch.equal(weights, stacks[0][version * lagging.MINIBATCHES])


def test_all_methods_of_all_studies_train() -> None:
    methods = {n: m for d in DESIGNS.values() for family in d.families.values() for n, m in family.items()}
    cells = [Cell(name, 1e-2, 0) for name in methods]
    for cell, found in zip(cells, train(cells, methods, Actor(1, "int4"), steps=1, every=1, task=TASK), strict=True):
        assert np.isfinite(found["curve"][0][:2]).all(), cell.algorithm
    assert all(design.reference in design.families for design in DESIGNS.values())
    for study in ("dg_fair", "successes"):
        assert {len(family) for family in DESIGNS[study].families.values()} == {9}, "the same budget for all"


@pytest.mark.parametrize("family", ["successes", "pmpo, α = 1"])
def test_the_controls_train_successes_only(family: str) -> None:
    """Worse failures change nothing, better successes do; DG at its gate of .1 sees both."""
    stack, rollouts = rolled(Actor())
    proximal = distributions(stack.views(stack.flat), rollouts.prompts, rollouts.answers)
    proximal = proximal.gather(-1, rollouts.answers[..., None])[..., 0].detach()
    sign = torch.where(rollouts.advantages > 0, 1.0, -1.0)

    def gradient(method: Method, advantages: torch.Tensor) -> torch.Tensor:
        update = Update(stack, [(Method(method.loss, 0.0), slice(0, 2))], Actor())
        return update._gradient(replace(rollouts, advantages=advantages), proximal, torch.arange(4))[0]

    families = DESIGNS["successes"].families
    for method in (*families[family].values(), families["dg"]["dg gate_temperature 0.1 β 0"]):
        plain = gradient(method, sign)
        worse = gradient(method, sign.clamp(min=-0.5))
        assert plain.norm() > 0 and torch.equal(plain, worse) is (method in families[family].values())
    only = DESIGNS["successes"].families["successes"]["successes β 0"]
    positive = gradient(Method({"name": "reinforce"}), sign.clamp(min=0.0))
    torch.testing.assert_close(gradient(only, sign), positive)


def test_the_variant_with_the_least_error_at_its_own_rate_is_picked() -> None:
    errors = {("x", 1): 0.3, ("x", 2): 0.1, ("y", 1): 0.2, ("y", 2): 0.4}
    tried = [{"algorithm": name, "rate": rate, "error": error} for (name, rate), error in errors.items()]
    assert off_policy.best_variant(tried, {"y": None, "x": None}, {"x": 2, "y": 1}) == "x"
    assert off_policy.best_variant(tried, {"y": None, "x": None}, {"x": 1, "y": 1}) == "y"


def curve(*rewards: float, sign: float = 0.0) -> list[tuple[float, ...]]:
    return [(place, reward, 0.5, *[sign] * len(SIGNS)) for place, reward in enumerate(rewards)]


def test_looks_are_at_standing_learners_that_have_learned() -> None:
    falls = looks(curve(0.2, 0.5, 0.6, 0.7, 0.3, 0.9, 0.3))
    assert falls.steps.tolist() == [1, 2, 3] and falls.fell_at == 4 and falls.falls.all(), "only before the first fall"
    shaky = looks(curve(0.5, 0.4, 0.5))
    assert shaky.steps.tolist() == [0] and shaky.fell_at is None and not shaky.falls.any()
    assert looks(curve(0.1, 0.2, 0.1, 0.1, 0.1)) is None
    assert collapsed(curve(0.7, 0.3)) and not collapsed(curve(0.7, 0.6))


def test_the_area_under_the_curve_also_within_groups() -> None:
    falls, values = np.array([True, False, True, False]), np.array([1.0, 0.0, 11.0, 10.0])
    assert auc(falls, values) == 0.75
    assert auc_within(falls, values, np.array([0, 0, 1, 1])) == 1.0
    assert np.isnan(auc_within(falls, values, np.array([0, 1, 0, 1])))


def test_which_way_a_sign_points_what_it_catches_and_how_early() -> None:
    falling = [curve(0.7, 0.7, 0.7, 0.2, sign=-3.0 - n / 100) for n in range(5)]
    standing = [curve(0.7, 0.7, 0.7, 0.7, sign=1.0 + n / 100) for n in range(5)]
    found = foretold([("", each) for each in [*falling, *standing, *standing]])
    assert (found[0].learners, found[0].fallen) == (10, 5), "the same learner in two studies counts once"
    kl = next(one for one in found if one.sign == "kl")
    assert (kl.before, kl.area[0], kl.within[0], kl.caught, kl.first, kl.lead) == ("small", 1.0, 1.0, 1.0, 1.0, 3.0)
    assert kl.hits == (1.0,) * foretelling.PLACES
    batch = next(one for one in found if one.sign == "batch reward")
    assert batch.area[0] == 0.5 and batch.caught == 0.0
    assert batch.hits[10] == 0.5, "equal values pass a limit together"
    assert foretold([("", each) for each in [*falling[:4], *standing]]) == [], "four are too few"


def test_what_foretells_is_read_back(tmp_path) -> None:
    falling = [curve(0.7, 0.7, 0.2, sign=-n) for n in range(5)]
    found = foretold([("", each) for each in [*falling, curve(0.7, 0.7, 0.7)]])
    foretelling.write_csv(tmp_path / "a.csv", found)
    again = foretelling.read_csv(tmp_path / "a.csv")
    assert foretelling.table(again) == foretelling.table(found)
    (tmp_path / "a.csv").write_text("sign\nkl\n")
    with pytest.raises(ValueError, match="expected the columns"):
        foretelling.read_csv(tmp_path / "a.csv")


def test_a_learner_is_read_where_it_has_spent_as_much_as_the_cheapest() -> None:
    methods = {"a": Method({"name": "decoupled_ppo"}), "b": Method({"name": "ppo"})}
    assert [passes(method) for method in methods.values()] == [4, 3]
    steps = [(float(step), step / 100, 0.0, *[0.25] * len(SIGNS)) for step in (15, 30, 45, 60)]
    assert at_step(steps, 50) == 0.45 and at_step(steps, 1) == 0.15
    row = {"phase": "fresh", "condition": "c", "family": "f", "rate": 0.01, "seed": 1, "reward": 0.6, "mean": 0.4}
    found = numbers_of([row | {"algorithm": name, "curve": steps} for name in methods], methods)
    assert [each["equal_compute"] for each in found] == [0.45, 0.6]
    assert found[0]["k3"] == found[0]["rejected"] == 0.25 and found[0]["fell"] == 0


def test_results_are_read_back_and_bad_ones_refused(tmp_path) -> None:
    numbers = dict.fromkeys(("reward", "equal_compute", "mean", "fell", "k3", "rejected"), 0.5)
    row = {"phase": "fresh", "condition": "η = 1", "family": "a, b", "algorithm": "x", "rate": 0.01, "seed": 3}
    write_csv(tmp_path / "results.csv", [row | numbers])
    assert read_csv(tmp_path / "results.csv") == [row | numbers]
    (tmp_path / "results.csv").write_text("phase,seed\n")
    with pytest.raises(ValueError, match="expected the columns phase, condition"):
        read_csv(tmp_path / "results.csv")


def test_ages_by_mismatches_are_drawn_as_cells() -> None:
    design = DESIGNS["grid"]
    number = {"reward": 0.5}
    rows = [
        {"phase": "fresh", "condition": c, "family": f, "seed": seed} | number
        for c in design.conditions
        for f in design.families
        for seed in (1, 2)
    ]
    plot = Found(design, rows).figure()
    assert plot.kind == "cells" and list(plot.panels) == list(designs.MISMATCHES)
    assert [point.x for point in plot.panels["exact"]["dg"]] == list(designs.AGES)


def test_conditions_that_were_not_measured_are_left_out_and_others_stay(tmp_path) -> None:
    families = alone({"a": {"name": "ppo"}, "tis": {"name": "tis"}})
    design = replace(DESIGNS["pretrained"], families=families, rates=(2e-4,))
    numbers = dict.fromkeys(("reward", "equal_compute", "mean", "fell", "k3", "rejected"), 0.5)
    rows = [
        {"phase": phase, "condition": c, "family": f, "algorithm": f, "rate": 2e-4, "seed": seed} | numbers
        for c in ("exact, η = 0", "int8, η = 0")
        for f in design.families
        for phase, seed in (("tuning", 0), ("fresh", 1), ("fresh", 2))
    ]
    found = Found(design, rows)
    assert list(found.figure().panels) == ["exact", "int8"] and "int4" not in found.table("reward")
    assert "| a " in found.tables()["All conditions together"]
    write_csv(tmp_path / "published.csv", rows)
    anew = [row | {"reward": 0.75} for row in rows if row["condition"] == "int8, η = 0"]
    both = off_policy.with_published(anew, tmp_path / "published.csv")
    assert [row["reward"] for row in both] == [0.75] * 6 + [0.5] * 6


def test_conditions_are_picked_by_name() -> None:
    design = DESIGNS["pretrained"]
    assert list(off_policy.wanted(design, ["int8, η = 4", "int8, η = 0"])) == ["int8, η = 0", "int8, η = 4"]
    assert off_policy.wanted(design, None) == design.conditions
    with pytest.raises(UserError, match="--conditions 'int3'"):
        off_policy.wanted(design, ["int3"])


def test_the_ratio_of_the_roc_is_drawn() -> None:
    """All signs that the page names: ESS, χ², the largest ratio, entropy, the gradients' cosine."""
    found = foretelling.read_csv(REPOSITORY / off_policy.RESULTS / "collapse.csv")
    drawn = foretelling.figure(found, "title").panels[""]
    assert set(drawn) == set(foretelling.DRAWN) >= {"ess", "chi2", "ratio_max", "entropy", "cosine"}


def test_a_page_gets_its_tables_anew_and_keeps_its_words() -> None:
    text = "Words\n<!-- table: grid, Collapses -->\nold | old\n<!-- end -->\nmore"
    wanted = "Words\n<!-- table: grid, Collapses -->\nnew\n<!-- end -->\nmore"
    assert refreshed(text, {"grid": {"Collapses": "new\n"}}) == wanted
    with pytest.raises(ValueError, match="'Collapses' of 'grid'; there are: Other"):
        refreshed(text, {"grid": {"Other": ""}})


def test_the_page_is_what_its_results_say() -> None:
    places = {off_policy.DOCUMENT: off_policy.published, off_policy.WHOLE_MACHINE: off_policy.of_whole_machine}
    for place, made in places.items():
        text = (REPOSITORY / place).read_text(encoding="utf-8")
        tables, plots = made(REPOSITORY, text)
        for name, plot in plots.items():
            assert (REPOSITORY / off_policy.DATA / f"{name}.json").read_text(encoding="utf-8") == plot.as_json()
        assert text.count("<!-- table: ") >= 6
        assert refreshed(text, tables) == text, "run python -m scripts.claims.off_policy page"


def test_a_study_writes_its_tables_and_its_plot(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    families = alone({"a": {"name": "decoupled_ppo"}, "b": {"name": "tis"}})
    small = Design(
        families, {"none": Actor(), "int4": Actor(mismatch="int4")}, "a", "Found", (1e-2,), (0,), (1, 2), 4, 2
    )
    monkeypatch.setitem(DESIGNS, "mismatch", small)
    monkeypatch.setattr(off_policy, "prepare", lambda: None)
    monkeypatch.setattr(off_policy, "keep", lambda plot, path: path.with_suffix(".json").write_text(plot.as_json()))
    off_policy.main(Namespace(study="mismatch", out=tmp_path, quick=False, publish=False, conditions=None))
    table = (tmp_path / "mismatch" / "table.md").read_text()
    for part in ("Held-out reward at the end", "| b ", "Collapses", "0/2", "minus a", "better than a", "Every pair"):
        assert part in table, part
    off_policy.main(Namespace(study="collapse", out=tmp_path, quick=False, publish=False, conditions=None))
    assert "Too few learners fell" in (tmp_path / "collapse" / "table.md").read_text()
    assert set(json.loads((tmp_path / "mismatch.json").read_text())["panels"]) == {"none", "int4"}
