"""The controller against wrong digests, false groups, unknown peers, endless failure and silence; a hostile or faulty
peer: the others make the batches that they would make without it. (On the level of sockets:
`tests/areal_like/test_bus.py`.)"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins

from areal_like.types import Group, Sample
from areal_like.wire.frames import WireError
from areal_like.wire.groups import Head, encode_group
from areal_like.wire.link import BusError
from buffer.checks import AnswerLimits, RolloutsFail, Unverified
from buffer.entries import LEASED, Stage
from buffer.peers import MOST_FAILED
from tests.buffer.house import SIGN_OF_LIFE, B, House, answer, asynchronous, group, said, table


def started(**options: Any) -> House:
    """The learner's model knows 13 tokens."""
    house = House(asynchronous(max_staleness=options.pop("max_staleness", 0)), **options).start()
    house.say("learner", "model", {"vocab_size": 13, "positions": 4})
    house.server.limits = AnswerLimits(lambda row: 2, one_prompt=True)
    house.server.heldout_limits = AnswerLimits(lambda place: 2)
    return house


def bad_group(group_id: int, unchanged: int = 7, **changes: Any) -> tuple[Head, bytes]:
    """8 samples of 3 tokens and 2 logprobs, with two turns each; those after the `unchanged` are changed."""
    fields = {"tokens": np.ones(3, np.int32), "logprobs": np.full(2, -0.5, np.float32), "reward": 1.0}
    fields |= {"prompt_length": 1, "loss_mask": np.ones(2, bool), "runs": [(0, 2)], "finish": "stop"}
    fields |= {"turn_rewards": [(0, 0.5), (1, 0.5)]}
    samples = [Sample(**fields)] * unchanged + [Sample(**(fields | changes))] * (8 - unchanged)
    head, payload = encode_group(Group(group_id, samples, {0: "d0"}))
    return head, bytes(payload)


WRONG_TOKEN = {"tokens": np.array([1, 13, 1], np.int32)}
LONGER = {"tokens": np.ones(4, np.int32), "logprobs": np.zeros(3, np.float32), "loss_mask": np.ones(3, bool)}
LONGER |= {"runs": [(0, 3)]}
BAD = [
    ("tokens", WRONG_TOKEN),
    ("tokens", {"tokens": np.array([1, 1, -1], np.int32)}),
    ("logprobs", {"logprobs": np.array([-1, 50], np.float32)}),
    ("logprobs", {"logprobs": np.array([-np.inf, -1], np.float32)}),
    ("logprobs", {"logprobs": np.array([-1, np.nan], np.float32)}),
    ("logprobs", {"logprobs": np.array([-1, -100], np.float32)}),
    ("prompts", {"tokens": np.array([2, 1, 1], np.int32)}),
    ("lengths", {"tokens": np.ones(5, np.int32), "prompt_length": 3, "unchanged": 0}),
    ("lengths", LONGER),
    ("loss mask", {"loss_mask": np.full(2, 7, np.uint8).view(bool)}),
    ("turn rewards", {"turn_rewards": [(0, 1e300), (1, 0.0)]}),
    ("turn rewards", {"turn_rewards": [(0, 0.0), (2, 0.0)]}),
]


def short_group(group_id: int, samples: int, unscored: int) -> tuple[Head, bytes]:
    head, payload = group(group_id, 0, samples=samples)
    head.unscored = unscored
    return head, payload


def push_bad(house: House, name: str, group_id: int) -> None:
    head, payload = bad_group(group_id, **WRONG_TOKEN)
    house.say(name, "push", table(head), payload)


@pytest.mark.parametrize(
    ("column", "made"),
    [
        ("", bad_group),
        *((column, lambda group_id, changes=changes: bad_group(group_id, **changes)) for column, changes in BAD),
        ("loss mask", lambda group_id: bad_group(group_id, 0, loss_mask=np.zeros(2, bool))),
        ("form", lambda group_id: group(group_id, 0, samples=7)),
        ("", lambda group_id: short_group(group_id, samples=6, unscored=2)),
        ("form", lambda group_id: short_group(group_id, samples=6, unscored=1)),
        ("form", lambda group_id: short_group(group_id, samples=1, unscored=7)),
        ("form", lambda group_id: group(group_id, 1)),  # version 1 is not published
        ("size", lambda group_id: (group(group_id, 0)[0], b"short")),
        ("payloads", lambda group_id: (group(group_id, 0)[0],)),
    ],
)
def test_a_group_that_nobody_could_train_on_is_refused_and_rolled_out_by_another(column: str, made: Any) -> None:
    house = started()
    bad = house.leases("actor-0")[0]
    head, *payloads = made(bad)
    house.say("actor-0", "push", table(head), *map(bytes, payloads))
    assert ("actor-0", "pushed", {"ids": [bad]}) in house.router.sent, "or it would come again"
    reasons = [body["reason"] for who, kind, body in house.router.sent if who == "actor-0" and kind == "refused"]
    assert len(reasons) == bool(column) and all("group" in reason for reason in reasons)
    assert house.server.gauges.refused == bool(column)
    assert house.leases("actor-1").count(bad) == 0, "it has its share"
    house.push("actor-1", house.leases("actor-1")[0], 0)
    assert house.leases("actor-1").count(bad) == bool(column) and house.leases("actor-0").count(bad) == 1
    assert house.store.entries[bad].stage is (Stage.RUNNING if column else Stage.WAITING)


def test_an_actor_whose_groups_are_refused_in_a_row_gets_no_more_and_without_any_other_the_run_ends() -> None:
    house = started(max_staleness=8)
    for group_id in house.leases("actor-0")[:3]:
        push_bad(house, "actor-0", group_id)
    before = len(house.leases("actor-0"))
    house.push("actor-1", house.leases("actor-1")[0], 0)
    house.say("actor-0", "credit", {"ended": 64})
    assert len(house.leases("actor-0")) == before
    assert "actor-0 gets no leases: 3 groups of it in a row were refused" in house.server.status.report()["waits"]
    mine = house.leases("actor-1")[1:]
    for group_id in mine[:2]:
        push_bad(house, "actor-1", group_id)
    with pytest.raises(RolloutsFail, match=r"3 groups in a row of every actor were refused; .* token 13 "):
        push_bad(house, "actor-1", mine[2])


def test_a_bad_group_takes_nothing_from_those_that_are_pushed_with_it() -> None:
    """Groups that end in the same turn of an actor's loop share a message."""
    house = started(max_staleness=8, actors=1)
    ids = house.leases()[:4]
    made = [bad_group(each, **(WRONG_TOKEN if each == ids[1] else {})) for each in ids]
    house.say("actor-0", "push", table(*(head for head, _ in made)), *(payload for _, payload in made))
    entries = house.store.entries
    assert [entries[each].stage is Stage.WAITING for each in ids] == [True, False, True, True]
    assert house.server.gauges.refused == 1 and house.router.refused == 1
    acknowledged = [each for _, kind, body in house.router.sent if kind == "pushed" for each in body["ids"]]
    assert sorted(acknowledged) == ids


def test_a_group_that_several_actors_fail_at_is_dropped() -> None:
    house = started(actors=3)
    bad = house.leases("actor-0")[0]
    for _ in range(3):
        push_bad(house, house.store.entries[bad].actor, bad)
    assert house.store.ledger()["dropped"] == {"malformed": 1}
    assert len(set(house.leases())) == B + 1, "its slot goes to the next prompt"


def test_a_group_is_taken_from_an_actor_that_has_or_had_its_lease_and_from_nobody_else() -> None:
    house = started(max_staleness=1)
    first, second, *_ = house.leases("actor-0")
    before, entries = house.store.ledger(), house.store.entries
    house.push("stranger", first, 0)
    assert "say hello" in house.router.sent[-1][2]["reason"]
    house.push("actor-1", first, 0)
    answers = {kind: body for who, kind, body in house.router.sent[-2:] if who == "actor-1"}
    assert f"actor-1 has had no lease of group {first}" in answers["refused"]["reason"]
    assert answers["pushed"] == {"ids": [first]}, "or it would come for ever"
    assert (entries[first].actor, house.store.ledger()) == ("actor-0", before), "its lease continues"
    house.has_been_silent("actor-0")
    house.say("learner", "heartbeat", SIGN_OF_LIFE)  # a turn: the groups of the silent one go to the other
    house.hello("actor-0")
    for name, group_id in (("actor-0", first), ("actor-1", first), ("actor-1", second)):
        house.push(name, group_id, 0)
    assert [entries[each].pushed_by for each in (first, second)] == ["actor-0", "actor-1"]
    assert house.server.groups.duplicates == 1
    acknowledged = [body["ids"] for _, kind, body in house.router.sent if kind == "pushed"]
    assert acknowledged == [[first]] * 3 + [[second]], "a duplicate is acknowledged too, or it would come for ever"


@pytest.mark.parametrize(
    ("kind", "body"),
    [("failed", {"reason": "failed", "detail": ""}), ("left_out", {"cut": [3], "redrawn": []})],
)
def test_an_actor_says_nothing_about_a_group_that_another_one_rolls_out(kind: str, body: dict) -> None:
    house = started(max_staleness=1)
    group_id, *_ = house.leases("actor-0")
    before, entry = house.store.ledger(), house.store.entries[group_id]
    house.say("actor-1", kind, {"id": group_id} | body)
    assert (entry.stage, entry.actor, entry.cut, house.store.ledger()) == (Stage.RUNNING, "actor-0", (), before)
    house.say("actor-0", kind, {"id": group_id} | body)
    assert entry.failed if kind == "failed" else entry.cut == (3,)


HELLO = {"role": "actor", "name": "actor-0", "pid": 1, "slots": 256}
EVALUATED = {"id": 0, "reward": 0.0, "oldest": 0, "newest": 0, "length": 0, "answer": None}


@pytest.mark.parametrize(
    ("kind", "owner"), [("lost", "k1"), ("lost", ""), ("hello", "k1"), ("lost", "k0"), ("hello", "k0")]
)
def test_an_actors_key_takes_no_name_and_ends_no_lease_of_another_key(kind: str, owner: str) -> None:
    """Without an owner: an operator's key, or a process without keys."""
    house = started(max_staleness=1)
    for name, key in (("actor-0", "k0"), ("actor-1", "k1")):
        house.server.fleet.by_name[name].owner = key
    body = {"lost": {"name": "actor-0", "pid": 0, "how": "", "for_good": False}, "hello": HELLO}[kind]
    actor = house.server.fleet.by_name["actor-0"]
    house.router.incoming.append((b"another", said(kind, body)._replace(owner=owner)))
    house.server.step(0)
    stays = owner == "k1" or (kind == "hello" and not owner)
    assert house.router.refused == stays and (house.server.fleet.by_name.get("actor-0") is actor) == stays
    assert bool(house.store.entries.held_by("actor-0")) == stays or kind == "hello"


@pytest.mark.parametrize(("length", "lease", "refused"), [(2, 0, 0), (3, 0, 1), (3, 1000, 0), (4, 1000, 1)])
def test_a_held_out_answer_is_no_longer_than_its_prompt_allows(length: int, lease: int, refused: int) -> None:
    house = started(evaluate=1, actors=1)
    lease += house.leases(split="heldout")[0]
    zeros = np.zeros(length, np.float32)
    sample = Sample(np.ones(length + 1, np.int32), 1, zeros, zeros == 0, [(0, length)], 1.0, "stop")
    head, payload = encode_group(Group(lease, [sample], {0: "d0"}))
    facts = {"id": lease, "reward": 1.0, "oldest": 0, "newest": 0, "length": length}
    house.say("actor-0", "evaluated", facts | {"answer": table(head)["table"]}, bytes(payload))
    assert house.router.refused == refused and len(house.server.gauges.evaluations) == (length == 2)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("published", {"manifest": {"version": 9, "digest": "x"}}),
        ("trained", {"index": 0}),
        ("want", {"index": 0, "version": 0}),
        ("end_run", {"reason": "", "steps": 0}),
        ("checkpointed", {"step": 1}),
        ("applied", {"version": 0, "digest": "other"}),
        ("applied", {"version": 1000, "digest": "x"}),
        ("heartbeat", SIGN_OF_LIFE | {"stats": {"sum:rollout/x": "y"}}),
        ("heartbeat", SIGN_OF_LIFE | {"stats": {"sum:rollout/x": float("nan")}}),
        ("heartbeat", SIGN_OF_LIFE | {"stats": {"sum:rollout/x": -1.0}}),
        ("heartbeat", SIGN_OF_LIFE | {"stats": {"mean:rollout/x": 1.7e308}}),
        ("heartbeat", SIGN_OF_LIFE | {"stats": {"sum:buffer/bytes": 1.0}}),
        ("heartbeat", SIGN_OF_LIFE | {"stats": {"rollout/x": 1.0}}),
        ("credit", {"ended": 65}),
        ("evaluated", EVALUATED | {"reward": 1.0}),
        ("evaluated", EVALUATED | {"length": 4}),
        ("evaluated", EVALUATED | {"newest": 1}),
        ("evaluated", EVALUATED | {"answer": table(group(0, 0, samples=1)[0])["table"]}),
        ("heartbeat", SIGN_OF_LIFE | {"stats": {"engine_note": "\n"}}),
        ("left_out", {"id": 0, "cut": [1] * 9, "redrawn": []}),
        ("left_out", {"id": 0, "cut": [], "redrawn": ["why"] * 65}),
        ("relay", {"endpoint": "file:///tmp/x", "key": ""}),
        ("hello", HELLO | {"role": "learner"}),
        ("hello", HELLO | {"name": "another"}),
        ("hello", HELLO | {"name": "a\n"}),
        ("hello", HELLO | {"slots": 2**63}),
        ("hello", HELLO | {"slots": 0}),
    ],
)
def test_messages_that_nobody_should_send_change_nothing(kind: str, body: dict) -> None:
    house = started()
    before = house.store.ledger(), house.server.weights.version, len(house.leases())
    house.say(next(name for name in house.names if 0 in house.leases(name)), kind, body)
    assert house.router.refused == 1 and house.router.sent[-1][1] == "refused"
    assert (house.store.ledger(), house.server.weights.version, len(house.leases())) == before
    assert house.server.learner.peer == b"learner" and not house.server.phase.finishing
    house.want(0)
    for name in house.names:
        for group_id in house.leases(name):
            house.push(name, group_id, 0)
    assert len(house.batches()) == 1, "the run goes on"


def test_leases_that_an_actor_hands_back_unasked_count_as_failures() -> None:
    house = started(max_staleness=float("inf"))
    for _ in range(MOST_FAILED):
        some = min(house.store.entries.held_by("actor-0"))
        house.say("actor-0", "hand_back", {"lengths": {some: []}, "leaving": False})
    before = len(house.leases("actor-0"))
    house.finish(min(house.store.entries.held_by("actor-1")), 0)
    rest = sorted(house.store.entries.held_by("actor-0"))
    house.say("actor-0", "hand_back", {"lengths": {each: [] for each in rest}, "leaving": False})
    assert len(house.leases("actor-0")) == before, "others work"


def test_metrics_that_one_actor_invents_push_out_none_that_others_report() -> None:
    house = started(actors=3)
    for number, name in enumerate(house.names):
        stats = {f"sum:rollout/{number * (number < 2)}/{each}": 1.0 for each in range(128)}
        for part in range(3 if number == 0 else 1):
            house.say(name, "heartbeat", SIGN_OF_LIFE | {"stats": {f"{key}{part or ''}": 1.0 for key in stats}})
    shown = house.server.gauges.levels(house.server.peers, house.store, 0.0)
    assert not house.router.refused and sum(key.startswith("rollout/0/") for key in shown) == 128


def test_answers_without_a_verdict_end_the_run_only_if_no_actor_has_a_verifier_that_works() -> None:
    unverified, names = Unverified("task", 5.0, limit=0.5, window=8), ["actor-0", "actor-1"]
    for answered in range(0, 64, 8):
        for name, failed in zip(names, (answered, 0), strict=True):
            unverified.see(name, {"sum:rewards/answered": answered, "sum:rewards/unverified": failed}, names)
    stats: dict[str, float | str] = {"sum:rewards/answered": 64.0, "sum:rewards/unverified": 64.0}
    with pytest.raises(RolloutsFail, match=r"mine\.py:3"):
        unverified.see("actor-0", stats | {"verifier_note": "mine.py:3"}, names[:1])


BODIES: dict[str, dict[str, Any]] = {
    "hello": HELLO,
    "heartbeat": {"stats": {"sum:rollout/x": 1.0, "mean:rollout/y": 1.0, "engine": "serving"}}
    | {"progress": {0: 1}, "heldout": {0: 1}},
    "credit": {"ended": 0},
    "evaluated": EVALUATED,
    "left_out": {"id": 0, "cut": [1], "redrawn": ["why"]},
    "failed": {"id": 0, "reason": "failed", "detail": ""},
    "applied": {"version": 0, "digest": "d0"},
    "relay": {"endpoint": "tcp://127.0.0.1:1", "key": ""},
    "hand_back": {"lengths": {0: [[1, True]]}, "leaving": False},
    "lost": {"name": "actor-9", "pid": 0, "how": "", "for_good": True},
    "push": {"table": table(group(0, 0)[0])["table"]},
}
WORST = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1.7e308, -1, 1, 2**31, 2**62, 2**64 - 1]
WORST += ["", "x" * 3000, None, True, [], {}, [[]], ["x"] * 70_000, "learner", "actor-1", "\n", b"\xff"]


def changed(value: Any) -> Iterator[Any]:
    """The value with each of the worst in its place, or in one place within it."""
    yield from WORST
    if isinstance(value, dict):
        yield from (value | {key: worse} for key in value for worse in changed(value[key]))
        yield from (value | {worse: each} for each in list(value.values())[:1] for worse in WORST if worse.__hash__)
    elif isinstance(value, list | tuple):
        yield from ([*value[:n], worse, *value[n + 1 :]] for n in range(len(value)) for worse in changed(value[n]))


@pytest.mark.parametrize("kind", sorted(BODIES))
def test_the_worst_values_of_an_actor_neither_end_nor_stall_nor_poison_the_run(kind: str) -> None:
    house = started(evaluate=2, actors=3)
    for name in BODIES[kind] if kind != "push" else ():
        for worse in changed(BODIES[kind][name]):
            house.say("actor-0", kind, BODIES[kind] | {name: worse})
    for worse in changed(to_builtins(BODIES[kind]["table"], builtin_types=(bytes,))) if kind == "push" else ():
        house.say("actor-0", kind, {"table": worse}, group(0, 0)[1])
    assert {"actor-1", "actor-2"} <= house.server.fleet.by_name.keys() or kind == "lost"
    house.want(0)
    for _ in range(2):
        for name in house.names[1:] + house.names[:1]:
            for group_id in sorted(house.store.entries.held_by(name)):
                house.push(name, group_id, 0)
    assert len(house.batches()) == 1
    report = house.server.status.report()
    numbers = [each for each in flat(report) if isinstance(each, float)]
    assert numbers and all(abs(each) < 1e30 for each in numbers) and json.dumps(report, allow_nan=False)


def flat(value: Any) -> Iterator[Any]:
    for each in value.values() if isinstance(value, dict) else value:
        yield from flat(each) if isinstance(each, dict | list | tuple) else [each]


@pytest.mark.parametrize(("kind", "body", "refused"), [("credit", {"ended": 1}, 0), ("heartbeat", SIGN_OF_LIFE, 1)])
def test_an_actor_that_has_left_is_asked_for_hello_by_signs_of_life_only(kind: str, body: dict, refused: int) -> None:
    house = started()
    house.server.presence.remove(house.server.fleet.by_name["actor-0"])
    house.say("actor-0", kind, body)
    assert house.server.router.refused == refused


def test_evaluation_runs_beside_training_and_the_report_waits_for_the_last_one() -> None:
    house = started(evaluate=6)
    mine, others = house.leases("actor-0", "heldout"), house.leases("actor-1", "heldout")
    assert len(mine) == len(others) == 3
    for lease in others:  # a result of another actor's lease does not count
        house.say("actor-0", "evaluated", *answer(lease, 9.0))
    body, payload = answer(mine[0], 0.5)
    house.say("actor-0", "evaluated", body | {"reward": 0.9}, payload)
    assert house.router.refused == 1, "it is not that of its answer"
    house.evaluate(0.5, version=0)
    assert house.server.gauges.evaluations[0]["reward"] == 0.5
    house.publish(1)
    house.say("learner", "end_run", {"reason": "enough", "steps": 0})
    assert not any(house.store.entries.held_by(name) for name in house.names)
    assert not any(kind == "report" for _, kind, _ in house.router.sent)
    assert house.server.status.waits() == ["the end waits for the last evaluation"]
    house.apply(1)
    house.evaluate(1.0, version=1)
    for _ in range(3):
        house.server.step(0)
    (report,) = (body["report"] for _, kind, body in house.router.sent if kind == "report")
    assert [result["reward"] for result in report["evaluations"]] == [0.5, 1.0]
    assert report["ledger"]["admitted"] == sum(report["ledger"]["dropped"].values())


def test_a_full_buffer_starts_only_groups_of_the_batch_that_the_learner_waits_for() -> None:
    house = started(max_staleness=float("inf"), actors=1)
    house.server.dispatcher.max_bytes = 1
    before = len(house.leases())
    house.finish(1, 0)
    house.want(0)
    house.say("actor-0", "failed", {"id": 0, "reason": "rejected", "detail": ""})
    house.say("actor-0", "credit", {"ended": 16})
    assert len(house.leases()) == before + 1, "over the limit, nothing else starts"
    assert house.store.entries[before].slot == 0, "the slot that was left is taken first"
    for group_id in (2, 3, before):
        house.finish(group_id, 0)
    assert house.batches() == [[before, 1, 2, 3]]


def test_running_groups_count_against_the_memory_before_they_come() -> None:
    house = House(asynchronous(max_staleness=float("inf")))
    size = group(0, 0)[0].size
    house.server.dispatcher.max_bytes = 6 * size
    house.slots = 8  # one group at a time each
    house.start()
    for group_id in range(20):
        for name in house.names:
            house.say(name, "credit", {"ended": 8 * (group_id + 1)})
        if group_id in house.store.entries:
            house.finish(group_id, 0)
        assert house.store.bytes + size * house.store.entries.count(*LEASED) <= 7 * size
    assert house.store.bytes >= 4 * size, "it is used, too"


def test_leases_follow_free_slots_not_whole_groups() -> None:
    """Two groups of 8 fill 16 slots; when any 8 sequences end, the next group has room."""
    house = House(asynchronous(max_staleness=8), actors=1)
    house.slots = 20
    house.start()
    for ended, leases in ((0, [0, 1]), (3, [0, 1]), (4, [0, 1, 2])):
        house.say("actor-0", "credit", {"ended": ended})
        assert house.leases() == leases


def test_a_checkpoint_of_long_ago_does_not_shorten_the_journal() -> None:
    """Batches 1 and 2 are in no checkpoint: the journal must keep them."""
    house, rotated = started(), []
    house.server.outbox.rotate = lambda *args, late: rotated.append((house.server.learner.steps, late))  # type: ignore[method-assign]
    for step in range(3):
        for name in house.names:
            for group_id in sorted(house.store.entries.held_by(name)):
                house.push(name, group_id, step)
        house.want(step)
        house.say("learner", "trained", {"index": step})
        house.say("learner", "checkpointed", {"step": 1})
        house.publish(step + 1)
        house.apply(step + 1)
    for step in (9, 2, 1):
        house.say("learner", "checkpointed", {"step": step})
    assert house.server.learner.steps == 3 and rotated == [(1, False), (3, True)]


def test_endless_failure_ends_the_run_with_its_reason() -> None:
    house = started()
    with pytest.raises(RolloutsFail, match=r"16 groups in a row.*no chat template"):
        for name in 100 * house.names:
            for group_id in house.store.entries.held_by(name).copy():
                house.say(name, "failed", {"id": group_id, "reason": "failed", "detail": "no chat template"})


def test_a_filter_that_fails_ends_the_run_with_its_error() -> None:
    house = started(group_filter=lambda rewards, lengths: str(1 / (len(rewards) - 8)))
    with pytest.raises(ZeroDivisionError):
        house.finish(0, 0)


def one_of_two_actors() -> House:
    house = House(asynchronous())
    house.hello("learner", "actor-0")
    assert house.server.status.waits() == ["the start waits for the learner and 2 actors"], "it has published nothing"
    house.publish(0)
    house.apply(0, "actor-0")
    assert house.server.status.waits() == ["the start waits for 1 actor"] and not house.leases()
    return house


def test_a_start_that_does_not_come_ends_with_the_name_of_the_missing_role() -> None:
    house = one_of_two_actors()
    house.server.presence.ready_timeout = 5.0
    house.server.presence._born -= 6
    with pytest.raises(BusError, match=r"the start waits for 1 actor$"):
        house.server.step(0)


def test_an_actor_that_is_left_out_is_not_waited_for_at_the_start_and_counts_once() -> None:
    house = one_of_two_actors()
    for _ in range(3):
        house.say("supervisor", "lost", {"name": "actor-1", "pid": 0, "how": "died", "for_good": True})
    assert house.server.phase.started_at is not None and house.leases("actor-0")
    assert house.server.peers.expected_actors == 1


def test_a_stall_names_the_waiting_roles() -> None:
    house = started()
    for group_id in house.leases("actor-0"):
        house.finish(group_id, 0)
    assert "actor-0 waits for the learner (staleness bound)" in house.server.status.waits()
    house.want(0)
    left = len(house.leases("actor-1"))
    assert (
        f"learner waits for batch 0: {B - left} groups are ready, {left} run on actor-1" in house.server.status.waits()
    )
    house.publish(1)
    assert "actor-0 waits for weights" in house.server.status.waits()


BATCHES, ATTACKED = 5, 2
"""Batches in all; how many are trained when the attack comes."""


class Recording(House):
    """Records each message with its sender."""

    def __init__(self) -> None:
        super().__init__(asynchronous(max_staleness=1))
        self.recorded: list[tuple[Any, ...]] = []

    def say(self, who: str, kind: str, body: dict, *payloads: bytes) -> None:
        self.recorded.append((who, kind, body, *payloads))
        super().say(who, kind, body, *payloads)


def old_messages(house: Recording) -> None:
    """Each earlier message again, from its sender and from a stranger, the oldest last: that would set the run back."""
    for who, *message in house.recorded[::-1]:
        for each in (who, "a stranger"):
            house.say(each, *message)
    house.hello(*house.names)
    house.apply(ATTACKED)


def a_taken_name(house: Recording) -> None:
    """An actor's groups go to a stranger that never answers, until the actor itself comes again."""
    house.say("a stranger", "hello", {"role": "actor", "name": "actor-0", "pid": 1, "slots": 8})
    house.say("a stranger", "applied", {"version": 0, "digest": "d0"})
    for kind, body in (("trained", {"index": ATTACKED}), ("want", {"index": BATCHES, "version": BATCHES})):
        house.say("a stranger", kind, body)
    house.say("actor-0", "heartbeat", SIGN_OF_LIFE)
    assert "say hello" in house.router.sent[-1][2]["reason"]
    house.hello("actor-0")
    house.apply(ATTACKED, "actor-0")


def no_messages(house: Recording) -> None:
    for peer in (b"a stranger", b"actor-0", b"learner"):
        house.router.incoming.append((peer, WireError("no message")))
    house.server.step(0)


def state(house: House) -> tuple[Any, ...]:
    return house.server.learner.steps, house.server.weights.published, house.store.ledger(), len(house.batches())


def result(attack: Callable[[Recording], None] | None) -> dict[str, Any]:
    house = Recording()
    house.start()
    for batch in range(BATCHES):
        if batch == ATTACKED and attack:
            before = state(house)
            attack(house)
            assert state(house) == before
        for name in house.names:
            for group_id in sorted(house.store.entries.held_by(name)):
                house.push(name, group_id, batch)
        house.want(batch)
        house.trained(batch)
        house.say("learner", "checkpointed", {"step": batch + 1})
    bodies = {body["index"]: body for _, kind, body in house.router.sent if kind == "batch"}
    return {
        "batches": [(body["version"], body["table"]) for _, body in sorted(bodies.items())],
        "ledger": house.store.ledger(),
        "version": house.server.weights.version,
        "staleness": house.store.staleness_max,
    }


@pytest.mark.parametrize("attack", [old_messages, a_taken_name, no_messages], ids=lambda each: each.__name__)
def test_nothing_changes_for_the_others(attack: Callable[[Recording], None]) -> None:
    undisturbed = result(None)
    assert len(undisturbed["batches"]) == BATCHES and undisturbed["ledger"]["trained"] == BATCHES * B
    assert result(attack) == undisturbed
