"""The ledger agrees with the buffer; `--verify` finds each way in which a journal can show that a prompt was lost,
trained twice, or trained too late."""

from functools import partial

import numpy as np
import pytest

from areal_like.types import Group, Sample
from areal_like.wire.groups import Head, encode_group, make_head
from buffer.events import (
    Admit,
    Begin,
    Branch,
    Drop,
    Event,
    Filter,
    Finish,
    Held,
    LeaveOut,
    Push,
    Replan,
    Requeue,
    Serve,
    Snapshot,
)
from buffer.groups import GroupManager
from buffer.journal import JournalError, Record
from buffer.policies import in_order
from buffer.prompts import PromptCursor
from buffer.staleness import Bound
from scripts.ledger import ACTIVE, TRAINED, Audit, Books, bias
from tests.buffer.paper import Paper


def group(group_id: int, length: int, reward: float) -> tuple[Head, bytes]:
    arrays = np.zeros(length + 1, np.int32), np.zeros(length, np.float32), np.ones(length, bool)
    sample = Sample(arrays[0], 1, arrays[1], arrays[2], [(0, length)], reward, "stop")
    return encode_group(Group(group_id, [sample], {0: "digest"}))


def played() -> tuple[GroupManager, list[Record], int]:
    """A buffer whose groups have met every fate, its records, and how many of them came before a checkpoint."""
    replay, journal = GroupManager(Bound(3, 2), partial(in_order)), Paper()
    replay.record, records = journal.append, journal.records
    for group_id in range(6):
        replay.admit(group_id, group_id, 1, 1, "a", 0, 0.0)
    for group_id, length in [(0, 10), (1, 20), (2, 300)]:
        replay.push(*group(group_id, length, 0.5), 0, 0.0)
    replay.serve(0)
    replay.finish(0)
    checkpoint = len(records)
    journal.append(replay.store.snapshot())
    replay.drop(2, "stale")
    replay.push(*group(3, 30, 1.0), 0, 0.0)
    replay.commit(Filter(3, "zero_variance"))
    replay.drop(4, "rejected")
    return replay, records, checkpoint


def test_every_group_has_one_fate() -> None:
    replay, records, checkpoint = played()
    whole, cut = Books().read(records), Books().read(records[checkpoint:])
    for accounts in (whole, cut):
        counts = {fate: account.count for fate, account in accounts.items()}
        expected = {TRAINED: 2, "dropped: stale": 1, "filtered: zero_variance": 1, "dropped: rejected": 1, ACTIVE: 1}
        assert counts == expected
        assert sum(counts.values()) == replay.store.ledger()["admitted"]
        assert accounts["dropped: stale"].lengths == [300], "what was dropped is known by its length"
        assert accounts["dropped: rejected"].lengths == []
    assert whole[TRAINED].lengths == [10, 20] and cut[TRAINED].lengths == []


def test_what_was_cut_or_redrawn_is_counted() -> None:
    _, records, _ = played()
    at = next(n for n, record in enumerate(records) if isinstance(record.event, Push))
    records.insert(at, Record(LeaveOut(0, (40, 60), ["reward crashed: it's late", "reward crashed: it's late"])))
    books = Books()
    accounts = books.read(records)
    assert accounts[TRAINED].cut == books.redrawn["reward crashed: it's late"] == 2
    assert bias(accounts) == pytest.approx(15 / np.mean([10, 40, 60, 20, 300, 30]) - 1)


B, ROWS = 2, 5


def push(group_id: int, version: int = 0, digest: str = "d") -> Push:
    head = make_head(group_id, [(1, 2, 0, 1, 0.5)], [(version, 2)], {version: f"{digest}{version}"})
    return Push(head, version, "a")


def admit(group_id: int) -> Admit:
    cursor = PromptCursor(ROWS, seed=0, position=group_id)
    return Admit(*cursor.next()[:2], 1, 1, "a", 0)


def serve(batch: int, *ids: int) -> Serve:
    return Serve(batch, list(ids), 0)


def snapshot(trained: int, dropped: dict[str, int], *active: int) -> Snapshot:
    groups = [Held(each, 0, 0, 1, 1, "running", "", 0, (), -1, 0, -1, "", False, None, None, None) for each in active]
    fates = {"admitted": 4, "trained": trained, **{f"dropped: {reason}": n for reason, n in dropped.items()}}
    return Snapshot({"": fates}, 0, 0, (0, []), (1, 0, [0]), None, {}, {}, groups)


def audited(*events: Event) -> Audit:
    return Audit(PromptCursor(ROWS, seed=0), Bound(1, B)).read([Record(event) for event in events])


START = [admit(0), admit(1), admit(2), admit(3), push(1), push(0), serve(0, 0, 1), Finish(0)]


def test_a_run_that_crashed_and_trained_a_batch_again_is_in_order() -> None:
    journal, replay = Paper(), GroupManager(Bound(1, B), partial(in_order))
    replay.record = journal.append
    cursor = PromptCursor(ROWS, seed=0)
    for _ in range(8):
        replay.admit(*cursor.next()[:2], 1, 1, "a", 0, 0.0)
    for group_id in range(4):
        replay.push(make_head(group_id, [(1, 2, 0, 1, 0.5)], [(0, 2)], {0: "d0"}), b"", 0, 0.0)
    for batch in (0, 1):
        assert replay.serve(batch)
        replay.finish(batch)
    again = GroupManager(Bound(1, B), partial(in_order))
    journal.restore(again, 1)
    assert [entry.id for entry in again.serve(1)] == [2, 3]
    again.finish(1)
    journal.append(again.store.snapshot())
    again.drop(4, "end of run")
    found = audited(*(record.event for record in journal.records))
    assert not any(found.findings.values()), found.findings
    assert found.store.ledger() == again.store.ledger()
    assert found.trained == 2 and found.store.ledger()["dropped"] == {"end of run": 1}


@pytest.mark.parametrize(
    ("rule", "events"),
    [
        ("prompts", [*START, admit(5)]),
        ("prompts", [*START, Admit(4, 99, 1, 1, "a", 0)]),
        ("fates", [*START, push(2), push(2)]),
        ("fates", [*START, Drop(3, "stale"), Filter(3, "zero_variance")]),
        ("fates", [*START, push(2), serve(1, 2, 1)]),
        ("fates", [*START, push(2), serve(1, 2, 3)]),
        ("batches", [*START, push(2), push(3), serve(1, 2, 3), serve(1, 3, 2)]),
        ("batches", [*START, push(2), serve(1, 2, 2)]),
        ("batches", [*START, push(2), push(3), serve(2, 2, 3), Finish(2)]),
        ("batches", [*START, Finish(1)]),
        ("bound", [*START, admit(4), push(2), push(3), serve(2, 2, 3)]),
        ("weights", [*START, push(2, digest="other")]),
        ("ledger", [*START, snapshot(2, {"stale": 1}, 2, 3)]),
        ("ledger", [*START, snapshot(2, {}, 2, 9)]),
    ],
)
def test_what_is_wrong_is_found_under_its_rule(rule: str, events: list[Event]) -> None:
    assert audited(*events).findings[rule]


def test_a_batch_one_of_whose_groups_has_left_may_be_made_anew() -> None:
    first = [push(2), push(3), serve(1, 2, 3), Begin(1), Drop(2, "end of run"), Replan()]
    found = audited(*START, *first, admit(4), push(4), serve(1, 3, 4), Finish(1))
    assert not any(found.findings.values()), found.findings


def test_versions_behind_a_resume_with_other_settings_may_be_others() -> None:
    later = [*START, push(2, version=1), Begin(0), Branch(0, "learner.lr=1 (was 2)"), Requeue(2)]
    assert not audited(*later, push(2, version=1, digest="other")).findings["weights"]
    assert audited(*later, push(2, version=0, digest="other")).findings["weights"], "0 is not behind it"


def test_a_journal_without_its_beginning_proves_nothing() -> None:
    with pytest.raises(JournalError, match="keep_journal"):
        audited(snapshot(2, {}))
