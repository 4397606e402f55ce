"""Group sizes that follow stragglers: the controller against simulated truths and values computed by hand."""

import math

import numpy as np
import pytest

from buffer.schedulers import AsyncScheduler, GroupPlan, Round, View
from buffer.sizing import Fixed, GroupLengths, Sagc, check_sizes


def done(*tokens: int) -> GroupLengths:
    return GroupLengths(tokens, (False,) * len(tokens))


def test_risk_is_that_of_the_beta_posterior() -> None:
    sagc = Sagc(candidates=[4, 8])
    sagc.a, sagc.b = 2.0, 30.0
    p = np.random.default_rng(0).beta(2.0, 30.0, 400_000)
    for size in (4, 8):
        assert sagc.risk(size) == pytest.approx(1 - np.mean((1 - p) ** size), abs=2e-3)


def test_the_dual_variable_and_the_choice_by_hand() -> None:
    sagc = Sagc(candidates=[2, 4], budget=0.25, straggler_ratio=3.0, forget=0.5, group_size=4)
    assert sagc.next_size([]) == 4 and sagc.steps == 0, "no evidence: the largest"
    sagc.next_size([done(1, 1, 1, 10), done(1, 1, 1, 1)])
    assert (sagc.a, sagc.b) == (0.5 + 1, 0.5 + 7)
    assert sagc.queue == 0.25 and sagc.share == 0.5
    score = {size: math.log(size) / math.log(4) - 0.25 * sagc.risk(size) for size in (2, 4)}
    assert sagc.chosen == max(score, key=score.get)
    sagc.queue = 100.0
    assert sagc.next_size([]) == 2
    metrics = sagc.metrics()
    assert metrics["sizing/dual"] == 100.0 and metrics["sizing/group_size"] == 2 and "sizing/risk_4" in metrics


def test_cut_responses_are_lower_bounds() -> None:
    sagc = Sagc(candidates=[4], group_size=4, forget=1.0)
    sagc.next_size([GroupLengths((1, 1, 1, 10), (False, False, False, True))])
    assert (sagc.a, sagc.b, sagc.share) == (2.0, 4.0, 1.0), "past the threshold already: a straggler"
    sagc.next_size([GroupLengths((1, 1, 1, 2), (False, False, False, True))])
    assert (sagc.a, sagc.b, sagc.steps) == (2.0, 7.0, 1), "of this one nothing is known, and nothing of its group"
    sagc.next_size([GroupLengths((1, 2, 2, 10), (False, True, True, True))])
    assert (sagc.a, sagc.b, sagc.steps) == (2.0, 8.0, 1), "others that began later may become as long"


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
def test_the_long_run_share_keeps_to_the_budget_in_every_quarter(hidden: bool) -> None:
    """Lengths drift. `hidden`: lengths beyond 4 medians are cut there, and the controller sees only that they are
    longer."""
    sagc, random, steps = Sagc(budget=0.3), np.random.default_rng(1), 4000
    shares, sizes, seen = [], [], []
    for step in range(steps):
        size = sagc.next_size(seen)
        sigma = 0.6 + 0.12 * math.sin(4 * math.pi * step / steps)
        groups = np.exp(sigma * random.standard_normal((128 // size, size)))
        medians = np.median(groups, 1)
        shares.append(np.mean(groups.max(1) > 3 * medians))
        sizes.append(size)
        limits = 4 * medians[:, None] if hidden else np.inf
        cut = groups > limits
        seen = [
            GroupLengths(tuple(t), tuple(c))
            for t, c in zip(np.minimum(groups, limits).tolist(), cut.tolist(), strict=True)
        ]
    assert np.abs(np.array(shares).reshape(4, -1).mean(1) - 0.3).max() < 0.01
    quarters = np.array(sizes).reshape(8, -1).mean(1)
    assert quarters.min() < 8 < 16 < quarters.max(), "sizes follow the drift"
    assert sagc.share_mean == pytest.approx(np.mean(shares[:-1]), abs=1e-9)


def closed(lengths: np.ndarray, need: int) -> GroupLengths:
    """A group that takes the first `need` responses; the others are cut when the last of these ends."""
    ordered = np.sort(lengths).tolist()
    tokens = ordered[:need] + [ordered[need - 1]] * (len(ordered) - need)
    return GroupLengths(tuple(tokens), (False,) * need + (True,) * (len(ordered) - need), closed=True)


def test_what_was_cut_of_a_closed_group_counts_by_what_it_would_have_become() -> None:
    """Lengths e^(0.6 z): three of ten are cut at 1.4 medians. Each is a straggler with P(L > 3) / P(L > 1.4)."""
    group = GroupLengths((407, 549, 698, 835, 990, 1010, 1270, *(1400,) * 3), (False,) * 7 + (True,) * 3, True)
    sagc = Sagc(candidates=[8], forget=1.0)
    sagc.below, sagc.below_sum = 1e9, 1e9 * 0.6 * math.sqrt(2 / math.pi)  # the spread is known
    sagc.next_size([group])

    def longer(ratio: float) -> float:
        return math.erfc(math.log(ratio) / 0.6 / math.sqrt(2)) / 2

    chance = longer(3.0) / longer(1400 / 1000)
    assert sagc.spread == pytest.approx(0.6, rel=1e-6)
    assert sagc.share == pytest.approx(1 - (1 - chance) ** 3, rel=1e-3)
    assert (sagc.a, sagc.b) == pytest.approx((1 + 3 * chance, 1 + 10 - 3 * chance), rel=1e-3)
    sagc.next_size([group._replace(tokens=(*group.tokens[:-1], 3001))])
    assert sagc.share == 1.0, "one of them is a straggler already"


@pytest.mark.slow
@pytest.mark.parametrize("over", [1.25, 1.5])
def test_closing_groups_at_the_first_responses_hides_no_straggler(over: float) -> None:
    """The true share among all started responses stays near the budget, though no straggler ever ends."""
    random, sagc, seen = np.random.default_rng(0), Sagc(), list[GroupLengths]()
    shares, sizes = [], []
    for step in range(2000):
        size = sagc.next_size(seen)
        spread = 0.6 + 0.12 * math.sin(4 * math.pi * step / 2000)
        started = (128 // size, math.ceil(over * size))
        lengths = np.round(1000 * np.exp(random.normal(0, 0.6, (128 // size, 1)) + random.normal(0, spread, started)))
        seen = [closed(group, size) for group in lengths.astype(int)]
        shares.append(np.mean(lengths.max(1) > 3 * np.median(lengths, 1)))
        sizes.append(size)
    quarters = np.reshape(shares, (4, -1)).mean(1)
    assert np.abs(quarters - 0.3).max() < 0.1, quarters
    assert sagc.share_mean == pytest.approx(0.3, abs=0.01)
    assert 4 < np.mean(sizes[:500]) < np.mean(sizes[500:1000])


def test_its_state_survives_a_crash() -> None:
    sagc = Sagc(group_size=8)
    sagc.next_size([done(*range(1, 9))] * 3)
    again = Sagc(group_size=8)
    again.load_state_dict(sagc.state_dict())
    assert again.metrics() == sagc.metrics() and again.next_size([]) == sagc.next_size([])


def test_a_batch_keeps_its_samples() -> None:
    assert check_sizes(Sagc(group_size=8), 16) == 128 == check_sizes(Fixed(group_size=8), 16)
    words = (
        r"sizing\.candidates: groups of 32 can't make up a batch of 48.*sizing\.candidates=\[4, 8, 16\].*multiple of 32"
    )
    with pytest.raises(ValueError, match=words):
        check_sizes(Sagc(group_size=8), 6)


@pytest.mark.parametrize("candidates", [[], [1, 8], [8, 4], [4, 4], [4.0, 8.0], ["few", "many"], [True, 8]])
def test_candidates_are_ascending_whole_numbers(candidates: list) -> None:
    with pytest.raises(ValueError, match=r"sizing\.candidates must be ascending whole numbers >= 2, not \["):
        Sagc(candidates=candidates)


@pytest.mark.parametrize("deferred", [0, 1])
def test_an_async_run_takes_what_a_sync_one_has_deferred_before_new_prompts(deferred: int) -> None:
    """After a resume in the other mode."""
    view = View(1, 0, deferred, lambda: Round(1, 0, 0, math.inf, True))
    assert AsyncScheduler(Fixed(group_size=4)).admit(view) == GroupPlan(4, 4, deferred=bool(deferred))
