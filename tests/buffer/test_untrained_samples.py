"""Held-out answers and groups that are not trained are kept for people to read."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from areal_like.run.samples import DROPPED, HELDOUT, read
from areal_like.types import Completion, Group, PartialSample, Sample
from areal_like.wire.groups import encode_group, pack_heads
from areal_like.wire.partials import digest_of, encode_partial
from buffer.gauges import MANY_LOST
from buffer.store import Stage
from buffer.untrained_samples import UntrainedSamples
from tests.buffer.house import B, House, asynchronous, table


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(asynchronous(max_staleness=1), evaluate=2, actors=1)
    house.state.samples = UntrainedSamples(tmp_path, SimpleNamespace(samples_bytes=10_000_000, steps=10))
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
    found, failed = read(tmp_path, [HELDOUT])
    assert (found.step, found.version, found.tokens, found.reward) == (0, 0, [1, 5], 1.0)
    assert (failed.step, failed.tokens, failed.reward) == (0, [], 0.0) and failed.why.startswith("failed: it counts")
    assert {found.group, failed.group} == {0, 1}
    assert house.state.gauges.evaluations[0]["reward"] == 0.5


def test_an_answer_that_does_not_fit_is_refused_and_changes_nothing(house: House, tmp_path: Path) -> None:
    house.say("learner", "model", {"vocab_size": 4})
    (first, _) = house.leases("actor-0", "heldout")
    for body, payload in (answer(first), answer(first, samples=2), (answer(first)[0], b"short")):
        refused = house.router.refused
        house.say("actor-0", "evaluated", body, payload)
        assert house.router.refused == refused + 1
    assert list(read(tmp_path)) == [] and house.state.evaluation.round.answers == {}


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
        found["cut"].why.endswith("2 samples had 17, 40 tokens; no text: an actor sends it for one group per version")
        and found["redrawn"].why == "redrawn: the verifier crashed; no text: no answer was complete"
    )
    assert "no such file" in found["failed"].why and found["failed"].actor == "actor-0"
    assert (found["failed"].tokens, found["failed"].reward, found["failed"].group) == ([], None, ids[0])
    assert "3 leases" in found["timed out"].why and found["timed out"].reward is None
    assert found["untrainable"].why == "untrainable: a gradient is not finite" and found["untrainable"].tokens
    stale = [each for each in read(tmp_path, [DROPPED]) if each.step == 5]
    assert {each.why for each in stale} == {
        "stale: its oldest weights are of version 0; batch version 4 trains none from before 3"
    }


def partial_group(group_id: int, *answers: list[int], score: float | None = None) -> tuple[dict, bytes]:
    """The text of samples, each made by one call."""
    samples = {}
    for index, tokens in enumerate(answers):
        done = Completion(
            np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), [(0, len(tokens))], "abort"
        )
        scores = {} if score is None else {digest_of(done.tokens): score}
        samples[index] = PartialSample({(7, 0): done}, scores)
    head, payload = encode_partial(group_id, samples, {0: "d0"})
    return msgspec.to_builtins(head, builtin_types=(bytes,)), payload


def test_what_cut_and_redrawn_samples_said_is_kept_with_their_reasons(house: House, tmp_path: Path) -> None:
    first, second, third = house.leases("actor-0")[:3]
    said, payload = partial_group(first, [5, 6], [7, 8, 9], [3])
    house.say("actor-0", "left_out", {"id": first, "cut": [2, 3], "redrawn": ["boom"], "said": said}, payload)
    found = list(read(tmp_path, [DROPPED]))
    assert [(each.tokens, each.prompt_length, each.reward, each.finish) for each in found] == [
        ([5, 6], 0, None, "abort"), ([7, 8, 9], 0, None, "abort"), ([3], 0, None, "abort"),
    ]  # fmt: skip
    assert [each.why for each in found[1:]] == [
        "cut: others of the group were faster; 2 samples had 2, 3 tokens", "redrawn: boom",
    ]  # fmt: skip
    assert found[1].numbers == {"logprob": [-0.5] * 3} and found[1].runs == [(0, 3)] and found[1].actor == "actor-0"
    house.say("actor-0", "left_out", {"id": second, "cut": [9], "redrawn": []})
    house.state.learner.steps = 1
    house.say("actor-0", "left_out", {"id": second, "cut": [9], "redrawn": []})
    assert len(list(read(tmp_path, [DROPPED]))) == 3, "without text it says nothing new, and takes no other's place"
    said, payload = partial_group(third, [4], score=0.5)
    house.say("actor-0", "left_out", {"id": third, "cut": [1], "redrawn": [], "said": said}, payload)
    *_, last = read(tmp_path, [DROPPED])
    assert (last.step, last.tokens, last.reward) == (1, [4], 0.5), "one that was scored"


@pytest.mark.parametrize("wrong", ["payload", "version", "id", "token", "none"])
def test_what_can_not_be_read_of_a_failed_group_costs_nothing_but_its_text(
    house: House, tmp_path: Path, wrong: str
) -> None:
    house.say("learner", "model", {"vocab_size": 10})
    group_id = house.leases("actor-0")[0]
    said, payload = partial_group(group_id, [5, 60 if wrong == "token" else 6])
    said |= {"id": 77} if wrong == "id" else {"digests": {0: "other"}} if wrong == "version" else {}
    payloads = [] if wrong == "none" else [payload[:-1] if wrong == "payload" else payload]
    house.say("actor-0", "failed", {"id": group_id, "reason": "failed", "detail": "boom", "said": said}, *payloads)
    assert house.state.store.dropped == {"failed": 1} and not house.router.refused
    (found,) = read(tmp_path, [DROPPED])
    assert (found.tokens, found.why) == ([], "failed: boom; no text: no answer was complete")


def test_what_samples_of_a_failed_group_said_is_kept(house: House, tmp_path: Path) -> None:
    group_id = house.leases("actor-0")[0]
    said, payload = partial_group(group_id, [5, 6])
    house.say("actor-0", "failed", {"id": group_id, "reason": "failed", "detail": "boom", "said": said}, payload)
    (found,) = read(tmp_path, [DROPPED])
    assert (found.tokens, found.why, found.group) == ([5, 6], "failed: boom", group_id)


def asked_for_what_is_too_old(house: House) -> int:
    """A group becomes too old while it runs."""
    house.state.learner.steps = 5
    house.state.replay._expire(4)
    house.controller.step(0)
    asked = [body["ids"] for _, kind, body in house.router.sent if kind == "cancel" and body["hand_back"]]
    assert len(asked) == 1 and len(asked[0]) == 1, "of one group per step and reason"
    assert not list(read(house.state.samples._logs[DROPPED].path.parent.parent, [DROPPED]))
    return asked[0][0]


def test_an_actor_is_asked_what_a_group_that_became_too_old_while_it_ran_has_said(house: House, tmp_path: Path) -> None:
    group_id = asked_for_what_is_too_old(house)
    said, payload = partial_group(group_id, [5, 6], [7])
    body = {"ids": [group_id], "partials": [said], "leaving": False}
    for _ in range(2):
        house.say("actor-0", "hand_back", body, payload)
    found = list(read(tmp_path, [DROPPED]))
    assert [(each.step, each.group, each.tokens) for each in found] == [(5, group_id, [5, 6]), (5, group_id, [7])]
    assert all(each.why.startswith("stale: its oldest weights") and "no text" not in each.why for each in found)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("nothing", "; no text: nothing was sampled"),
        ("death", "; no text: the actor was lost"),
        ("end", "; no text: the run ended before the actor had answered"),
        ("push", ""),
    ],
)
def test_an_actor_that_has_no_text_of_what_it_is_asked_for_leaves_the_reason(
    house: House, tmp_path: Path, what: str, why: str
) -> None:
    group_id = asked_for_what_is_too_old(house)
    match what:
        case "nothing":
            house.say("actor-0", "hand_back", {"ids": [group_id], "partials": [], "leaving": False})
        case "death":
            house.say("actor-0", "lost", {"name": "actor-0", "pid": 0, "how": "was killed", "for_good": False})
        case "push":
            house.push("actor-0", group_id, 0)
        case "end":
            house.state.samples.finish()
    found = list(read(tmp_path, [DROPPED]))
    assert {each.group for each in found} == {group_id} and len(found) == (8 if what == "push" else 1)
    assert found[0].why == "stale: its oldest weights are of version 0; batch version 4 trains none from before 3" + why
    assert (found[0].tokens == []) == bool(why)


def test_a_rare_reason_has_room_where_a_usual_one_has_used_its_share(tmp_path: Path) -> None:
    samples = UntrainedSamples(tmp_path, SimpleNamespace(samples_bytes=100_000, steps=1000))
    for step in range(40):
        samples.unfinished((step, step), step, f"failed: {'x' * 400}", "actor-0")
    samples.unfinished((40, 40), 40, "timed out", "actor-0")
    samples.ask((40, 40), 41, "stale: too old", "actor-0")
    samples.answered(41, None)
    found = [each.why.partition(":")[0] for each in read(tmp_path, [DROPPED])]
    assert found.count("timed out") == found.count("stale") == 1
    assert 1 <= found.count("failed") < 10, "its share is 30 bytes per step"


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
