"""Group sizes that follow stragglers: the controller against simulated truths and values computed by hand."""

import math

import numpy as np
import pytest

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
    assert sagc.metrics()["sizing/straggler_share_mean"] == pytest.approx(np.mean(shares[:-1]), abs=1e-9)


def test_a_batch_keeps_its_samples() -> None:
    assert check_sizes(Sagc(group_size=8), 16) == 128 == check_sizes(Fixed(group_size=8), 16)
    with pytest.raises(ValueError, match=r"sizing\.candidates: groups of 32 can't make up a batch of 48"):
        check_sizes(Sagc(group_size=8), 6)


@pytest.mark.parametrize("candidates", [[], [1, 8], [8, 4], [4, 4], [4.0, 8.0], ["few", "many"], [True, 8]])
def test_candidates_are_ascending_whole_numbers(candidates: list) -> None:
    with pytest.raises(ValueError, match=r"sizing\.candidates must be ascending whole numbers >= 2, not \["):
        Sagc(candidates=candidates)
