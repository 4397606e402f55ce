"""Rounds with more groups than places, group sizes that follow stragglers, and groups handed back unfinished, with
events in a fixed order."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from buffer.checks import MOST_CONTEXTS, AnswerLimits
from buffer.entries import LEASED, Stage
from buffer.groups import GroupManager
from buffer.policies import in_order
from buffer.rounds import SyncScheduler
from buffer.sizing import Fixed, GroupLengths, Sagc, Sizing, check_sizes
from buffer.staleness import Bound
from tests.buffer.histories import SIZINGS, head_of
from tests.buffer.house import B, House, asynchronous, table


def started(scheduler: SyncScheduler, **rules) -> House:
    house = House(scheduler, **rules).start()
    house.want(0)
    return house


def owner(house: House, group_id: int) -> str:
    return house.store.entries[group_id].actor


def hand_back(house: House, *ids: int) -> None:
    for group_id in ids:
        house.say(owner(house, group_id), "hand_back", {"lengths": {group_id: []}, "leaving": False})


def test_the_first_done_are_kept_and_the_others_are_recalled_in_the_same_turn() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=1.5))
    launched = sorted(house.leases())
    assert launched == list(range(6)) and len(house.store.entries.redundant) == 2
    for group_id in (5, 4, 3, 2):
        assert not [body for _, kind, body in house.router.sent if kind == "cancel"]
        house.finish(group_id, 0)
    assert sorted(house.batches()[0]) == [2, 3, 4, 5]
    cancels = [(who, body) for who, kind, body in house.router.sent if kind == "cancel"]
    assert len(cancels) == 2 and all((owner(house, i), {"ids": [i], "hand_back": True}) in cancels for i in (0, 1))
    hand_back(house, 0, 1)
    assert [entry.id for entry in house.store.entries.of(Stage.DEFERRED)] == [0, 1]
    house.push(owner(house, 0), 0, 0)
    assert house.store.entries[0].stage is Stage.DEFERRED, "too late: its round is closed"


def test_a_long_round_takes_from_the_queue_alone_first_in_first_out() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=1.5))
    deferred: list[int] = []
    for batch in range(3):
        running = sorted(entry.id for entry in house.store.entries.of(*LEASED))
        if batch == 2:
            assert running == sorted(deferred) and house.server.dispatcher.scheduler.long
        for group_id in running[-B:]:
            house.finish(group_id, batch)
        hand_back(house, *running[:-B])
        deferred += running[:-B]
        house.trained(batch)
        house.want(batch + 1)
    assert [sorted(ids) for ids in house.batches()] == [[2, 3, 4, 5], [8, 9, 10, 11], [0, 1, 6, 7]]
    assert not house.server.dispatcher.scheduler.long


def test_only_short_rounds_start_more_responses_than_they_need() -> None:
    scheduler = SyncScheduler(Fixed(group_size=8), oversample_prompts=1.25, oversample_responses=1.25)
    assert scheduler.open_batch(32, 0, []) == 4 and (scheduler.long, scheduler.launch) == (False, 10)
    assert scheduler.open_batch(32, 4, []) == 4 and (scheduler.long, scheduler.launch) == (True, 8)


def test_a_long_round_waits_for_what_is_still_being_handed_back() -> None:
    house = started(SyncScheduler(Fixed(group_size=8), oversample_prompts=2.0))
    for group_id in (4, 5, 6, 7):
        house.finish(group_id, 0)
    hand_back(house, 0, 1)
    house.want(1)
    house.trained(0)
    assert house.server.dispatcher.scheduler.long and sorted(house.leases()[8:]) == [0, 1]
    hand_back(house, 2, 3)
    assert sorted(house.leases()[8:]) == [0, 1, 2, 3], "the queue alone, no new prompt"


def test_the_controller_is_told_of_responses_that_had_not_begun() -> None:
    house = started(SyncScheduler(SIZINGS["restless"](), oversample_prompts=1.5))
    last, size = max(house.leases()), house.server.dispatcher.scheduler.group_size
    for group_id in range(last):
        if house.store.entries[group_id].stage is Stage.RUNNING and not house.batches():
            head, payload = head_of(group_id, 0, size)
            house.say(owner(house, group_id), "push", table(head), payload)
    house.server.gauges.seen.clear()
    house.say(owner(house, last), "hand_back", {"lengths": {last: [(3, False)]}, "leaving": False})
    (seen,) = house.server.gauges.seen
    assert seen == GroupLengths((3,) + (0,) * (size - 1), (False,) + (True,) * (size - 1)) and size > 1


class Growing(Sizing):
    """A user's own controller: groups of 8, then of 32."""

    sizes = (8, 16, 32)

    def __init__(self) -> None:
        super().__init__(group_size=8)

    def next_size(self, seen: Sequence[GroupLengths]) -> int:
        self.group_size, now = 32, self.group_size
        return now


def test_the_last_rounds_have_places_for_all_that_wait_whatever_the_controller_would_like() -> None:
    house = started(SyncScheduler(Growing(), oversample_prompts=1.5), last_batch=2)
    for group_id in (2, 3, 4, 5):
        house.finish(group_id, 0)
    house.want(1)
    hand_back(house, 0, 1)
    house.trained(0)
    running = house.store.entries.of(*LEASED)
    assert [(entry.id, entry.need) for entry in running] == [(0, 16), (1, 16)], "one of 32 would leave a prompt over"
    assert house.server.dispatcher.scheduler.metrics()["sizing/group_size"] == 16


@pytest.mark.parametrize("versions", [(0, 0), (1, 2), (2, 2)])
def test_strict_rounds_serve_nothing_but_the_current_version(versions: tuple[int, int]) -> None:
    """The last check, after admission: among admitted groups, neither older nor newer tokens are trained."""
    replay = GroupManager(Bound(0, 1), partial(in_order))
    for group_id, made in enumerate([(0, 0), versions]):
        replay.admit(group_id, group_id, 2, 2, "a", 0, 0.0)
        head, payload = head_of(group_id, made[1], 2, oldest=made[0])
        replay.push(head, payload, 1, 0.0)
    assert [entry.id for entry in replay.serve(0)] == [0]
    replay.finish(0)
    if versions[0] < 1:
        assert replay.serve(1) == [] and replay.store.ledger()["dropped"].get("stale") == 1
    else:
        with pytest.raises(RuntimeError, match="off-policy"):
            replay.serve(1)


def test_rounds_train_no_stale_tokens() -> None:
    with pytest.raises(ValueError, match=r"scheduler\.max_staleness"):
        SyncScheduler(Fixed(), oversample_prompts=1.5, max_staleness=2)


def test_the_groups_of_an_actor_that_leaves_go_to_others() -> None:
    house = House(asynchronous(max_staleness=1)).start()
    lost = house.leases("actor-1")
    house.say("actor-1", "hand_back", {"lengths": {lost[0]: [(3, True)]}, "leaving": True})
    assert "actor-1" not in house.server.fleet.by_name
    assert set(lost) <= set(house.leases("actor-0")), "those that it did not name, too"


@pytest.mark.parametrize(
    ("lengths", "refused"),
    [([(1, True)] * 99, 1), ([(5 * MOST_CONTEXTS, True)], 0), ([(5 * MOST_CONTEXTS + 1, True)], 1)],
)
def test_lengths_that_a_group_cannot_have_are_refused_and_its_lease_ends(lengths: list, refused: int) -> None:
    house = House(asynchronous()).start()
    house.server.limits = AnswerLimits(lambda row: 5)
    group_id, before = house.leases("actor-0")[0], len(house.leases())
    house.say("actor-0", "hand_back", {"lengths": {group_id: lengths, 9999: []}, "leaving": False})
    assert house.router.refused == refused and len(house.leases()) == before + 1, "it has another lease"


def test_only_the_owner_hands_a_group_back() -> None:
    house = House(asynchronous()).start()
    group_id = house.leases("actor-0")[0]
    for name in ("actor-1", "a stranger"):
        house.say(name, "hand_back", {"lengths": {group_id: []}, "leaving": False})
    assert house.store.entries[group_id].actor == "actor-0"


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
