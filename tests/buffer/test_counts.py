"""Reported counts: means, idle shares, lost groups, and the reason for a round's size."""

import numpy as np

from areal_like.types import Group, Sample
from areal_like.wire.groups import Head, encode_group
from buffer.journal import since_snapshot
from buffer.segment_file import MAGIC, path_of
from tests.buffer.house import B, House, asynchronous


def head(group_id: int, *lengths: int) -> Head:
    samples = [
        Sample(np.zeros(1 + n, np.int32), 1, np.zeros(n, np.float32), np.ones(n, bool), [(0, n)], 1.0, "stop")
        for n in lengths
    ]
    return encode_group(Group(group_id, samples, {0: "d0"}))[0]


def test_no_actor_has_leases_after_the_end():
    house = House(asynchronous(max_staleness=0))
    house.start()
    assert any(house.store.held_by(actor.name) for actor in house.server.fleet)
    house.say("learner", "end_run", {"reason": "", "steps": 0})
    assert not house.router.refused
    assert not any(house.store.held_by(actor.name) for actor in house.server.fleet)


def test_it_says_who_waits_for_whom():
    house = House(asynchronous(max_staleness=0), evaluate=1)
    assert house.server.waits() == ["the start waits for the learner and 2 actors"]
    house.hello("learner", *house.names)
    assert house.server.waits() == ["the start waits for the learner and 2 actors"], "it has published nothing"
    house.publish(0)
    house.apply(0, "actor-0")
    assert house.server.waits() == ["the start waits for 1 actor"]
    house.apply(0, "actor-1")
    for group_id in house.leases("actor-0"):
        house.finish(group_id, 0)
    (idle,) = [line for line in house.server.waits() if line.startswith("actor-0")]
    assert idle == "actor-0 waits for the learner (staleness bound)"
    house.say("learner", "want", {"index": 0, "version": 0})
    left = len(house.leases("actor-1"))
    assert f"learner waits for batch 0: {B - left} groups are ready, {left} run on actor-1" in house.server.waits()
    house.publish(1)
    assert "actor-0 waits for weights" in house.server.waits()
    house.say("learner", "end_run", {"reason": "", "steps": 0})
    assert house.server.waits() == ["the end waits for the last evaluation"]


def test_a_segment_whose_first_bytes_are_torn_begins_again(tmp_path):
    folder = tmp_path / "journal"
    folder.mkdir()
    segment = path_of(folder, 1)
    segment.write_bytes(MAGIC[:3])
    assert list(since_snapshot(folder, repair=True)) == []
    assert segment.read_bytes() == MAGIC
