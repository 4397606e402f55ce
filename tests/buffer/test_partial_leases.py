"""Groups handed back unfinished: the next lease carries tokens within the bound, and false claims lose nothing."""

import pytest

from areal_like.wire.messages import PartialHead
from buffer.entries import LEASED, PartialGroup, Stage
from buffer.groups import GroupManager
from buffer.policies import fifo
from buffer.recovery import forget_partial
from buffer.staleness import Bound
from tests.buffer.house import B, House, asynchronous, partial_group

Left = tuple[PartialHead, bytes]


def left_of(group_id: int, *versions: int) -> Left:
    """A partial group with three tokens of each sample, made by one version."""
    return partial_group(group_id, *([(version, 3)] for version in versions))


def hand_back(house: House, actor: str, ids: list[int], *left: Left, leaving: bool = False) -> None:
    body = {"ids": ids, "partials": [meta for meta, _ in left], "leaving": leaving}
    house.say(actor, "hand_back", body, *(payload for _, payload in left))


def carried(house: House, actor: str) -> dict[int, list[int]]:
    """Group → samples that an actor's leases carried."""
    sent = [body for who, kind, body in house.router.sent if kind == "lease" and who == actor]
    return {meta["id"]: usable for body in sent for meta, usable in body["partials"]}


def test_an_actor_that_leaves_has_its_groups_gone_on_with_by_the_others() -> None:
    house = House(asynchronous(max_staleness=1)).start()
    first, second, *_ = lost = house.leases("actor-1")
    hand_back(house, "actor-1", lost[:-1], left_of(first, 0, 0), left_of(second, 0), leaving=True)
    assert "actor-1" not in house.server.fleet.by_name
    assert carried(house, "actor-0") == {first: [0, 1], second: [0]}
    assert set(lost) <= set(house.leases("actor-0")), "what it did not name goes to others, too"
    house.push("actor-0", first, 0)
    assert house.store.entries[first].partial is None


def test_a_sample_and_the_lease_that_carries_it_are_as_old_as_its_oldest_token() -> None:
    left = PartialGroup(*partial_group(0, [(0, 1), (1, 2)], [(1, 3)]))
    assert left.usable(0) == {0: 0, 1: 1} and left.usable(1) == {1: 1}
    assert left.ended == 0, "both were cut"
    replay = GroupManager(Bound(2, 1), fifo)
    entry = replay.admit(0, 0, 2, 2, "actor", 0, 0.0)
    replay.hand_back(0, left)
    assert replay.assign(entry, "actor", 2) == {0: 0, 1: 1} and entry.lease_version == 0


def test_an_unfinished_sample_continues_no_other_prompt() -> None:
    replay = GroupManager(Bound(2, 1), fifo)
    entry = replay.admit(0, 0, 2, 2, "actor", 0, 0.0)
    replay.hand_back(0, PartialGroup(*partial_group(0, [(0, 1)])))
    forget_partial(replay)
    assert entry.partial is None and replay.assign(entry, "actor", 2) == {}


def overtaken(house: House) -> int:
    """A straggler of actor-0, begun at version 0; the other groups are done, and version 2 is published."""
    straggler = house.leases("actor-0")[0]
    for batch in range(2):
        for _ in range(B):
            entry = next(e for e in house.store.entries.of(*LEASED) if e.id != straggler)
            house.push(entry.actor, entry.id, batch)
        house.want(batch)
        house.trained(batch)
    house.want(2)
    return straggler


def test_a_straggler_that_got_too_old_is_recalled_and_its_young_samples_are_kept() -> None:
    house = House(asynchronous(max_staleness=1), batch_policy=fifo, staleness_policy="requeue").start()
    straggler = overtaken(house)
    entry = house.store.entries[straggler]
    assert ("actor-0", "cancel", {"ids": [straggler], "hand_back": True}) in house.router.sent
    assert entry.stage is Stage.RECALLED, "it runs until its actor answers"
    train_version = house.server.groups.bound.slot_version(entry.slot)
    meta, payload = left_of(straggler, 0, 2, 1)
    hand_back(house, "actor-0", [straggler], (meta, payload))
    found = carried(house, "actor-0") | carried(house, "actor-1")
    assert found == {straggler: [index for index, made in enumerate((0, 2, 1)) if made >= train_version - 1]}
    assert 0 not in found[straggler] and entry.lease_version >= train_version - 1
    cancels = [body for _, kind, body in house.router.sent if kind == "cancel"]
    assert len(cancels) == 1, "asked once"


@pytest.mark.parametrize("lie", ["digest", "version", "index", "size"])
def test_a_lie_ends_the_lease_and_carries_nothing(lie: str) -> None:
    house = House(asynchronous()).start()
    group_id = house.leases("actor-0")[0]
    head, payload = left_of(group_id, 0, 0)
    if lie == "digest":
        head.digests[0] = "other"
    elif lie == "version":  # that nobody has published
        head.calls[0].runs, head.digests[7] = [(7, 3)], "d7"
    elif lie == "index":
        head.calls[1].sample = 8
    elif lie == "size":
        payload += b"1"
    hand_back(house, "actor-0", [group_id, 9999], (head, payload))
    again = house.leases("actor-0") + house.leases("actor-1")
    assert again.count(group_id) == 2
    assert house.store.entries[group_id].partial is None and house.store.bytes == 0


def test_only_the_owner_hands_a_group_back() -> None:
    house = House(asynchronous()).start()
    group_id = house.leases("actor-0")[0]
    for name in ("actor-1", "a stranger"):
        hand_back(house, name, [group_id], left_of(group_id, 0))
    assert house.store.entries[group_id].actor == "actor-0" and house.store.bytes == 0
