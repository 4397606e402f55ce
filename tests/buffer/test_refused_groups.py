"""Groups that nobody could train on: each is refused, and other actors roll it out again."""

from typing import Any

import numpy as np
import pytest

from areal_like.types import Group, Sample
from areal_like.wire.groups import Head, encode_group
from buffer.checks import RolloutsFail
from buffer.store import Stage
from tests.buffer.house import B, House, asynchronous, group, table


@pytest.mark.parametrize(("samples", "version"), [(7, 0), (8, 1)])
def test_a_push_that_does_not_fit_its_lease_ends_the_lease(samples: int, version: int) -> None:
    house = House(asynchronous(max_staleness=0))
    house.start()
    bad = house.leases("actor-0")[0]
    head, payload = group(bad, version, samples)
    house.say("actor-0", "push", table(head), payload)
    assert house.leases("actor-1").count(bad) == 0, "it has its share"
    house.push("actor-1", house.leases("actor-1")[0], 0)
    assert house.leases("actor-1").count(bad) == 1, "another actor rolls it out again"
    assert house.router.refused == 1 and house.server.gauges.refused == {"form": 1}
    assert sum(house.server.store.ledger()["dropped"].values()) == 0


def bad_group(group_id: int, **changes: Any) -> tuple[Head, Any]:
    """8 samples of 3 tokens and 2 logprobs, with two turns each; one sample is changed."""
    fields = {"tokens": np.ones(3, np.int32), "logprobs": np.full(2, -0.5, np.float32), "reward": 1.0}
    fields |= {"prompt_length": 1, "loss_mask": np.ones(2, bool), "runs": [(0, 2)], "finish": "stop"}
    fields |= {"turn_rewards": [(0, 0.5), (1, 0.5)]}
    return encode_group(Group(group_id, [Sample(**fields)] * 7 + [Sample(**(fields | changes))], {0: "d0"}))


BAD = {
    "a token beyond the vocabulary": ("tokens", {"tokens": np.array([1, 13, 1], np.int32)}),
    "a negative token": ("tokens", {"tokens": np.array([1, 1, -1], np.int32)}),
    "a positive logprob": ("logprobs", {"logprobs": np.array([-1, 50], np.float32)}),
    "an infinite logprob": ("logprobs", {"logprobs": np.array([-np.inf, -1], np.float32)}),
    "a logprob that is no number": ("logprobs", {"logprobs": np.array([-1, np.nan], np.float32)}),
    "a mask of 7": ("loss mask", {"loss_mask": np.full(2, 7, np.uint8).view(bool)}),
    "a turn's reward of 1e300": ("turn rewards", {"turn_rewards": [(0, 1e300), (1, 0.0)]}),
    "a turn beyond the response": ("turn rewards", {"turn_rewards": [(0, 0.0), (2, 0.0)]}),
}


@pytest.mark.parametrize("what", BAD)
def test_a_group_that_nobody_could_train_on_is_refused_and_rolled_out_by_another(what: str) -> None:
    column, changes = BAD[what]
    house = House(asynchronous(max_staleness=0))
    house.start()
    house.say("learner", "model", {"vocab_size": 13})
    bad = house.leases("actor-0")[0]
    good_head, good = bad_group(house.leases("actor-1")[0])
    house.say("actor-1", "push", table(good_head), bytes(good))
    assert house.server.store.count(Stage.WAITING) == 1, "the group of which one sample is changed is in order"
    head, payload = bad_group(bad, **changes)
    house.say("actor-0", "push", table(head), bytes(payload))
    told = [body["reason"] for who, kind, body in house.router.sent if who == "actor-0" and kind == "refused"]
    assert len(told) == 1 and f"group {bad}" in told[0]
    assert ("actor-0", "pushed", {"ids": [bad]}) in house.router.sent, "or it would come again"
    assert house.server.gauges.refused == {column: 1}
    assert house.leases("actor-1").count(bad) == 1 and house.leases("actor-0").count(bad) == 1
    assert house.server.store.entries[bad].stage is Stage.RUNNING


def test_an_actor_whose_groups_are_refused_in_a_row_gets_no_more_and_without_any_other_the_run_ends() -> None:
    house = House(asynchronous(max_staleness=8))
    house.start()
    house.say("learner", "model", {"vocab_size": 13})
    wrong = np.array([1, 13, 1], np.int32)
    for group_id in house.leases("actor-0")[:3]:
        head, payload = bad_group(group_id, tokens=wrong)
        house.say("actor-0", "push", table(head), bytes(payload))
    before = len(house.leases("actor-0"))
    house.push("actor-1", house.leases("actor-1")[0], 0)
    house.say("actor-0", "credit", {"ended": 64})
    assert len(house.leases("actor-0")) == before, "it has shown that what it makes is of no use"
    assert "actor-0 gets no leases: 3 groups of it in a row were refused" in house.server.status()["waits"]
    mine = house.leases("actor-1")[1:]
    for group_id in mine[:2]:
        head, payload = bad_group(group_id, tokens=wrong)
        house.say("actor-1", "push", table(head), bytes(payload))
    head, payload = bad_group(mine[2], tokens=wrong)
    with pytest.raises(RolloutsFail, match=r"3 groups in a row of every actor were refused; .* token 13 "):
        house.say("actor-1", "push", table(head), bytes(payload))


def test_a_bad_group_takes_nothing_from_those_that_are_pushed_with_it() -> None:
    """Groups that end in the same turn of an actor's loop share a message."""
    house = House(asynchronous(max_staleness=8), actors=1)
    house.start()
    house.say("learner", "model", {"vocab_size": 13})
    ids = house.leases()[:4]
    wrong = {ids[1]: {"tokens": np.array([1, 13, 1], np.int32)}}
    made = [bad_group(each, **wrong.get(each, {})) for each in ids]
    house.say("actor-0", "push", table(*(head for head, _ in made)), *(bytes(payload) for _, payload in made))
    entries = house.server.store.entries
    assert [entries[each].stage is Stage.WAITING for each in ids] == [True, False, True, True]
    assert house.server.gauges.refused == {"tokens": 1} and house.router.refused == 1
    acknowledged = [each for _, kind, body in house.router.sent if kind == "pushed" for each in body["ids"]]
    assert sorted(acknowledged) == ids


def test_a_group_that_several_actors_fail_at_is_dropped() -> None:
    house = House(asynchronous(max_staleness=0), actors=3)
    house.start()
    house.say("learner", "model", {"vocab_size": 13})
    bad = house.leases("actor-0")[0]
    for _ in range(3):
        owner = house.server.store.entries[bad].actor
        head, payload = bad_group(bad, tokens=np.array([1, 13, 1], np.int32))
        house.say(owner, "push", table(head), bytes(payload))
    assert house.server.store.ledger()["dropped"] == {"malformed": 1}
    assert len(set(house.leases())) == B + 1, "its slot goes to the next prompt"
