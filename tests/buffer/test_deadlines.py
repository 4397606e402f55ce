"""A lease without progress goes to another actor: events in a fixed order, time set by the test."""

import time

import pytest

from buffer.checks import MOST_REDRAWN, AnswerLimits, RolloutsFail
from buffer.deadlines import MOST_IN_A_ROW, MOST_PER_GROUP
from tests.buffer.house import SIGN_OF_LIFE, B, House, answer, asynchronous

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
            for actor in house.server.fleet:
                moved = dict.fromkeys(house.store.entries.held_by(actor.name), 1) if actor.name in alive else {}
                house.say(actor.peer.decode(), "heartbeat", SIGN_OF_LIFE | {"progress": moved} | said)
        house.server.step(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def stuck_house(**options) -> House:
    return House(asynchronous(max_staleness=0), lease_timeout=TIMEOUT, **options).start()


def running(house: House, name: str) -> list[int]:
    return sorted(house.store.entries.held_by(name))


def train_batch_0(house: House) -> None:
    """Actor 1 has all groups."""
    for group_id in running(house, "actor-1"):
        house.push("actor-1", group_id, 0)
    house.want(0)
    house.say("learner", "trained", {"index": 0})
    house.publish(1)


def sent(house: House, name: str, kind: str) -> list[dict]:
    return [body for who, said, body in house.router.sent if (who, said) == (name, kind)]


def test_progress_beyond_the_longest_answer_holds_no_lease(clock: Clock) -> None:
    house = stuck_house()
    house.server.limits = AnswerLimits(lambda row: 5, one_prompt=True)
    hung, most = running(house, "actor-0"), 8 * MOST_REDRAWN * 5  # a group's
    clock.passes(house, 2 * TIMEOUT, "actor-0", "actor-1", progress=dict.fromkeys(hung, most))
    assert running(house, "actor-0") == hung
    clock.passes(house, 1.2 * TIMEOUT, "actor-0", "actor-1", progress=dict.fromkeys(hung, most + 1))
    assert {"ids": hung, "hand_back": False} in sent(house, "actor-0", "cancel")


@pytest.mark.parametrize(("tokens", "late"), [(8, False), (64 * 5 + 1, True)])
def test_held_out_progress_beyond_the_longest_answer_holds_no_lease(clock: Clock, tokens: int, late: bool) -> None:
    house = stuck_house(evaluate=2, actors=1)
    house.server.heldout_limits = AnswerLimits(lambda place: 5)
    clock.passes(house, 1.2 * TIMEOUT, "actor-0", heldout=dict.fromkeys(house.leases(split="heldout"), tokens))
    assert (house.server.gauges.lease_timeouts > 0) == late


def test_leases_without_progress_go_to_another_actor_and_the_batch_is_served(clock: Clock) -> None:
    house = stuck_house()
    hung = running(house, "actor-0")
    assert len(hung) == B // 2
    clock.passes(house, TIMEOUT * 0.9, "actor-1")
    assert running(house, "actor-0") == hung, "not before the deadline"
    clock.passes(house, TIMEOUT * 0.2, "actor-1")
    assert running(house, "actor-0") == [] and set(hung) <= set(running(house, "actor-1"))
    assert {"ids": hung, "hand_back": False} in sent(house, "actor-0", "cancel")
    for group_id in running(house, "actor-1"):
        house.push("actor-1", group_id, 0)
    house.want(0)
    assert house.batches() == [[0, 1, 2, 3]]
    assert house.server.gauges.levels(house.server.peers, house.store, 0.0)["rollout/lease_timeouts"] == len(hung)
    house.push("actor-0", hung[0], 0)
    assert house.server.groups.duplicates == 1, "the late push of the old actor"


@pytest.mark.parametrize(("since", "quits"), [(0.4, False), (0.7, True)])
def test_an_actor_must_quit_unless_another_lease_of_it_has_moved_lately(clock: Clock, since, quits) -> None:
    house = stuck_house(actors=1)
    actor = house.server.fleet.by_name["actor-0"]
    lively = running(house, "actor-0")[0]
    actor.timed_out = MOST_IN_A_ROW
    clock.ahead += 2.0  # it looks once a second
    now = time.monotonic()
    for each, entry in house.store.entries.held_by("actor-0").items():
        entry.moved_at = now - (since if each == lively else 2) * TIMEOUT
    house.server.step(0)
    assert bool(sent(house, "actor-0", "quit")) is quits


@pytest.mark.parametrize("state", ["starting", "restarting"])
def test_clocks_stand_still_while_the_engine_does_not_serve(clock: Clock, state: str) -> None:
    house = stuck_house()
    for _ in range(4):
        clock.passes(house, TIMEOUT * 0.6, stats={"engine": state})
    assert house.server.gauges.lease_timeouts == 0
    assert house.server.status.report()["actors"]["actor-0"]["engine"] == state


def test_a_buffer_that_stood_still_forgives(clock: Clock) -> None:
    house = stuck_house(timeout=20.0)
    clock.ahead += TIMEOUT * 2
    house.server.step(0)
    assert house.server.gauges.lease_timeouts == 0 and len(house.server.fleet) == 2


def test_a_benched_actor_is_tried_again_after_a_while_and_must_quit_if_it_hangs_on(clock: Clock) -> None:
    house = stuck_house()
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    assert running(house, "actor-0") == [] and sent(house, "actor-0", "quit") == []
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    train_batch_0(house)
    house.apply(1)
    assert len(running(house, "actor-0")) == B // 2, "it gets its share again"
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    (word,) = sent(house, "actor-0", "quit")
    assert "leases in a row" in word["reason"] and B >= MOST_IN_A_ROW
    for _ in range(3):
        clock.passes(house, TIMEOUT * 1.1, "actor-1")
    assert running(house, "actor-0") == [] and len(sent(house, "actor-0", "quit")) == 1, "it is benched for good"
    house.say("actor-0:new", "hello", {"role": "actor", "name": "actor-0", "pid": 2, "slots": 256})
    house.say("actor-0:new", "applied", {"version": 1, "digest": "d1"})
    house.say("actor-1", "failed", {"id": running(house, "actor-1")[-1], "reason": "rejected", "detail": ""})
    assert house.leases("actor-0:new"), "started again, it works again"


def test_a_group_that_hangs_everywhere_is_dropped_and_its_slot_goes_to_another_prompt(clock: Clock) -> None:
    house = stuck_house()
    bad = 2
    for _ in range(20):
        clock.ahead += TIMEOUT * 0.3
        for name in house.names:
            moved = dict.fromkeys(set(running(house, name)) - {bad}, 1)
            house.say(name, "heartbeat", SIGN_OF_LIFE | {"progress": moved})
    ledger = house.store.ledger()
    assert ledger["dropped"] == {"timed out": 1} and ledger["admitted"] == 5 and ledger["active"] == 4
    assert house.server.gauges.lease_timeouts == MOST_PER_GROUP and house.store.entries[4].slot == bad
    assert set(house.leases("actor-0")) & set(house.leases("actor-1")) == {bad}, "both have tried it"


def test_when_everything_hangs_the_run_ends_and_says_so(clock: Clock) -> None:
    house = stuck_house(actors=1)
    with pytest.raises(RolloutsFail, match="timed out"):
        for _ in range(100):
            clock.passes(house, TIMEOUT)


def test_held_out_prompts_go_to_another_actor_too_and_at_last_count_as_failed(clock: Clock) -> None:
    house = House(asynchronous(), evaluate=4, lease_timeout=TIMEOUT).start()
    for lease in house.leases("actor-1", "heldout"):
        house.say("actor-1", "evaluated", *answer(lease, 1.0))
    hung = house.leases("actor-0", "heldout")
    clock.passes(house, TIMEOUT * 0.6, "actor-1", heldout=dict.fromkeys(hung, 3))
    clock.passes(house, TIMEOUT * 0.6, "actor-1")
    assert len(house.leases(split="heldout")) == 4, "they moved"
    clock.passes(house, TIMEOUT * 0.6, "actor-1")
    assert set(hung) <= set(house.leases("actor-1", "heldout"))
    clock.passes(house, TIMEOUT * 1.1)
    clock.passes(house, TIMEOUT * 1.1)
    (result,) = house.server.gauges.evaluations
    assert result["reward"] == 0.5 and house.server.evaluation.round is None


@pytest.mark.parametrize("takes_weights", [True, False])
def test_a_benched_actor_that_takes_no_new_weights_must_quit(clock: Clock, takes_weights: bool) -> None:
    house = stuck_house()
    clock.passes(house, TIMEOUT * 1.1, "actor-1")
    train_batch_0(house)
    house.apply(1, "actor-1", *["actor-0"] * takes_weights)
    clock.passes(house, TIMEOUT * 0.9, "actor-1")
    assert sent(house, "actor-0", "quit") == []
    clock.passes(house, TIMEOUT * 0.3, "actor-1")
    assert len(sent(house, "actor-0", "quit")) == (not takes_weights)
