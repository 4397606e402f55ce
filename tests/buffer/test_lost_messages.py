"""Messages lost with a broken connection are sent again: nothing is counted, served or trained twice."""

from areal_like.wire.frames import SAY_HELLO
from buffer.schedulers import SyncScheduler
from buffer.sizing import Fixed
from buffer.store import LEASED, NO_SLOT, Stage
from tests.buffer.house import SIGN_OF_LIFE, B, House, asynchronous


def begun() -> House:
    """A run that has batch 0."""
    house = House(asynchronous())
    house.start()
    for group_id in range(B):
        house.finish(group_id, 0)
    return house


def want(house: House, index: int) -> None:
    house.say("learner", "want", {"index": index, "version": index})


def refusals(house: House) -> list[str]:
    return [body["reason"] for _, kind, body in house.router.sent if kind == "refused"]


def test_a_batch_that_is_asked_for_again_is_the_same_and_its_evaluations_come_again() -> None:
    house = begun()
    for _ in range(3):
        want(house, 0)
    bodies = [body for _, kind, body in house.router.sent if kind == "batch"]
    assert len(bodies) == 3 and bodies[0] == bodies[1] == bodies[2]
    assert len(house.server.store.of(Stage.SERVED)) == B


def test_a_batch_that_was_trained_is_not_served_again() -> None:
    house = begun()
    want(house, 0)
    house.say("learner", "trained", {"index": 0})
    want(house, 0)
    assert len(house.batches()) == 1 and "trained already" in refusals(house)[-1]
    assert not house.server.dispatcher.shares.served, "its payloads are let go"


def test_trained_counts_once_however_often_it_is_said_and_tells_of_those_before() -> None:
    house = begun()
    want(house, 0)
    house.publish(1)
    house.apply(1)
    for group_id in range(B, 2 * B):
        house.finish(group_id, 0)
    want(house, 1)
    assert len(house.batches()) == 2
    for _ in range(2):  # the word of batch 0 was lost
        house.say("learner", "trained", {"index": 1})
    assert house.server.store.ledger()["trained"] == 2 * B and house.server.learner.steps == 2
    house.say("learner", "trained", {"index": 7})
    assert "was not served" in refusals(house)[-1] and house.server.learner.steps == 2


def test_the_end_counts_what_was_trained_and_reports_as_often_as_asked() -> None:
    house = begun()
    want(house, 0)
    for _ in range(2):
        house.say("learner", "end_run", {"reason": "enough", "steps": 1})
    reports = [body["report"] for _, kind, body in house.router.sent if kind == "report"]
    assert len(reports) == 2
    assert reports[-1]["ledger"]["trained"] == B and set(reports[-1]["ledger"]["dropped"]) == {"end of run"}


def test_a_learner_that_says_all_again_changes_nothing() -> None:
    house = begun()
    want(house, 0)
    before = house.server.store.ledger()
    house.hello("learner")
    house.publish(0)
    want(house, 0)
    assert house.server.store.ledger() == before and refusals(house) == []
    assert house.batches()[0] == house.batches()[-1]


def test_an_actor_that_the_buffer_does_not_know_is_told_to_say_hello() -> None:
    """A buffer that has started again has no record of its actors."""
    house = House(asynchronous())
    house.hello("learner", "actor-0")
    for name in house.names:
        house.say(name, "heartbeat", SIGN_OF_LIFE)
    ((told, reason),) = [(who, body["reason"]) for who, kind, body in house.router.sent if kind == "refused"]
    assert told == "actor-1" and SAY_HELLO in reason


def test_an_actor_that_says_hello_again_gives_its_groups_to_others() -> None:
    house = House(asynchronous())
    house.start()
    running = set(house.leases("actor-0"))
    assert running
    held = len(house.router.sent)
    house.hello("actor-0")
    house.apply(0, "actor-0")
    leased = [row[0] for _, kind, body in house.router.sent[held:] if kind == "lease" for row in body["leases"]]
    assert running == set(leased), "each has a new lease"
    assert house.server.store.ledger()["active"] == house.server.store.admitted


def test_a_late_push_of_a_deferred_group_takes_nothing_from_the_lease_of_now() -> None:
    """Its first actor was only disconnected and pushes its finished group; then the actor that runs the group now
    ends."""
    house = House(SyncScheduler(Fixed(group_size=8), oversample_prompts=1.5), actors=3, last_batch=2)
    house.start()
    replay = house.server.groups
    group_id = min(replay.store.redundant)
    entry, first = replay.store.entries[group_id], replay.store.entries[group_id].actor
    house.say("starter", "lost", {"name": first, "pid": 0, "how": "was cut off", "for_good": False})
    want(house, 0)
    for each in [each for each in replay.store.of(*LEASED) if each.slot != NO_SLOT]:
        house.push(each.actor, each.id, 0)
    for each in replay.store.of(*LEASED):
        house.say(each.actor, "hand_back", {"ids": [each.id], "partials": [], "leaving": False})
    house.say("learner", "trained", {"index": 0})
    house.publish(1)
    house.hello(first)
    house.apply(1)
    assert entry.stage is Stage.RUNNING and entry.slot != NO_SLOT, "taken up in the next round"
    house.push(first, group_id, 0)
    assert entry.stage is Stage.RUNNING, "tokens of before its new slot"
    owner = entry.actor
    house.say("starter", "lost", {"name": owner, "pid": 0, "how": "died", "for_good": False})
    assert entry.stage is Stage.RUNNING and entry.actor != owner, "another actor has it"
