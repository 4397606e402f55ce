"""Samplers' choices, their criteria, and that the choice follows only from the record."""

import random
from collections import Counter
from functools import partial

import numpy as np
import pytest

from areal_like.types import Group, Sample
from areal_like.wire.groups import Head, encode_group
from buffer import policies
from buffer.entries import UNFINISHED
from buffer.events import Open
from buffer.groups import GroupManager
from buffer.prompts import PromptCursor, Share
from buffer.results import WINDOW, Known, Results
from buffer.samplers import NEW, Sampler, in_order, needs_results, pass_rate_pools
from buffer.staleness import Bound
from tests.buffer.paper import Paper

POOLS = partial(pass_rate_pools)


def known(rates: list[float], new: int = 0, results: int = WINDOW, taken: tuple[int, ...] = ()) -> Known:
    """Prompts whose newest results all had these pass rates, 8 samples each."""
    n = len(rates)
    columns = np.arange(WINDOW) < results
    free = np.ones(n, bool)
    free[list(taken)] = False
    seen = np.where(columns, np.array(rates).reshape(n, 1), np.nan)
    return Known(seen, np.tile(8 * columns, (n, 1)), np.ones(n, np.int64), free, np.arange(n) + 100, new)


def draws(sampler: Sampler, prompts: Known, count: int = 400) -> Counter[int]:
    return Counter(sampler(prompts, np.random.default_rng(number)) for number in range(count))


@pytest.mark.parametrize("new", [0, 3, 10**9])
def test_a_choice_is_a_prompt_that_is_free_or_a_new_one(new: int) -> None:
    dice = np.random.default_rng(new)
    for size in (1, 2, 9):
        prompts = known(list(dice.random(size) * 0.8), new, taken=(0,))
        chosen = draws(POOLS, prompts, 60)
        assert set(chosen) <= {NEW, *range(size)} and (new or NEW not in chosen)
        assert 0 not in chosen or (size == 1 and not new), "it is under way, and others are not"


def test_pools_are_drawn_by_weight_and_an_empty_one_gives_its_part_to_the_others() -> None:
    pools = partial(pass_rate_pools, new=0.2, right=0.4, easy=0.1, hard=0.3)
    chosen = draws(pools, known([0.1, 0.5, 0.6, 0.9], new=7), 1000)
    assert abs(chosen[NEW] - 200) < 40 and abs(chosen[0] - 300) < 45 and abs(chosen[3] - 100) < 30
    assert abs(chosen[1] - 200) < 40 and abs(chosen[2] - 200) < 40
    chosen = draws(pools, known([0.1, 0.9]), 1000)
    assert abs(chosen[0] - 750) < 45 and abs(chosen[1] - 250) < 45
    only = partial(pass_rate_pools, new=0, right=1, easy=0, hard=0)
    assert set(draws(only, known([0.1, 0.9], new=3), 40)) == {NEW, 0, 1}, "the only pool with a weight is empty"


def test_the_default_order_asks_for_nothing() -> None:
    assert not needs_results(partial(in_order)) and needs_results(partial(pass_rate_pools))


def test_results_become_visible_when_a_batch_is_opened_whatever_the_order_of_finishing() -> None:
    order = [(3, [1.0, 0.0]), (1, [1.0, 1.0]), (2, [-5.0, 7.0])]
    states = []
    for pushes in (order, order[::-1]):
        results = Results()
        for group_id in (1, 2, 3):
            results.admit(group_id, "", 40)
        results.admit(4, "", 41)
        for group_id, rewards in pushes:
            results.push(group_id, "", 40, rewards)
        assert np.isnan(results.known("", 9).rates).all() and not results.known("", 9).free.any()
        results.open()
        states.append(results.state())
    seen = results.known("", 9)
    assert seen.rates[0, :3].tolist() == [0.5, 0.5, 1.0] and np.isnan(seen.rates[0, 3]), "newest group first"
    assert seen.answers[0].tolist() == [2, 2, 2, 0] and seen.draws.tolist() == [3, 1] and seen.new == 7
    assert seen.free.tolist() == [True, False] and seen.rows.tolist() == [40, 41], "41 is under way"
    assert states[0] == states[1]
    assert results.metrics() == {"prompts/known": 1, "prompts/hard": 0, "prompts/right": 1, "prompts/easy": 0}
    results.leave(4)
    results.open()
    assert results.known("", 9).free.all()


def test_ratios_of_a_mixture_hold_and_the_choice_stays_within_the_task() -> None:
    shares = [Share("a", 0, 5, 3), Share("b", 5, 40, 1)]
    results, dice = Results(), random.Random(1)
    cursor, plain = PromptCursor(shares, 0, 0, POOLS, results), PromptCursor(shares, 0)
    for number in range(80):
        place = cursor.next()
        assert (place.group_id, place.task) == (number, plain.next().task)
        first, size = {"a": (0, 5), "b": (5, 40)}[place.task]
        assert first <= place.row < first + size
        results.admit(number, place.task, place.row)
        results.push(number, place.task, place.row, [dice.random(), 1.0])
        if number % 4 == 3:
            results.open()


def test_a_sampler_that_chooses_what_is_not_there_is_an_error() -> None:
    cursor = PromptCursor(2, 0, 0, lambda prompts, dice: 5, Results())
    with pytest.raises(ValueError, match="the sampler: got 5"):
        cursor.next()


# ---- the record decides ---------------------------------------------------------------------------------------------


def rolled_out(group_id: int, row: int, version: int) -> tuple[Head, bytes]:
    """A group whose rewards follow from its prompt and id alone; those of every fifth row are equal."""
    dice = random.Random(1000 * row + group_id)
    rewards = [0.0] * 8 if row % 5 == 0 else [float(dice.random() < row / 12) for _ in range(8)]
    tokens = np.zeros(3, np.int32), np.zeros(2, np.float32), np.ones(2, bool)
    samples = [Sample(tokens[0], 1, *tokens[1:], [(version, 2)], reward, "stop") for reward in rewards]
    return encode_group(Group(group_id, samples, {version: f"d{version}"}))


def test_snapshots_and_crashes_change_no_choice() -> None:
    """The same history twice: once undisturbed, once with snapshots and restarts at random moments."""

    def drawn(disturbed: bool) -> list[int]:
        dice, chance, journal = random.Random(3), random.Random(4), Paper()
        found: list[int] = []

        def begin() -> tuple[GroupManager, PromptCursor]:
            results = Results()
            replay = GroupManager(Bound(99, 4), partial(policies.in_order), results=results)
            if found:
                journal.restore(replay, 0)
            replay.record = journal.append
            return replay, PromptCursor(9, 0, len(found), POOLS, results)

        replay, prompts = begin()
        for _ in range(80):
            if len(found) == replay.bound.batches.end:
                replay.commit(Open(replay.bound.batches.opened, 4, None))
            group_id, row, _ = prompts.next()
            found.append(row)
            replay.admit(group_id, row, 8, 8, "a", 0, 0.0)
            waiting = sorted(e.id for e in replay.store.entries.of(*UNFINISHED))
            for each in dice.sample(waiting, dice.randrange(len(waiting))):
                if dice.random() < 0.1:
                    replay.drop(each, "failed")
                else:
                    replay.push(*rolled_out(each, found[each], 0), 0, 0.0)
            if disturbed and chance.random() < 0.3:
                journal.check(replay, replay.bound)
                if chance.random() < 0.5:
                    journal.rotate(replay)
                replay, prompts = begin()
        return found

    assert drawn(True) == drawn(False)
