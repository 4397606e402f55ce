"""Actors that leave a round early: the rule, and what the buffer makes of it, through the real controller."""

import io
import os
import random
from functools import partial

import pytest
from rich.console import Console

from areal_like.partials import encode_partial
from areal_like.types import Completion, SoFar
from buffer.partials import PartialGroup
from buffer.policies import in_order
from buffer.replay import Replay
from buffer.schedulers import Load, Parking, SyncScheduler
from buffer.sizing import Fixed
from buffer.staleness import Bound
from buffer.status import status
from buffer.store import LEASED, NO_SLOT, Stage
from scripts.status import render
from tests.buffer.house import B, House
from tests.buffer.paper import Paper
from tests.buffer.rounds import SIZINGS, Run, head_of

HISTORIES = int(os.environ.get("HISTORIES", "1200")) // 20
FOUR = [Load("a", 10, 3), Load("b", 10, 1), Load("c", 10, 4), Load("d", 10, 2)]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("sizing", SIZINGS)
def test_every_prompt_is_trained_once_though_actors_are_parked(sizing: str, staleness: int) -> None:
    parked = carried = 0
    for number in range(HISTORIES // 4):
        dice = random.Random(number)
        run = Run(dice, sizing, batches=8, staleness=staleness, park=dice.choice([0.5, 0.9]))
        for _ in range(dice.randint(0, 160)):
            run.step()
        run.go_to_the_end()
        ledger = run.house.state.store.ledger()
        assert not set(ledger["dropped"]) - {"rejected"}, ledger
        assert ledger["active"] == 0, "the end of the data has flushed the queue"
        left = sum(ledger["filtered"].values()) + ledger["dropped"].get("rejected", 0)
        assert ledger["admitted"] == ledger["trained"] + left
        assert ledger["trained"] == 8 * B or sizing != "fixed"
        parked, carried = parked + run.parked, carried + run.carried
    assert parked > HISTORIES // 2 and carried > HISTORIES // 12, "it did happen, and often"


def test_half_of_the_actors_are_parked_if_the_others_have_room() -> None:
    assert Parking(0.5).choose(0.2, 0, FOUR) == ["b", "d"], "those with the least to move"
    assert Parking(0.5).choose(0.5, 10, FOUR) == ["b", "d"]
    assert Parking(0.5).choose(0.5, 11, FOUR) == [], "21 sequences, 20 slots"
    assert Parking(0.5).choose(0.3, 0, FOUR[:3]) == ["b"], "a half, rounded down"
    assert Parking(0.9).choose(0.3, 0, FOUR) == ["b", "d", "a"]
    assert Parking(0.9).choose(0.3, 0, FOUR[:1]) == [], "the last one works"
    assert Parking(0.0).choose(0.3, 0, FOUR) == []
    for share in (-0.1, 1.0, 2.0):
        with pytest.raises(ValueError, match=r"scheduler\.park"):
            Parking(share)


def test_it_is_tried_once_per_5_percent_between_20_and_50_and_done_once_per_round() -> None:
    full = [Load("a", 4, 4), Load("b", 4, 4)]
    room = [Load("a", 8, 4), Load("b", 8, 4)]
    parking = Parking(0.5)
    assert parking.choose(0.19, 0, room) == parking.choose(0.51, 0, room) == []
    assert parking.choose(0.26, 0, full) == []
    assert parking.choose(0.29, 0, room) == [], "of these 5 % there was a try"
    assert parking.choose(0.30, 0, room) == ["a"]
    assert parking.choose(0.40, 0, room) == [], "once in a round"
    parking.begin()
    assert parking.choose(0.40, 0, room) == ["a"]


def started(oversample: float = 1.0, slots: int = 256, evaluate: int = 0, **rules) -> House:
    """Two actors in the middle of their first round of 4 groups of 8."""
    house = House(
        SyncScheduler(Fixed(group_size=8), oversample_prompts=oversample, park=0.5), evaluate=evaluate, **rules
    )
    house.hello("learner", *house.names, slots=slots)
    house.publish(0)
    house.apply(0)
    house.say("learner", "stream", {})
    house.say("learner", "want", {"index": 0, "version": 0})
    return house


def parked(house: House) -> list[str]:
    return [actor.name for actor in house.state.fleet if actor.parked]


def recalled(house: House) -> dict[str, set[int]]:
    cancels = [(who, body["ids"]) for who, kind, body in house.router.sent if kind == "cancel" and body["give_back"]]
    return {name: {each for who, ids in cancels for each in ids if who == name} for name in house.names}


def hand_back(house: House, name: str, version: int = 0) -> None:
    """As an actor does that was asked to: one sample of each group is cut, another has ended."""
    call = ([1, 2, 3], [0.0] * 3, [(version, 3)])
    for group_id in sorted(recalled(house)[name] & house.state.fleet.by_name[name].running):
        so_far = {0: SoFar({(1, 0): Completion(*call, "abort")}), 1: SoFar({(1, 0): Completion(*call, "stop")})}
        meta, payload = encode_partial(group_id, so_far, {version: f"d{version}"})
        house.say(name, "give_back", {"ids": [group_id], "partials": [meta], "leaving": False}, payload)


def half_done(house: House) -> str:
    """Nine sequences of one actor have ended, of 32: it is the one with less to do. Returns its name."""
    house.say("actor-0", "credit", {"ended": 9})
    assert parked(house) == ["actor-0"]
    return "actor-0"


def test_what_a_parked_actor_ran_goes_on_on_the_others_at_once() -> None:
    house = started()
    mine = set(house.leases("actor-0"))
    assert not parked(house) and not any(recalled(house).values())
    half_done(house)
    assert recalled(house) == {"actor-0": mine, "actor-1": set()}
    hand_back(house, "actor-0")
    assert mine <= set(house.leases("actor-1"))
    leases = [body for who, kind, body in house.router.sent if kind == "lease" and who == "actor-1"]
    assert {meta["id"]: usable for body in leases for meta, usable in body["partials"]} == {i: [0, 1] for i in mine}
    for group_id in range(4):
        house.push("actor-1", group_id, 0)
    assert sorted(house.batches()[0]) == [0, 1, 2, 3]
    info = next(body["info"] for _, kind, body in house.router.sent if kind == "batch")
    told = {key: info[f"rounds/{key}"] for key in ("parked", "parked_at", "moved")}
    assert told == {"parked": 1, "parked_at": 9 / 32, "moved": 7}


def test_a_parked_actor_gets_held_out_prompts_and_the_next_round() -> None:
    house = started()
    half_done(house)
    hand_back(house, "actor-0")
    for group_id in range(4):
        house.push("actor-1", group_id, 0)
    assert parked(house) == ["actor-0"], "nothing is to be rolled out while the learner trains"
    assert status(house.state)["actors"]["actor-0"]["parked"]
    assert "actor-0 is parked until the next round" in status(house.state)["waits"]
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(render({"report": status(house.state), "step": {}}, 10))
    shown = console.export_text()
    assert "actor-0 (parked)" in shown and "actor-1 (parked)" not in shown
    house.say("learner", "trained", {"index": 0})
    house.publish(1)
    before = set(house.leases("actor-0"))
    house.apply(1)
    assert not parked(house) and set(house.leases("actor-0")) - before
    fleet = house.state.fleet.by_name
    for name in house.names:
        house.say(name, "credit", {"ended": fleet[name].leased - 12})
    assert len(parked(house)) == 1, "each round parks anew"


def test_held_out_prompts_go_to_parked_actors_too() -> None:
    house = started(evaluate=4)
    half_done(house)
    assert len(house.leases("actor-0", split="heldout")) == 2
    house.state.evaluation.start(0)
    house.controller.step(0)
    assert len(house.leases("actor-0", split="heldout")) == 4


@pytest.mark.parametrize("handed_back", [True, False])
def test_who_is_parked_takes_over_at_once_if_another_is_lost(handed_back: bool) -> None:
    house = started()
    half_done(house)
    if handed_back:
        hand_back(house, "actor-0")
    house.say("supervisor", "lost", {"name": "actor-1", "pid": 0, "how": "was killed", "for_good": False})
    assert not parked(house)
    if not handed_back:
        hand_back(house, "actor-0")
    running = house.state.store.of(*LEASED)
    assert len(running) == 4 and {entry.actor for entry in running} == {"actor-0"}


def test_a_parked_actor_that_is_lost_takes_nothing_with_it() -> None:
    house = started()
    half_done(house)
    house.say("supervisor", "lost", {"name": "actor-0", "pid": 0, "how": "was killed", "for_good": False})
    assert {entry.actor for entry in house.state.store.of(*LEASED)} == {"actor-1"}
    house.hello("actor-0")
    house.apply(0, "actor-0")
    assert not parked(house)


def test_nobody_is_parked_while_the_others_have_no_room() -> None:
    house = started(slots=16)
    house.say("actor-0", "credit", {"ended": 9})
    assert not parked(house), "23 sequences, 16 slots"
    house.say("actor-1", "credit", {"ended": 7})
    assert parked(house) == ["actor-0"], "16 are left"
    mine = set(house.leases("actor-0"))
    hand_back(house, "actor-0")
    assert len(mine & set(house.leases("actor-1"))) == 1, "7 slots are free for 8 samples, one of which has ended"


def test_what_is_yet_to_start_needs_room_as_well() -> None:
    house = started(slots=8)
    assert house.state.store.count(*LEASED) == 2
    for ended, group_id in ((8, 0), (0, 1)):
        house.say("actor-0", "credit", {"ended": ended})
        assert not parked(house), group_id


def test_a_spare_group_is_moved_and_not_put_into_the_queue() -> None:
    house = started(oversample=1.5)
    spares = set(house.state.store.spares)
    assert len(spares) == 2
    house.say("actor-0", "credit", {"ended": 12})
    assert parked(house) == ["actor-0"]
    (mine,) = spares & set(house.leases("actor-0"))
    assert house.state.replay.deferred == 0, "the next round would take it for a loser"
    hand_back(house, "actor-0")
    entry = house.state.store.entries[mine]
    assert (entry.slot, entry.stage, entry.actor) == (NO_SLOT, Stage.SPARE, "actor-1")
    assert len(house.leases()) == 6 + 3 and not house.state.store.count(Stage.DEFERRED), "no new prompt in its place"
    house.push("actor-1", mine, 0)
    assert house.state.store.entries[mine].slot == 0, "it wins a place as if it had not been moved"


def test_a_spare_group_that_loses_while_it_is_moved_is_queued() -> None:
    house = started(oversample=1.5)
    house.say("actor-0", "credit", {"ended": 12})
    (mine,) = set(house.state.store.spares) & set(house.leases("actor-0"))
    for group_id in [each for each in range(6) if each != mine][:B]:
        house.push(house.state.store.entries[group_id].actor, group_id, 0)
    assert len(house.batches()) == 1 and house.state.replay.deferred == 2
    hand_back(house, "actor-0")
    assert house.state.store.entries[mine].stage is Stage.DEFERRED
    assert mine not in house.leases("actor-1")


def test_moved_groups_are_not_seen_as_cut_short() -> None:
    house = House(SyncScheduler(SIZINGS["sagc"](), park=0.5))
    house.start()
    house.say("learner", "want", {"index": 0, "version": 0})
    house.say("actor-0", "credit", {"ended": 5})
    assert parked(house) == ["actor-0"]
    house.state.gauges.take_seen()
    hand_back(house, "actor-0")
    assert house.state.gauges.take_seen() == []


def test_places_that_moved_groups_lose_and_win_are_redone_after_a_crash() -> None:
    """Group 0 is moved, loses its place to the spare one, and wins that of group 1."""
    journal, replay = Paper(), Replay(Bound(0, 2), partial(in_order))
    replay.record = journal.append
    for group_id in range(3):
        replay.admit(group_id, group_id, 2, 2, "a", 0, 0.0, spare=group_id == 2)
    call = Completion([1, 2, 3], [0.0] * 3, [(0, 3)], "abort")
    for group_id in (0, 2):
        replay.recall(group_id, move=True)
        meta, payload = encode_partial(group_id, {0: SoFar({(1, 0): call})}, {0: "d0"})
        replay.hand_back(group_id, PartialGroup(meta, payload))
    for group_id in (0, 2):
        entry = replay.queued_for(0)
        assert entry.id == group_id and replay.assign(entry, "b", 0) == {0: 0}, "those with a place come first"
    for group_id in (2, 0):
        assert replay.push(*head_of(group_id, 0, 2), 0, 0.0)
    again = Replay(Bound(0, 2), partial(in_order))
    journal.restore(again, 0)
    for each in (replay, again):
        assert {e.id: (e.slot, e.stage) for e in each.store.entries.values() if e.slot != NO_SLOT} == {
            2: (0, Stage.WAITING),
            0: (1, Stage.WAITING),
        }
    assert again.store.entries[1].stage is Stage.DEFERRED and [e.id for e in again.serve(0)] == [2, 0]
