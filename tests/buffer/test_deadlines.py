"""A lease without progress goes to another actor: events in a fixed order, time set by the test."""

import time

import pytest

from buffer.checks import RolloutsFail
from buffer.deadlines import MOST_IN_A_ROW, MOST_PER_GROUP
from buffer.status import levels, status
from buffer.store import LEASED, Stage
from tests.buffer.house import SIGN_OF_LIFE, B, House, asynchronous

TIMEOUT = 100.0


class Clock:
    """The monotonic clock plus the time that the test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ahead, real = 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead)

    def passes(self, house: House, seconds: float, *alive: str, **said: object) -> None:
        """Let time pass, while the actors `alive` report progress on all their leases."""
        until = self.ahead + seconds
        while self.ahead < until:
            self.ahead = min(until, self.ahead + TIMEOUT / 10)
            for actor in house.state.fleet:
                moved = dict.fromkeys(actor.running, 1) if actor.name in alive else {}
                house.say(actor.peer.decode(), "heartbeat", SIGN_OF_LIFE | {"progress": moved} | said)
        house.controller.step(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def stuck_house(**options) -> House:
    house = House(asynchronous(max_staleness=0), lease_timeout=TIMEOUT, **options)
    house.start()
    return house


def running(house: House, name: str) -> list[int]:
    return sorted(house.state.fleet.by_name[name].running)


def told(house: House, name: str, kind: str) -> list[dict]:
    return [body for who, said, body in house.router.sent if (who, said) == (name, kind)]


def test_leases_without_progress_go_to_another_actor_and_the_batch_is_served(clock: Clock) -> None:
    house = stuck_house()
    hung = running(house, "actor-0")
    assert len(hung) == B // 2
    clock.passes(house, TIMEOUT * 0.9, "actor-1")
    assert running(house, "actor-0") == hung, "not before the deadline"
    clock.passes(house, TIMEOUT * 0.2, "actor-1")
    assert running(house, "actor-0") == [] and set(hung) <= set(running(house, "actor-1"))
    assert {"ids": hung, "hand_back": False} in told(house, "actor-0", "cancel")
    for group_id in running(house, "actor-1"):
        house.push("actor-1", group_id, 0)
    house.say("learner", "want", {"index": 0, "version": 0})
    assert house.batches() == [[0, 1, 2, 3]]
    assert levels(house.state, 0.0)["rollout/lease_timeouts"] == len(hung)
    house.push("actor-0", hung[0], 0)
    assert house.state.replay.duplicates == 1, "the late push of the old actor"


@pytest.mark.parametrize(("since", "quits"), [(0.4, False), (0.7, True)])
def test_an_actor_is_told_to_quit_unless_another_lease_of_it_has_moved_lately(clock: Clock, since, quits) -> None:
    house = stuck_house(actors=1)
    actor = house.state.fleet.by_name["actor-0"]
    lively = running(house, "actor-0")[0]
    actor.timed_out = MOST_IN_A_ROW
    clock.ahead += 2.0  # it looks once a second
    now = time.monotonic()
    actor.running = {each: now - 2 * TIMEOUT for each in actor.running} | {lively: now - since * TIMEOUT}
    house.controller.step(0)
    assert bool(told(house, "actor-0", "quit")) is quits


def test_progress_moves_the_deadline_and_that_of_other_leases_does_not(clock: Clock) -> None:
    house = stuck_house(actors=1)
    for _ in range(5):
        clock.ahead += TIMEOUT * 0.4
        house.say("actor-0", "heartbeat", SIGN_OF_LIFE | {"progress": {0: 10, 1: 10, 77: 1}})
        house.controller.step(0)
    leases = house.leases()
    assert {group_id: leases.count(group_id) for group_id in range(B)} == {0: 1, 1: 1, 2: 2, 3: 2}


@pytest.mark.parametrize("state", ["starting", "restarting"])
def test_clocks_stand_still_while_the_engine_does_not_serve(clock: Clock, state: str) -> None:
    house = stuck_house()
    for _ in range(4):
        clock.passes(house, TIMEOUT * 0.6, stats={"engine": state})
    assert house.state.gauges.lease_timeouts == 0
    assert status(house.state)["actors"]["actor-0"]["engine"] == state


def test_while_an_engine_restarts_the_others_get_what_is_to_start(clock: Clock) -> None:
    house = stuck_house()
    house.say("actor-0", "heartbeat", SIGN_OF_LIFE | {"stats": {"engine": "restarting"}})
    before = len(house.leases("actor-0"))
    for name in house.names:
        house.say(name, "failed", {"id": running(house, name)[0], "reason": "rejected", "detail": ""})
    assert len(house.leases("actor-0")) == before and len(running(house, "actor-1")) == 3
    house.say("actor-0", "heartbeat", SIGN_OF_LIFE | {"stats": {"engine": "serving"}})
    house.say("actor-1", "failed", {"id": running(house, "actor-1")[0], "reason": "rejected", "detail": ""})
    assert len(house.leases("actor-0")) == before + 1


def test_a_buffer_that_stood_still_forgives(clock: Clock) -> None:
    house = stuck_house(timeout=20.0)
    clock.ahead += TIMEOUT * 2
    house.controller.step(0)
    assert house.state.gauges.lease_timeouts == 0 and len(house.state.fleet) == 2


def test_without_a_deadline_nothing_is_revoked(clock: Clock) -> None:
    house = House(asynchronous(max_staleness=0))
    house.start()
    clock.passes(house, TIMEOUT * 10)
    assert house.state.gauges.lease_timeouts == 0


def test_an_actor_whose_leases_time_out_gets_no_others_until_it_has_finished_something(clock: Clock) -> None:
    house = stuck_house()
    hung = running(house, "actor-0")
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    before = len(house.leases("actor-0"))
    for _ in range(2):
        house.say("actor-1", "failed", {"id": running(house, "actor-1")[-1], "reason": "rejected", "detail": ""})
    assert len(house.leases("actor-0")) == before, "new groups go to the other"
    house.push("actor-0", hung[0], 0)  # it is slow, and not dead
    house.say("actor-1", "failed", {"id": running(house, "actor-1")[-1], "reason": "rejected", "detail": ""})
    assert len(house.leases("actor-0")) > before
    assert told(house, "actor-0", "quit") == []


def test_a_benched_actor_is_tried_again_after_a_while_and_told_to_quit_if_it_hangs_on(clock: Clock) -> None:
    house = stuck_house()
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    assert running(house, "actor-0") == [] and told(house, "actor-0", "quit") == []
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    for group_id in running(house, "actor-1"):
        house.push("actor-1", group_id, 0)
    house.say("learner", "want", {"index": 0, "version": 0})
    house.say("learner", "trained", {"index": 0})
    house.publish(1)
    house.apply(1)
    assert len(running(house, "actor-0")) == B // 2, "it gets its share again"
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    (word,) = told(house, "actor-0", "quit")
    assert "leases in a row" in word["reason"] and B >= MOST_IN_A_ROW
    for _ in range(3):
        clock.passes(house, TIMEOUT * 1.1, "actor-1")
    assert running(house, "actor-0") == [] and len(told(house, "actor-0", "quit")) == 1, "it is benched for good"
    house.say("actor-0:new", "hello", {"role": "actor", "name": "actor-0", "pid": 2, "slots": 256})
    house.say("actor-0:new", "applied", {"version": 1, "digest": "d1"})
    house.say("actor-1", "failed", {"id": running(house, "actor-1")[-1], "reason": "rejected", "detail": ""})
    assert house.leases("actor-0:new"), "started again, it works again"


def test_an_actor_of_which_some_groups_move_is_not_told_to_quit(clock: Clock) -> None:
    house = House(asynchronous(max_staleness=2), lease_timeout=TIMEOUT)
    house.start()
    held = running(house, "actor-0")
    assert len(held) == 6
    for _ in range(6):
        clock.ahead += TIMEOUT * 0.3
        house.say("actor-0", "heartbeat", SIGN_OF_LIFE | {"progress": {held[0]: 1}})
        house.say("actor-1", "heartbeat", SIGN_OF_LIFE | {"progress": dict.fromkeys(running(house, "actor-1"), 1)})
    assert running(house, "actor-0") == held[:1] and told(house, "actor-0", "quit") == []
    assert house.state.gauges.lease_timeouts == 5


def test_a_group_that_hangs_everywhere_is_dropped_and_its_slot_goes_to_another_prompt(clock: Clock) -> None:
    house = stuck_house()
    bad = 2
    for _ in range(20):
        clock.ahead += TIMEOUT * 0.3
        for name in house.names:
            moved = dict.fromkeys(set(running(house, name)) - {bad}, 1)
            house.say(name, "heartbeat", SIGN_OF_LIFE | {"progress": moved})
    ledger = house.state.store.ledger()
    assert ledger["dropped"] == {"timed out": 1} and ledger["admitted"] == 5 and ledger["active"] == 4
    assert house.state.gauges.lease_timeouts == MOST_PER_GROUP and house.state.store.entries[4].slot == bad
    assert set(house.leases("actor-0")) & set(house.leases("actor-1")) == {bad}, "both have tried it"


def test_when_everything_hangs_the_run_ends_and_says_so(clock: Clock) -> None:
    house = stuck_house(actors=1)
    with pytest.raises(RolloutsFail, match="timed out"):
        for _ in range(100):
            clock.passes(house, TIMEOUT)


def test_a_redundant_group_that_hangs_waits_in_the_queue(clock: Clock) -> None:
    house = stuck_house(actors=1)
    replay = house.state.replay
    entry = replay.admit(100, 100, 8, 8, "actor-0", 0, 0.0, redundant=True)
    house.state.fleet.by_name["actor-0"].lease(100, 8, time.monotonic())
    clock.ahead += TIMEOUT * 1.1
    moved = dict.fromkeys(range(B), 1)
    house.say("actor-0", "heartbeat", SIGN_OF_LIFE | {"progress": moved})
    assert entry.stage is Stage.DEFERRED and house.state.gauges.lease_timeouts == 1


def test_held_out_prompts_go_to_another_actor_too_and_at_last_count_as_failed(clock: Clock) -> None:
    house = House(asynchronous(), evaluate=4, lease_timeout=TIMEOUT)
    house.start()
    for lease in house.leases("actor-1", "heldout"):
        house.say("actor-1", "evaluated", {"id": lease, "reward": 1.0, "oldest": 0, "newest": 0, "length": 4})
    hung = house.leases("actor-0", "heldout")
    clock.passes(house, TIMEOUT * 0.6, "actor-1", heldout=dict.fromkeys(hung, 3))
    clock.passes(house, TIMEOUT * 0.6, "actor-1")
    assert len(house.leases(split="heldout")) == 4, "they moved"
    clock.passes(house, TIMEOUT * 0.6, "actor-1")
    assert set(hung) <= set(house.leases("actor-1", "heldout"))
    clock.passes(house, TIMEOUT * 1.1)
    clock.passes(house, TIMEOUT * 1.1)
    (result,) = house.state.gauges.evaluations
    assert result["reward"] == 0.5 and house.state.evaluation.round is None


def test_a_held_out_prompt_has_a_deadline_of_its_own_at_the_next_actor(clock: Clock) -> None:
    house = House(asynchronous(), evaluate=4, lease_timeout=TIMEOUT)
    house.start()
    for lease in house.leases("actor-1", "heldout"):
        house.say("actor-1", "evaluated", {"id": lease, "reward": 1.0, "oldest": 0, "newest": 0, "length": 4})
    hung, held = house.leases("actor-0", "heldout"), running(house, "actor-0")
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    assert set(hung) <= set(house.leases("actor-1", "heldout")), "in the turn in which they were taken back"
    assert house.state.fleet.by_name["actor-0"].timed_out == len(hung) + len(held), "all are held against it"
    before = house.leases(split="heldout")
    clock.passes(house, TIMEOUT * 0.8, "actor-1")
    assert house.leases(split="heldout") == before and house.state.gauges.evaluations == []


@pytest.mark.parametrize("state", ["starting", "restarting"])
def test_clocks_of_held_out_prompts_stand_still_too(clock: Clock, state: str) -> None:
    house = House(asynchronous(), evaluate=4, lease_timeout=TIMEOUT, timeout=20.0)
    house.start()
    before = house.leases(split="heldout")
    for _ in range(4):
        clock.passes(house, TIMEOUT * 0.6, stats={"engine": state})
    clock.ahead += TIMEOUT * 2
    house.controller.step(0)
    assert house.leases(split="heldout") == before, "neither while an engine restarts nor while the buffer stood still"


# ---- hedges ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hedged(clock: Clock) -> House:
    """Groups 0 and 2 hang on actor-0. They are also leased to actor-1, which has pushed its own groups."""
    house = stuck_house()
    for group_id in running(house, "actor-1"):
        house.push("actor-1", group_id, 0)
    clock.passes(house, TIMEOUT * 0.4)
    assert running(house, "actor-0") == [0, 2] and running(house, "actor-1") == [], "not before half the deadline"
    clock.passes(house, TIMEOUT * 0.3)
    assert running(house, "actor-0") == running(house, "actor-1") == [0, 2]
    assert house.state.gauges.lease_timeouts == 0 and levels(house.state, 0.0)["rollout/hedges"] == 2
    return house


@pytest.mark.parametrize("why", ["finishing", "full disk"])
def test_nothing_is_leased_to_a_second_actor_at_the_end_or_on_a_full_disk(clock: Clock, why: str) -> None:
    house = stuck_house()
    for group_id in running(house, "actor-1"):
        house.push("actor-1", group_id, 0)
    if why == "finishing":
        house.state.phase.finishing = True
    else:
        house.state.outbox.flush = lambda: None
        house.state.outbox.blocked = "No space left on device"
    clock.passes(house, TIMEOUT * 0.7)
    assert running(house, "actor-0") == [0, 2] and running(house, "actor-1") == []


def balances(house: House) -> bool:
    ledger = house.state.store.ledger()
    gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    held = sum(len(actor.running) for actor in house.state.fleet) - len(house.state.hedges.pairs)
    return ledger["admitted"] == gone + ledger["active"] and held == house.state.store.count(*LEASED)


@pytest.mark.parametrize(("winner", "loser"), [("actor-0", "actor-1"), ("actor-1", "actor-0")])
def test_of_a_hedged_group_the_first_push_wins_and_the_other_lease_is_cancelled(
    hedged: House, winner: str, loser: str
) -> None:
    hedged.push(winner, 0, 0)
    assert hedged.state.store.entries[0].pushed_by == winner and 0 not in running(hedged, loser)
    assert {"ids": [0], "hand_back": False} in told(hedged, loser, "cancel")
    hedged.push(loser, 0, 0)
    assert hedged.state.replay.duplicates == 1 and balances(hedged)
    hedged.push(loser, 2, 0)
    hedged.say("learner", "want", {"index": 0, "version": 0})
    assert hedged.batches() == [[0, 1, 2, 3]] and balances(hedged)


@pytest.mark.parametrize("who", ["actor-0", "actor-1"])
@pytest.mark.parametrize("how", ["lost", "leaving", "failed", "refused", "handed back"])
def test_when_one_lease_of_a_hedged_group_ends_the_other_goes_on(hedged: House, who: str, how: str) -> None:
    other = "actor-1" if who == "actor-0" else "actor-0"
    if how == "lost":
        hedged.say("stranger", "lost", {"name": who, "pid": 0, "how": "died", "for_good": False})
    elif how in ("leaving", "handed back"):
        hedged.say(who, "hand_back", {"ids": [0, 2], "partials": [], "leaving": how == "leaving"})
    elif how == "failed":
        for group_id in (0, 2):
            hedged.say(who, "failed", {"id": group_id, "reason": "rejected", "detail": ""})
    else:
        for group_id in (0, 2):
            hedged.push(who, group_id, 7)  # of a version that was never published
    assert all(hedged.state.store.entries[each].actor == other for each in (0, 2)), "nothing is dropped or begun anew"
    assert running(hedged, other) == [0, 2] and not hedged.state.hedges.pairs and balances(hedged)
    for group_id in (0, 2):
        hedged.push(other, group_id, 0)
    hedged.say("learner", "want", {"index": 0, "version": 0})
    assert hedged.batches() == [[0, 1, 2, 3]] and balances(hedged)


def test_at_the_deadline_the_first_lease_of_a_hedged_group_ends_and_no_third_is_given(
    hedged: House, clock: Clock
) -> None:
    before = len(hedged.leases())
    clock.passes(hedged, TIMEOUT * 0.5, "actor-1")
    assert running(hedged, "actor-0") == [] and running(hedged, "actor-1") == [0, 2]
    assert hedged.state.gauges.lease_timeouts == 2 and len(hedged.leases()) == before and balances(hedged)


def test_a_hedged_group_that_is_recalled_or_too_old_runs_in_two_places_no_more(hedged: House) -> None:
    hedged.state.replay.recall(0)
    hedged.state.replay.drop(2, "stale")
    hedged.controller.step(0)
    assert running(hedged, "actor-0")[:1] == [0] and 0 not in running(hedged, "actor-1")
    assert 2 not in running(hedged, "actor-0") + running(hedged, "actor-1")
    hedged.say("actor-0", "hand_back", {"ids": [0], "partials": [], "leaving": False})
    assert hedged.state.store.entries[0].stage is Stage.RUNNING and balances(hedged)


def test_an_actor_that_hedges_overtake_again_and_again_is_told_to_quit(hedged: House, clock: Clock) -> None:
    for group_id in (0, 2):
        hedged.push("actor-1", group_id, 0)
    clock.passes(hedged, 2.0)
    assert hedged.state.fleet.by_name["actor-0"].timed_out == 2 and told(hedged, "actor-0", "quit") == []
    hedged.say("learner", "want", {"index": 0, "version": 0})
    hedged.say("learner", "trained", {"index": 0})
    hedged.publish(1)
    hedged.apply(1)
    assert running(hedged, "actor-0") == [] and len(running(hedged, "actor-1")) == B, "it is benched"
    clock.passes(hedged, TIMEOUT * 1.1, "actor-1")
    hedged.say("actor-1", "failed", {"id": running(hedged, "actor-1")[0], "reason": "rejected", "detail": ""})
    (again,) = running(hedged, "actor-0")
    clock.passes(hedged, TIMEOUT * 0.7, "actor-1")
    hedged.push("actor-1", again, 1)
    clock.passes(hedged, 2.0, "actor-1")
    assert len(told(hedged, "actor-0", "quit")) == 1 and hedged.state.gauges.lease_timeouts == 0


@pytest.mark.parametrize("takes_weights", [True, False])
def test_a_benched_actor_that_takes_no_new_weights_is_told_to_quit(
    hedged: House, clock: Clock, takes_weights: bool
) -> None:
    for group_id in (0, 2):
        hedged.push("actor-1", group_id, 0)
    clock.passes(hedged, 2.0)
    hedged.say("learner", "want", {"index": 0, "version": 0})
    hedged.say("learner", "trained", {"index": 0})
    hedged.publish(1)
    hedged.apply(1, "actor-1", *["actor-0"] * takes_weights)
    clock.passes(hedged, TIMEOUT * 0.9, "actor-1")
    assert told(hedged, "actor-0", "quit") == []
    clock.passes(hedged, TIMEOUT * 0.3, "actor-1")
    assert len(told(hedged, "actor-0", "quit")) == (not takes_weights)


def test_weights_that_have_just_been_published_need_not_be_taken_yet(hedged: House, clock: Clock) -> None:
    for group_id in (0, 2):
        hedged.push("actor-1", group_id, 0)
    clock.passes(hedged, TIMEOUT * 1.5)
    hedged.say("learner", "want", {"index": 0, "version": 0})
    hedged.say("learner", "trained", {"index": 0})
    hedged.publish(1)
    hedged.apply(1, "actor-1")
    clock.passes(hedged, TIMEOUT * 0.3, "actor-1")
    assert told(hedged, "actor-0", "quit") == []
    hedged.apply(1, "actor-0")
    clock.passes(hedged, TIMEOUT * 1.5, "actor-0", "actor-1")
    assert told(hedged, "actor-0", "quit") == []


def test_only_an_idle_actor_with_as_new_weights_gets_a_hedge(clock: Clock) -> None:
    house = House(asynchronous(max_staleness=1), lease_timeout=TIMEOUT)
    house.hello("learner", "actor-0", "actor-1", slots=16)
    house.publish(0)
    house.apply(0)
    full = running(house, "actor-1")
    assert len(full) == 2, "its engine has no room for a third group of 8"
    clock.passes(house, TIMEOUT * 0.7, "actor-1")
    assert house.state.hedges.made == 0
    house.state.max_bytes = 0  # nothing new may start
    for group_id in full:
        house.push("actor-1", group_id, 0)
        house.say("actor-1", "credit", {"ended": 16})
    house.state.fleet.by_name["actor-1"].version = -1
    clock.passes(house, TIMEOUT * 0.1, "actor-1")
    assert house.state.hedges.made == 0
    house.state.fleet.by_name["actor-1"].version = 0
    clock.passes(house, TIMEOUT * 0.1, "actor-1")
    assert house.state.hedges.made == 2
