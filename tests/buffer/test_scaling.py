"""How much the buffer looks at per message as more groups wait, run or are lost: counted, not timed."""

from collections.abc import Iterator
from functools import partial

import pytest

from areal_like.wire.groups import make_head
from buffer import store
from buffer.actor import Actor
from buffer.policies import in_order
from buffer.replay import Replay
from buffer.staleness import Bound
from buffer.store import Entry, Stage
from tests.buffer.house import House, asynchronous

FEW, MANY = 100, 1600
MOST_GROWTH = 3.0
"""Of what is looked at for one group, from FEW to MANY groups: a heap's height grows 1.6 times, a search 16 times."""
LOOKS = [0]


class Counting(Entry):
    """Counts how often a group's fields are read."""

    __slots__ = ()

    def __getattribute__(self, name: str):
        LOOKS[0] += 1
        return super().__getattribute__(name)


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "Entry", Counting)
    yield


def looks_per_group(scenario) -> tuple[float, float]:
    found = []
    for n in (FEW, MANY):
        steps = scenario(n)
        next(steps)  # all is there
        LOOKS[0] = 0
        count = sum(1 for _ in steps)
        found.append(LOOKS[0] / count)
    return found[0], found[1]


def filled(n: int, want: int, policy=in_order) -> Replay:
    """n groups, all RUNNING on "a"; batches of `want`."""
    replay = Replay(Bound(float("inf"), want), partial(policy))
    for group_id in range(n):
        replay.admit(group_id, group_id, 1, 1, "a", 0, 0.0)
    return replay


def push(replay: Replay, group_id: int) -> None:
    head = make_head(group_id, [(1, 5, 0, 1, 1.0)], [(0, 5)], {0: "digest"})
    assert replay.push(head, bytes(head.size), 0, 0.0)


def test_lost_groups_are_leased_again_without_a_search() -> None:
    def scenario(n: int) -> Iterator[None]:
        replay = filled(n, 4)
        for group_id in sorted(range(n), key=lambda each: each * 7919 % n):
            replay.requeue(group_id)
        yield
        for slot in range(n):
            entry = replay.queued_for(0)
            assert entry is not None and entry.slot == slot
            replay.assign(entry, "b", 0)
            yield

    few, many = looks_per_group(scenario)
    assert many <= MOST_GROWTH * few, f"{few:.0f} looks per lease of {FEW} groups, {many:.0f} of {MANY}"


def test_pushes_behind_a_straggler_are_not_sorted_again_and_again() -> None:
    def scenario(n: int) -> Iterator[None]:
        replay = filled(2 * n, 4)
        for group_id in range(1, n):
            push(replay, group_id)
        yield
        for group_id in range(n, n + 50):
            push(replay, group_id)
            assert replay.serve(0) == []
            yield

    few, many = looks_per_group(scenario)
    assert many <= MOST_GROWTH * few, f"{few:.0f} looks per push with {FEW} waiting, {many:.0f} with {MANY}"


def test_the_place_that_a_redundant_group_can_win_is_known() -> None:
    def scenario(n: int) -> Iterator[None]:
        replay = filled(n, n)
        for late in range(n, n + 50):
            replay.admit(late, late, 1, 1, "b", 0, 0.0, redundant=True)
        yield
        for number, late in enumerate(range(n, n + 50)):
            push(replay, late)
            assert replay.store.entries[late].slot == number
            yield

    few, many = looks_per_group(scenario)
    assert many <= MOST_GROWTH * few, f"{few:.0f} looks per push with {FEW} running, {many:.0f} with {MANY}"


def test_a_policy_is_not_asked_again_while_nothing_has_changed() -> None:
    asked = []

    def never(waiting, missing, want) -> tuple[int, ...]:
        asked.append(len(waiting))
        return ()

    replay = filled(20, 4, never)
    for group_id in range(8):
        push(replay, group_id)
        for _ in range(5):
            assert replay.serve(0) == []
    assert asked == [4, 5, 6, 7, 8], "once for each push that makes a batch possible"
    replay.requeue(19)
    replay.drop(18, "failed")
    replay.serve(0)
    assert asked == [4, 5, 6, 7, 8, 8], "what is missing has changed"


@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_the_loop_in_which_nothing_happens_look_at_no_group(stream: bool) -> None:
    house = House(asynchronous(max_staleness=2), staleness_policy="wait")
    house.start()
    if stream:
        house.say("learner", "stream", {})
    house.say("learner", "want", {"index": 0, "version": 0})
    for group_id in range(1, 9):
        house.push(house.state.store.entries[group_id].actor, group_id, 0)
    assert house.state.store.count(Stage.WAITING) == 8 and house.batches() == []
    house.controller.step(0)
    LOOKS[0] = 0
    for _ in range(10):
        house.controller.step(0)
    assert LOOKS[0] <= 10 * 4, "a few of the lowest, not all"


def test_outdated_items_do_not_pile_up() -> None:
    replay = filled(4, 4)
    for _ in range(2000):
        replay.requeue(3)
        replay.assign(replay.store.entries[3], "a", 0)
    heaps = [each for each in vars(replay.store).values() if isinstance(each, store.BySlot)]
    assert len(heaps) == 3 and all(len(heap._heap) < 200 for heap in heaps)


@pytest.mark.parametrize(("missing", "asked"), [(0, 0), (1, 0), (2, 1)])
def test_a_policy_that_waits_for_gaps_is_not_asked_while_the_batch_has_one(missing: int, asked: int) -> None:
    replay, calls = filled(4, 2, in_order), []
    replay.policy = lambda *args: calls.append(args) or in_order(*args)
    for group_id in {0, 1, 2, 3} - {missing}:
        push(replay, group_id)
    assert len(replay.serve(0)) == 2 * asked and len(calls) == asked


@pytest.mark.parametrize("held_up", ["by the bound", "by memory", "by an odd one"])
def test_turns_do_not_ask_every_actor_that_has_room(held_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    takes = Actor.takes
    monkeypatch.setattr(Actor, "takes", lambda self, sequences: asked.append(self.name) or takes(self, sequences))
    house = House(asynchronous(max_staleness=0 if held_up != "by memory" else 99), actors=200)
    if held_up == "by memory":
        house.state.max_bytes = -1
    if held_up == "by an odd one":
        house.state.fleet.odd.add("actor-7")
    house.start()
    leased = len(house.leases())
    asked.clear()
    for name in house.names[:20]:
        house.say(name, "credit", {"ended": 0})
        house.say(name, "heartbeat", {"stats": {}, "progress": [], "heldout": {}})
    assert len(house.leases()) == leased and len(asked) <= 80, "two questions for each message at most"


def test_leases_go_to_whoever_has_the_fewest_groups_of_all_that_hold_any_version() -> None:
    house = House(asynchronous(max_staleness=2), actors=6)
    house.start()
    assert [len(actor.running) for actor in house.state.fleet] == [2] * 6
    house.publish(1)
    house.apply(1, "actor-1", "actor-4")
    assert [len(actor.running) for actor in house.state.fleet] == [2, 3, 2, 2, 3, 2], "newer weights may start more"
    for group_id in house.leases("actor-3"):
        house.push("actor-3", group_id, 0)
    house.state.replay.drop(13, "by the test")
    house.controller.step(0)
    assert [len(actor.running) for actor in house.state.fleet][3] == 0, "it holds weights that start no more"
    house.apply(1, "actor-3")
    assert [len(actor.running) for actor in house.state.fleet][3] == 3, "two slots were left, and that of group 13"
