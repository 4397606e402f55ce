"""Held-out answers, and groups that are not trained, are kept for people to read."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from areal_like.groups import encode_group, pack_heads
from areal_like.samples import DROPPED, HELDOUT, read
from areal_like.types import Group, Sample
from buffer.kept_samples import KeptSamples
from buffer.run_state import MANY_LOST
from buffer.store import Stage
from tests.buffer.house import B, House, asynchronous, table


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(asynchronous(max_staleness=1), evaluate=2, actors=1)
    house.state.samples = KeptSamples(tmp_path, SimpleNamespace(samples_bytes=10_000_000, steps=10))
    house.start()
    return house


def answer(lease: int, token: int = 5, samples: int = 1) -> tuple[dict, bytes]:
    sample = Sample(
        np.array([1, token], np.int32), 1, np.array([-1], np.float32), np.ones(1, bool), [(0, 1)], 1.0, "stop"
    )
    head, payload = encode_group(Group(lease, [sample] * samples, {0: "d0"}))
    body = {"id": lease, "reward": 1.0, "oldest": 0, "newest": 0, "length": 1}
    return body | {"answer": table(head)["table"]}, bytes(payload)


def test_held_out_answers_are_kept_with_their_rows(house: House, tmp_path: Path) -> None:
    first, second = house.leases("actor-0", "heldout")
    body, payload = answer(first)
    house.say("actor-0", "evaluated", body, payload)
    house.say("actor-0", "evaluated", body, payload)  # said again, it is no second answer
    house.say("actor-0", "evaluated", {**body, "id": second, "reward": 0.0, "answer": None})  # it had failed
    (found,) = read(tmp_path, [HELDOUT])
    assert (found.step, found.version, found.tokens, found.reward) == (0, 0, [1, 5], 1.0) and found.group in (0, 1)
    assert house.state.gauges.evaluations[0]["reward"] == 0.5


def test_an_answer_that_does_not_fit_is_refused_and_changes_nothing(house: House, tmp_path: Path) -> None:
    house.say("learner", "model", {"vocab_size": 4})
    (first, _) = house.leases("actor-0", "heldout")
    for body, payload in (answer(first), answer(first, samples=2), (answer(first)[0], b"short")):
        refused = house.router.refused
        house.say("actor-0", "evaluated", body, payload)
        assert house.router.refused == refused + 1
    assert list(read(tmp_path)) == [] and house.state.evaluation.round.rewards == []


def test_what_is_filtered_refused_or_too_old_is_kept_with_the_reason(house: House, tmp_path: Path) -> None:
    house.state.replay.group_filter = lambda rewards, lengths: "zero variance"
    house.finish(0, 0)
    house.state.replay.group_filter = None
    sample = Sample(np.array([1, 2], np.int32), 1, np.array([3.0], np.float32), np.ones(1, bool), [(0, 1)], 1.0, "stop")
    head, payload = encode_group(Group(1, [sample] * 8, {0: "d0"}))
    house.say("actor-0", "push", {"table": pack_heads([head])}, bytes(payload))
    house.finish(2, 0)
    assert house.state.store.entries[2].stage is Stage.WAITING
    house.state.replay.drop(2, "stale")
    house.state.replay.drop(3, "end of run")
    whys = {each.why.partition(":")[0] for each in read(tmp_path, [DROPPED])}
    assert whys == {"filtered", "malformed", "stale"}
    told = next(each for each in read(tmp_path, [DROPPED]) if "malformed" in each.why)
    assert told.tokens == [1, 2] and "logprobs" in told.why and told.actor == "actor-0"


def test_each_reason_to_be_lost_can_be_found_and_says_more(house: House, tmp_path: Path) -> None:
    state, replay = house.state, house.state.replay
    for reason in ("zero variance", "too long"):  # two reasons of a filter are two
        replay.group_filter = lambda rewards, lengths, reason=reason: reason
        house.finish(min(state.store.entries), 0)
    replay.group_filter = None
    ids = house.leases("actor-0")[2:]
    house.say("actor-0", "left_out", {"id": ids[0], "cut": [17, 40], "redrawn": ["the verifier crashed"]})
    house.say("actor-0", "failed", {"id": ids[0], "reason": "failed", "detail": "ValueError('no such file')"})
    replay.drop(ids[1], "timed out", "on 3 leases, the last of actor-0")
    house.finish(ids[2], 0)
    replay.drop(ids[2], "untrainable", "a gradient is not finite")
    state.learner.steps = 5
    house.finish(ids[3], 0)
    replay._expire(4)
    found = {each.why.partition(":")[0]: each for each in read(tmp_path, [DROPPED]) if each.step == 0}
    whys = {each.why for each in read(tmp_path, [DROPPED])}
    assert {"filtered: zero variance", "filtered: too long"} <= whys
    assert (
        found["cut"].why.endswith("2 samples had 17, 40 tokens")
        and found["redrawn"].why == "redrawn: the verifier crashed"
    )
    assert "no such file" in found["failed"].why and found["failed"].actor == "actor-0"
    assert (found["failed"].tokens, found["failed"].reward, found["failed"].group) == ([], None, ids[0])
    assert "3 leases" in found["timed out"].why and found["timed out"].reward is None
    assert found["untrainable"].why == "untrainable: a gradient is not finite" and found["untrainable"].tokens
    stale = [each for each in read(tmp_path, [DROPPED]) if each.step == 5]
    assert {each.why for each in stale} == {
        "stale: its oldest weights are of version 0; batch version 4 trains none from before 3"
    }


def test_a_rare_reason_has_room_where_a_usual_one_has_used_its_share(tmp_path: Path) -> None:
    samples = KeptSamples(tmp_path, SimpleNamespace(samples_bytes=100_000, steps=1000))
    for step in range(40):
        samples.unanswered((step, step), step, f"failed: {'x' * 400}", "actor-0")
    samples.unanswered((40, 40), 40, "timed out", "actor-0")
    found = [each.why.partition(":")[0] for each in read(tmp_path, [DROPPED])]
    assert found.count("timed out") == 1 and 1 <= found.count("failed") < 10, "its share is 30 bytes per step"


def test_a_filter_that_rejects_everything_is_told_of(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.state.replay.group_filter = lambda rewards, lengths: "zero variance"
    told = []
    for group_id in range(4 * MANY_LOST * B):
        house.finish(group_id, 0)
        told = [each.getMessage() for each in caplog.records if "no batch was trained" in each.getMessage()]
        assert len(told) == sum(group_id + 1 >= times * MANY_LOST * B for times in (1, 2, 4))
    assert told[0].endswith(f"{MANY_LOST * B} filtered")


def test_of_one_reason_one_group_per_step_is_kept(house: House, tmp_path: Path) -> None:
    house.state.replay.group_filter = lambda rewards, lengths: "zero variance"
    for group_id in range(4):
        house.finish(group_id, 0)
    assert {each.group for each in read(tmp_path, [DROPPED])} == {0}
