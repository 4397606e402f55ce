"""The controller against what should not happen: wrong digests, unknown peers, endless failure, silence."""

import pytest

from areal_like.wire.link import BusError
from buffer.checks import RolloutsFail
from buffer.store import LEASED, Stage
from tests.buffer.house import SIGN_OF_LIFE, House, asynchronous, group


def test_weights_with_a_wrong_digest_are_refused() -> None:
    house = House(asynchronous())
    house.hello("learner", "actor-0")
    house.publish(0)
    house.say("actor-0", "applied", {"version": 0, "digest": "other"})
    assert house.server.fleet.by_name["actor-0"].version == -1
    assert any(kind == "refused" and "digest" in body["reason"] for _, kind, body in house.router.sent)


def test_evaluation_runs_beside_training_and_the_report_waits_for_the_last_one() -> None:
    house = House(asynchronous(), evaluate=6)
    house.start()
    mine, others = house.leases("actor-0", "heldout"), house.leases("actor-1", "heldout")
    assert len(mine) == len(others) == 3
    for lease in others:  # what another has the lease of does not count
        house.say("actor-0", "evaluated", {"id": lease, "reward": 9.0, "oldest": 0, "newest": 0, "length": 4})
    house.evaluate(0.5, version=0)
    assert house.server.gauges.evaluations[0]["reward"] == 0.5
    house.publish(1)
    house.say("learner", "end_run", {"reason": "enough", "steps": 0})
    assert not any(kind == "report" for _, kind, _ in house.router.sent)
    house.apply(1)
    house.evaluate(1.0, version=1)
    for _ in range(3):
        house.server.step(0)
    (report,) = (body["report"] for _, kind, body in house.router.sent if kind == "report")
    assert [result["reward"] for result in report["evaluations"]] == [0.5, 1.0]
    assert report["ledger"]["admitted"] == sum(report["ledger"]["dropped"].values())
    assert report["ledger"]["active"] == 0


def test_admission_stops_while_the_buffer_is_full_of_bytes() -> None:
    house = House(asynchronous(max_staleness=float("inf"), max_inflight_groups=2))
    house.server.dispatcher.max_bytes = 1
    house.start()
    assert len(house.leases()) == 2
    house.finish(0, 0)
    assert len(house.leases()) == 2, "over the limit, nothing new starts"
    house.finish(1, 0)
    house.push("actor-1", 2, 0)
    assert len(house.leases()) == 2


def test_a_full_buffer_still_fills_a_gap_that_the_next_batch_waits_for() -> None:
    house = House(asynchronous(max_staleness=float("inf"), max_inflight_groups=2))
    house.start()
    house.server.dispatcher.max_bytes = 1
    house.finish(1, 0)
    house.say("learner", "want", {"index": 0, "version": 0})
    house.say("actor-0", "failed", {"id": 0, "reason": "rejected", "detail": ""})
    assert house.server.store.entries[3].slot == 0, "the slot that was left is taken first"
    for group_id in (2, 3, 4):
        house.finish(group_id, 0)
    assert house.batches() == [[3, 1, 2, 4]]
    assert sorted(house.leases()) == [0, 1, 2, 3, 4], "nothing beyond the batch that was wanted"


def test_a_group_is_taken_from_who_has_or_had_its_lease_and_from_nobody_else() -> None:
    house = House(asynchronous(max_staleness=1))
    house.start()
    first, second, *_ = house.leases("actor-0")
    before = house.server.store.ledger()
    house.push("stranger", first, 0)
    assert "say hello" in house.router.sent[-1][2]["reason"], "and so one who has only lost its hello says it again"
    house.push("actor-1", first, 0)
    answers = {kind: body for who, kind, body in house.router.sent[-2:] if who == "actor-1"}
    assert f"actor-1 has had no lease of group {first}" in answers["refused"]["reason"]
    assert answers["pushed"] == {"ids": [first]}, "or it would come for ever"
    entry = house.server.store.entries[first]
    assert (entry.stage, entry.actor, house.server.store.ledger()) == (Stage.RUNNING, "actor-0", before)
    assert first in house.server.store.held_by("actor-0"), "its lease goes on"
    house.has_been_silent("actor-0")
    house.say("learner", "heartbeat", SIGN_OF_LIFE)  # a turn: what the silent one had goes to the other
    house.hello("actor-0")
    assert all(house.server.store.entries[each].holders == ("actor-0", "actor-1") for each in (first, second))
    house.push("actor-0", first, 0)
    house.push("actor-1", first, 0)
    house.push("actor-1", second, 0)
    stages = [house.server.store.entries[each] for each in (first, second)]
    assert [entry.stage for entry in stages] == [Stage.WAITING, Stage.WAITING]
    assert [entry.pushed_by for entry in stages] == ["actor-0", "actor-1"]
    assert house.server.groups.duplicates == 1


@pytest.mark.parametrize(
    ("kind", "body"),
    [("failed", {"reason": "failed", "detail": ""}), ("left_out", {"cut": [3], "redrawn": []})],
)
def test_an_actor_says_nothing_about_a_group_that_another_one_rolls_out(kind: str, body: dict) -> None:
    house = House(asynchronous(max_staleness=1))
    house.start()
    group_id, *_ = house.leases("actor-0")
    before = house.server.store.ledger()
    house.say("actor-1", kind, {"id": group_id} | body)
    entry = house.server.store.entries[group_id]
    assert (entry.stage, entry.actor, entry.cut, house.server.store.ledger()) == (Stage.RUNNING, "actor-0", (), before)
    house.say("actor-0", kind, {"id": group_id} | body)
    assert house.server.store.ledger() != before if kind == "failed" else entry.cut == (3,)


def test_leases_follow_free_slots_not_whole_groups() -> None:
    """Two groups of 8 fill 16 slots; when any 8 sequences end, the next group has room."""
    house = House(asynchronous(max_staleness=8), actors=1)
    house.hello("learner")
    house.hello("actor-0", slots=20)
    house.publish(0)
    house.apply(0)
    assert house.leases() == [0, 1]
    house.say("actor-0", "credit", {"ended": 3})
    assert house.leases() == [0, 1]
    house.say("actor-0", "credit", {"ended": 4})
    assert house.leases() == [0, 1, 2]


def test_endless_failure_ends_the_run_with_its_reason() -> None:
    house = House(asynchronous(max_staleness=0))
    house.start()
    with pytest.raises(RolloutsFail, match=r"16 groups in a row.*no chat template"):
        for group_id in range(1000):
            house.say("actor-0", "failed", {"id": group_id, "reason": "failed", "detail": "no chat template"})
            house.say("actor-1", "failed", {"id": group_id, "reason": "failed", "detail": "no chat template"})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("published", {"manifest": {"version": 9, "digest": "x"}}),
        ("published", {"manifest": {}}),
        ("trained", {"index": 0}),
        ("want", {"index": 0, "version": 0}),
        ("end_run", {"reason": "", "steps": 0}),
        ("checkpointed", {"step": 1}),
        ("heartbeat", SIGN_OF_LIFE | {"stats": {"wall_seconds": "y"}}),
        ("heartbeat", SIGN_OF_LIFE | {"progress": {"x": 1}}),
        ("heartbeat", SIGN_OF_LIFE | {"heldout": {1: "x"}}),
        ("evaluated", {"id": 3, "reward": 1.0, "oldest": 0, "newest": 0, "length": 1}),
        ("hello", {"role": "learner", "name": "learner", "pid": 2, "slots": 0}),
    ],
)
def test_messages_that_nobody_should_send_change_nothing(kind: str, body: dict) -> None:
    house = House(asynchronous(max_staleness=0))
    house.start()
    before = house.server.store.ledger(), house.server.weights.version, len(house.leases())
    house.say("actor-0", kind, body)
    assert (house.server.store.ledger(), house.server.weights.version, len(house.leases())) == before
    assert house.server.learner.peer == b"learner" and not house.server.phase.finishing
    house.say("learner", "want", {"index": 0, "version": 0})
    for name in house.names:
        for group_id in house.leases(name):
            house.push(name, group_id, 0)
    assert len(house.batches()) == 1, "the run goes on"


@pytest.mark.parametrize(("kind", "body", "refused"), [("credit", {"ended": 1}, 0), ("heartbeat", SIGN_OF_LIFE, 1)])
def test_an_actor_that_has_left_is_asked_for_hello_by_signs_of_life_only(kind: str, body: dict, refused: int) -> None:
    house = House(asynchronous())
    house.start()
    house.server.remove_actor(house.server.fleet.by_name["actor-0"])
    before = house.server.router.refused
    house.say("actor-0", kind, body)
    assert house.server.router.refused - before == refused


def test_a_start_that_does_not_come_ends_with_the_name_of_who_is_missing() -> None:
    house = House(asynchronous())
    house.server.ready_timeout = 5.0
    house.hello("learner", "actor-0")
    house.publish(0)
    house.apply(0, "actor-0")
    house.server._born -= 6
    with pytest.raises(BusError, match=r"the start waits for 1 actor$"):
        house.server.step(0)


def test_an_actor_that_is_left_out_is_not_waited_for_at_the_start() -> None:
    house = House(asynchronous())
    house.hello("learner", "actor-0")
    house.publish(0)
    house.apply(0, "actor-0")
    assert house.server.phase.started_at is None
    house.say("supervisor", "lost", {"name": "actor-1", "pid": 0, "how": "died", "for_good": True})
    assert house.server.phase.started_at is not None and house.leases("actor-0")


def test_an_actor_is_left_out_once_however_often_its_death_is_reported() -> None:
    house = House(asynchronous())
    expected = house.server.peers.expected_actors = 3
    for _ in range(3):
        house.say("supervisor", "lost", {"name": "actor-1", "pid": 0, "how": "died", "for_good": True})
    assert house.server.peers.expected_actors == expected - 1


def test_a_checkpoint_of_long_ago_does_not_shorten_the_journal() -> None:
    house = House(asynchronous(max_staleness=0))
    house.start()
    rotated = []
    house.server.outbox.rotate = lambda *args: rotated.append(house.server.learner.steps)  # type: ignore[method-assign]
    for step in range(3):
        for name in house.names:
            for group_id in house.leases(name):
                if group_id in house.server.store.entries:
                    house.push(name, group_id, step)
        house.say("learner", "want", {"index": step, "version": step})
        house.say("learner", "trained", {"index": step})
        house.say("learner", "checkpointed", {"step": 1})
        house.publish(step + 1)
        house.apply(step + 1)
    assert house.server.learner.steps == 3 and rotated == [1], (
        "batches 1 and 2 are in no checkpoint: the journal must keep them"
    )


def test_what_runs_counts_against_the_memory_before_it_comes() -> None:
    house = House(asynchronous(max_staleness=float("inf")))
    size = group(0, 0)[0].size
    house.server.dispatcher.max_bytes = 6 * size
    house.hello("learner")
    house.hello(*house.names, slots=8)  # one group at a time each
    house.publish(0)
    house.apply(0)
    for group_id in range(20):
        for name in house.names:
            house.say(name, "credit", {"ended": 8 * (group_id + 1)})
        if group_id in house.server.store.entries:
            house.finish(group_id, 0)
        assert house.server.store.bytes + size * house.server.store.count(*LEASED) <= 7 * size
    assert house.server.store.bytes >= 4 * size, "it is used, too"


def test_a_filter_that_fails_ends_the_run_with_its_error() -> None:
    def filter_of_the_user(rewards: list[float], lengths: list[int]) -> str:
        return str(1 / (len(rewards) - 8))

    house = House(asynchronous(max_staleness=1), group_filter=filter_of_the_user)
    house.start()
    with pytest.raises(ZeroDivisionError):
        house.finish(0, 0)
