"""A batch that the learner can't train is set aside: other groups take its places. (Resumes: `test_histories`.)"""

import pytest

from buffer.entries import LEASED, Stage
from buffer.policies import fifo, in_order
from tests.buffer.house import B, House, asynchronous


def batches(house: House) -> list[tuple[int, int, list[int]]]:
    """(index, number of batches set aside before, groups)."""
    sent = [body for _, kind, body in house.router.sent if kind == "batch"]
    return [(body["index"], body["redo"], [row[0] for row in body["table"]["groups"]]) for body in sent]


def play(policy) -> House:
    """Batch 0 is trained; batch 1 and, ahead of it, batch 2 are served, and batch 1 can't be trained."""
    house = House(asynchronous(max_staleness=2), batch_policy=policy)
    house.start()
    for group_id in range(3 * B):
        house.finish(group_id, 0)
    for index in range(2):
        house.want(index)
    house.say("learner", "trained", {"index": 0})
    house.publish(1)
    house.want(2)
    return house


def set_aside(house: House, index: int = 1, who: str = "learner") -> None:
    house.say(who, "untrainable", {"index": index, "reason": "a token of 1000000"})


@pytest.mark.parametrize("policy", [in_order, fifo])
def test_its_groups_are_dropped_and_others_take_their_places(policy) -> None:
    house = play(policy)
    for who, index in (("actor-0", 1), ("learner", 0), ("learner", 2)):  # only the next batch, only by the learner
        set_aside(house, index, who)
    assert house.router.refused == 3 and not house.store.ledger()["dropped"]
    for _ in range(2):  # repeated after a broken connection
        set_aside(house)
        assert house.router.sent[-1] == ("learner", "set_aside", {"index": 1, "redo": 1})
    replay = house.server.groups
    assert batches(house)[1:] == [(1, 0, [4, 5, 6, 7]), (2, 0, [8, 9, 10, 11])]
    assert replay.store.ledger()["dropped"] == {"untrainable": 4} and not replay.store.entries.of(Stage.SERVED)
    house.apply(1)
    house.want(1)
    for entry in replay.store.entries.of(*LEASED):
        house.push(entry.actor, entry.id, 1)
    house.say("learner", "trained", {"index": 1})
    house.publish(2)
    house.want(2)
    (_, redo, first), (_, _, second) = batches(house)[3:]
    assert redo == 1 and not {4, 5, 6, 7} & {*first, *second}
    if policy is in_order:
        assert sorted(first) == [12, 13, 14, 15] and second == [8, 9, 10, 11]
