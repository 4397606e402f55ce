"""Group sizes by what a batch teaches per second: each clause against NumPy's truth, or the real scheduler's rules."""

import logging
import math
from collections import deque

import numpy as np
import pytest

from buffer.reward_noise import RewardNoise, moments
from buffer.round_model import CostFit, LengthFit, RoundModel, _draw, fit_group
from buffer.sagc import LEAST_GAP, SLACK, Sagc
from buffer.schedulers import AsyncScheduler, SyncScheduler
from buffer.sizing import GroupLengths, Rounds, Sizing, check_sizes
from learners.gradient_noise import Cut, estimates

SIZES = (4, 8, 16, 32)


def groups_of(
    dice: np.random.Generator, groups: int, size: int, *, tau: float = 0.0, sigma: float = 0.5, rates=(1.0, 1.0), at=0.0
) -> list[GroupLengths]:
    """Groups with log-normal lengths around 1000; rewards 0 or 1, pass rates of prompts Beta(rates)."""
    lengths = 1000 * np.exp(dice.normal(0, tau, (groups, 1)) + dice.normal(0, sigma, (groups, size)))
    rewards = (dice.random((groups, size)) < dice.beta(*rates, (groups, 1))).astype(float)
    pairs = zip(lengths.astype(int).tolist(), rewards.tolist(), strict=True)
    return [GroupLengths(tuple(t), (False,) * size, True, tuple(r), at) for t, r in pairs]


def fitted(tau: float, sigma: float) -> LengthFit:
    """As if the spreads were known, around 1000 tokens."""
    fit = LengthFit(1.0)
    fit.groups, fit.mean_sum, fit.longest = 1e9, 1e9 * math.log(1000), math.inf
    fit.square_sum = 1e9 * (math.log(1000) ** 2 + tau**2)
    fit.responses, fit.sigma_sum = 1e9, 1e9 * sigma
    return fit


# ---- what a batch teaches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 5, 8])
def test_the_moments_of_few_rewards_are_unbiased(size: int) -> None:
    v, dice = 0.3 * 0.7, np.random.default_rng(0)
    flips = (dice.random((15_000, size)) < 0.3).astype(float)
    assert np.mean([moments(rewards) for rewards in flips.tolist()], axis=0) == pytest.approx([v, v * v], abs=3e-3)


@pytest.mark.parametrize("rates", [(20.0, 20.0), (0.5, 5.0), (0.2, 0.2)])
def test_noise_is_that_of_policy_gradients(rates: tuple[float, float]) -> None:
    """An answer is 12 coin flips with logits of their own in every prompt; the reward, 0 or 10, is the first flip."""
    dice, noise, truth = np.random.default_rng(0), RewardNoise(1.0, given=12), {}
    for size in (4, 8, 32):
        chances = np.full((40_000 // size, 1, 12), 0.5)
        chances[:, 0, 0] = dice.beta(*rates, len(chances))
        flips = dice.random((len(chances), size, 12)) < chances
        rewards = 10.0 * flips[..., 0]
        advantages = (rewards - rewards.mean(1, keepdims=True)) * size / (size - 1)
        gradients = (advantages[..., None] * (flips - chances)).mean(1)
        truth[size] = np.square(gradients).sum() / len(gradients) / np.square(gradients.mean(0)).sum()
        noise.note(rewards.tolist())
    for size, ratio in truth.items():
        assert noise.noise(size) == pytest.approx(ratio, rel=0.15)


@pytest.mark.parametrize("choices", [2, 12, 40])
def test_gradients_tell_how_many_choices_share_a_reward(choices: int) -> None:
    """As above; the learner's estimates are those of `learners.gradient_noise`, from batches of 16 prompts."""
    dice, noise, size = np.random.default_rng(0), RewardNoise(1.0, None), 8
    assert noise.decisions == 32
    for _ in range(1500):
        chances = np.full((16, 1, choices), 0.5)
        chances[:, 0, 0] = dice.beta(20.0, 20.0, 16)
        flips = dice.random((16, size, choices)) < chances
        rewards = flips[..., 0].astype(float)
        advantages = rewards - rewards.mean(1, keepdims=True)
        samples = (advantages[..., None] * (flips - chances)).reshape(16 * size, choices)
        cut = Cut(np.arange(16 * size), np.arange(16 * size) // size, (0, 0))
        sums = np.stack([samples[part].sum(0) for part in cut.parts])
        noise.note(rewards.tolist())
        noise.note_gradient(size, *estimates(sums @ sums.T, 8, 16, size))
    assert noise.decisions == pytest.approx(choices, rel=0.2)


def test_estimates_of_many_batches_weigh_alike_whatever_their_unit() -> None:
    """An optimizer step of the same kind in another unit: what is known stays, and each batch has the same say."""
    found = []
    for unit in (1.0, 1e6):
        noise = RewardNoise(0.5, None)
        noise.note([(0.0, 1.0, 1.0, 0.0)] * 10)
        for within in (4.0, 1.0, 9.0):
            noise.note_gradient(8, 1.0 * unit, 1.0 * unit, within * unit)
        found.append(noise.decisions)
        assert noise.scale / unit == pytest.approx(0.25 * (2 + 3.5) + 0.5 * (2 + 0.875) + (2 + 7.875))
    assert found[0] == pytest.approx(found[1])


def test_evidence_against_all_noise_between_prompts_leaves_a_number_of_choices() -> None:
    noise = RewardNoise(1.0, None)
    noise.note_gradient(8, 1.0, 1.0, 1.0)
    assert noise.decisions == 32, "no rewards yet: nothing can be told"
    noise.note([(0.0, 1.0, 1.0, 0.0)] * 10)
    for _ in range(100):
        noise.note_gradient(8, 0.0, -1.0, 1.0)
    assert 32 < noise.decisions < math.inf
    for _ in range(500):
        noise.note_gradient(8, 0.0, 1.0, -1.0)
    assert noise.decisions == 1.0 and noise.value(4, 32) > noise.value(8, 16)


def test_a_constant_that_is_added_to_all_rewards_changes_nothing() -> None:
    plain, shifted = RewardNoise(1.0, given=8), RewardNoise(1.0, given=8)
    rewards = [(0.0, 1.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)]
    plain.note(rewards)
    shifted.note([[reward + 5.0 for reward in group] for group in rewards])
    assert shifted.noise(8) == pytest.approx(plain.noise(8))


def test_hard_prompts_want_samples_and_unlike_prompts_want_prompts() -> None:
    def preference(rates: tuple[float, float]) -> float:
        noise = RewardNoise(1.0, given=8)
        noise.note([group.rewards for group in groups_of(np.random.default_rng(0), 4000, 8, rates=rates)])
        return noise.value(4, 32) / noise.value(32, 4)

    hard, even, unlike = preference((2.0, 98.0)), preference((50.0, 50.0)), preference((0.1, 0.1))
    assert hard < 0.75 * even and hard < 0.75 * unlike


def test_groups_of_four_and_more_say_what_they_teach() -> None:
    noise = RewardNoise(1.0, given=8)
    noise.note([(0.0, 1.0, 1.0)])
    assert noise.seen == 0
    noise.note([(0.0, 1.0, 1.0, 1.0)])
    assert noise.seen == 1


def test_rewards_that_never_differ_favour_no_size() -> None:
    noise = RewardNoise(1.0, given=50)
    noise.note([(1.0,) * 8] * 40)
    assert {noise.value(size, 256 // size) for size in SIZES} == {1.0} and noise.dull_share == 1.0


# ---- how long it takes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [1.0, 1.5])
def test_spreads_are_those_of_all_that_started_though_the_longest_were_cut(over: float) -> None:
    fit, launched, dice = LengthFit(1.0), math.ceil(over * 8), np.random.default_rng(0)
    for whole in groups_of(dice, 3000, launched, tau=0.7, sigma=0.5):
        tokens = sorted(whole.tokens)
        limit = tokens[7]
        cut = tuple(place > 7 for place in range(launched))
        fit.note([GroupLengths(tuple(min(each, limit) for each in tokens), cut, closed=True)])
    assert (fit.sigma, fit.tau, fit.mu) == pytest.approx((0.5, 0.7, math.log(1000)), abs=0.04)


def test_a_group_that_was_broken_off_says_nothing_of_lengths_yet() -> None:
    assert fit_group(GroupLengths((5, 9, 7), (False, False, True))) is None
    assert fit_group(GroupLengths((5, 9, 7), (False, False, True), closed=True)) is not None


def played(scheduler: SyncScheduler, size: int, tau: float, sigma: float, rounds: int = 400) -> float:
    """Mean longest response of rounds that the scheduler's own `long` and `launch` drive."""
    dice, queue, ends = np.random.default_rng(1), deque[float](), []
    for _ in range(rounds):
        groups = scheduler.open_batch(256, len(queue), [])
        fresh = 0 if scheduler.long else math.ceil(scheduler.oversample_prompts * groups)
        prompts = np.array([queue.popleft() for _ in range(groups)] if scheduler.long else dice.normal(0, tau, fresh))
        logs = prompts[:, None] + dice.normal(0, sigma, (len(prompts), scheduler.launch))
        done = np.sort(logs, axis=1)[:, size - 1]
        order = np.argsort(done)
        ends.append(1000 * math.exp(done[order[groups - 1]]))
        queue.extend(prompts[order[groups:]].tolist())
    return float(np.mean(ends))


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"oversample_prompts": 1.25},
        {"oversample_prompts": 2.0},
        {"oversample_prompts": 1.25, "oversample_responses": 1.25},
        {"oversample_prompts": 1.25, "oversample_responses": 1.25, "cut_responses": "weigh"},
    ],
    ids=["plain", "prompts", "twice", "both", "weighed"],
)
def test_predicted_rounds_are_as_long_as_those_of_the_scheduler(knobs: dict) -> None:
    for size in (4, 32):
        scheduler = SyncScheduler(Sizing(group_size=size), **knobs)
        model = RoundModel(scheduler.rounds(256), size, 256 // size)
        assert model.steps(fitted(0.7, 0.5)) == pytest.approx(played(scheduler, size, 0.7, 0.5), rel=0.08)


@pytest.mark.parametrize("long_responses", [True, False])
def test_drawn_groups_end_with_their_last_needed_response(long_responses: bool) -> None:
    """In units of sigma: of `launch` responses the size-th, of as many as are needed the last."""
    rounds = Rounds(256, prompts=1.25, responses=1.5, long_responses=long_responses)
    drawn, launch, started = _draw(rounds, 8, 32), 12, 40
    dice = np.random.default_rng(0)
    count = len(drawn.short)
    prompts, responses = dice.standard_normal((count, started)), dice.standard_normal((count, started, launch))
    again = dice.standard_normal((count, started, launch if long_responses else 8))
    np.testing.assert_array_equal(drawn.prompts, prompts)
    np.testing.assert_array_equal(drawn.short, np.sort(responses, axis=2)[:, :, 7])
    np.testing.assert_array_equal(drawn.long, np.sort(again, axis=2)[:, :, 7])


@pytest.mark.parametrize(("max_staleness", "waits"), [(0, True), (1, False)])
def test_a_scheduler_says_whether_its_rounds_wait_for_the_last_group(max_staleness: int, waits: bool) -> None:
    scheduler = AsyncScheduler(Sagc(), max_staleness=max_staleness, max_inflight_groups=6)
    assert scheduler.rounds(64) == Rounds(64, waits=waits, at_once=6)


def test_the_rules_decide_which_sizes_are_fast() -> None:
    def steps(rounds: Rounds, size: int) -> float:
        return RoundModel(rounds, size, 256 // size).steps(fitted(0.7, 0.5))

    plain, tail = Rounds(256), Rounds(256, prompts=1.25)
    assert steps(plain, 4) > 1.1 * steps(plain, 32), "fewer prompts: less chance of a very long one"
    assert steps(tail, 4) < 0.9 * steps(tail, 32), "whole groups are cut"
    one = AsyncScheduler(Sizing(group_size=8), max_staleness=0, max_inflight_groups=1).rounds(256)
    assert steps(one, 4) > 3 * steps(one, 32), "a barrier per group"
    free = AsyncScheduler(Sizing(group_size=8), max_staleness=4).rounds(256)
    assert steps(free, 4) == steps(free, 32) == 1.0, "nobody waits: all of the actors' time"


def test_what_a_batch_costs_beside_its_responses_is_measured() -> None:
    """A decode step takes 20 ms, and each batch 30 s more: as long as 1500 steps."""
    cost, dice, now = CostFit(0.98), np.random.default_rng(0), 0.0
    for batch in range(40):
        seen = groups_of(dice, 8, 8)
        now += 30.0 + 0.02 * max(max(group.tokens) for group in seen)
        cost.note([group._replace(at=now) for group in seen], Rounds())
        assert (cost.extra > 0) == (batch >= 8), "not before eight differences"
    assert cost.extra == pytest.approx(1500, rel=1e-6)


# ---- the choice -----------------------------------------------------------------------------------------------------


def after(sagc: Sagc, batches: int, rounds: Rounds, **how) -> Sagc:
    dice = np.random.default_rng(0)
    sagc.rounds = rounds
    for _ in range(batches):
        sagc.next_size(groups_of(dice, sagc.groups(sagc.chosen), sagc.chosen, **how))
    return sagc


def test_it_begins_with_the_set_size_until_it_has_seen_enough() -> None:
    sagc = after(Sagc(group_size=16, budget=0.9, decisions=4), 1, Rounds(256), rates=(0.2, 0.2))
    assert sagc.rewards.seen == 16 and sagc.chosen == 16 and not sagc.told
    exactly = after(Sagc(group_size=8, budget=0.9, decisions=4), 1, Rounds(256), rates=(0.2, 0.2))
    assert exactly.rewards.seen == Sagc.least_evidence and exactly.told, "32 groups are enough"
    assert after(sagc, 3, Rounds(256), rates=(0.2, 0.2)).chosen == 4


def test_it_takes_what_teaches_most_per_predicted_second_and_tells_each_score() -> None:
    slow = after(Sagc(budget=0.9), 12, Rounds(256, waits=False, at_once=1), tau=0.3, rates=(50.0, 50.0))
    fast = after(Sagc(budget=0.9, decisions=4), 12, Rounds(256, prompts=1.25), tau=0.9, sigma=0.5, rates=(0.5, 0.5))
    assert (slow.chosen, fast.chosen) == (32, 4)
    for sagc in (slow, fast):
        told = sagc.metrics()
        rates = {size: told[f"sizing/value_{size}"] / told[f"sizing/steps_{size}"] for size in SIZES}
        best = max(rates[size] for size in sagc.allowed)
        for size in SIZES:
            score = rates[size] / best - told["sizing/dual"] * told[f"sizing/risk_{size}"]
            assert told[f"sizing/score_{size}"] == pytest.approx(score)
        assert sagc.chosen == max(sagc.allowed, key=lambda size: told[f"sizing/score_{size}"])


def test_a_batch_never_has_too_few_prompts_but_for_the_size_that_was_set() -> None:
    quick = {"tau": 0.3, "rates": (50.0, 50.0)}
    rounds = Rounds(128, waits=False, at_once=1)
    assert after(Sagc(budget=0.9, least_prompts=4), 12, rounds, **quick).chosen == 32
    assert after(Sagc(budget=0.9, least_prompts=8), 12, rounds, **quick).chosen == 16
    assert after(Sagc(budget=0.9, least_prompts=8, group_size=32), 12, rounds, **quick).chosen == 32


def test_the_long_run_share_keeps_to_the_budget() -> None:
    """Left alone it would take groups of 32, of which most have a straggler."""
    sagc = Sagc(budget=0.3, least_prompts=1)
    quick = {"sigma": 0.6, "rates": (50.0, 50.0)}
    after(sagc, 300, Rounds(256, waits=False, at_once=1), **quick)
    assert sagc.share_mean == pytest.approx(0.3, abs=0.01) and not sagc.infeasible


def test_a_budget_that_cannot_be_held_is_told_once_and_the_dual_stays_bounded(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        sagc = after(Sagc(budget=0.05), 120, Rounds(256), sigma=1.0)
    assert sagc.queue < 60 and sagc.chosen == 4 and sagc.metrics()["sizing/infeasible"] == 1.0
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("sizing.budget=0.05 can't be held: even of groups of 4 a share of 0.") and "larger" in said


def test_the_bound_of_the_dual_is_what_tells_the_two_safest_sizes_apart() -> None:
    """With it the smaller one wins by SLACK at least, however much more the larger one teaches."""
    sagc = after(Sagc(budget=0.05), 120, Rounds(256), sigma=1.0)
    least, second, *_ = sorted(map(sagc.risk, sagc.allowed))
    assert sagc._most_queue() == pytest.approx(SLACK + 1 / (second - least)) and second - least > LEAST_GAP


def test_a_single_size_has_a_bounded_dual_too() -> None:
    sagc = after(Sagc(budget=0.05, candidates=[8], group_size=8), 60, Rounds(256), sigma=1.0)
    assert sagc.chosen == 8 and sagc.queue <= sagc._most_queue() == SLACK + 1


def test_kept_prompts_make_batches_of_other_sizes() -> None:
    sagc = Sagc(keep="prompts", candidates=[4, 6, 8], group_size=8, least_prompts=8)
    assert check_sizes(sagc, 16) == 128, "nothing needs to divide it"
    scheduler = SyncScheduler(sagc)
    assert scheduler.open_batch(128, 0, []) == 16
    assert [sagc.groups(size) for size in (4, 6, 8)] == [16, 16, 16] and sagc.rounds == Rounds(128)


def test_its_state_survives_a_crash() -> None:
    first, again = after(Sagc(), 12, Rounds(256), tau=0.5), Sagc()
    again.load_state_dict(first.state_dict())
    assert again.metrics() == first.metrics()
    seen = groups_of(np.random.default_rng(5), 32, 8)
    first.cost.ended = math.nan  # the one thing that a crash loses
    assert [again.next_size(seen), again.metrics()] == [first.next_size(seen), first.metrics()]


@pytest.mark.parametrize(
    "knobs",
    [
        {"candidates": [2, 4]},
        {"decisions": 0},
        {"group_size": 12},
        {"least_prompts": 0},
        {"keep": "tokens"},
        {"budget": 1.0},
    ],
)
def test_senseless_knobs_are_refused(knobs: dict) -> None:
    with pytest.raises(ValueError, match="sizing"):
        Sagc(**{"group_size": 4, **knobs})
