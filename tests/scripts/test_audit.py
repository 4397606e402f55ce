"""The audit finds each way in which a journal can show that a prompt was lost, doubled, or trained too late."""

from functools import partial

import pytest

from areal_like.groups import make_head, pack_heads
from buffer.admission import Bound
from buffer.journal import SNAPSHOT, JournalError, Record
from buffer.policies import in_order
from buffer.prompts import PromptCursor
from buffer.recovery import snapshot
from buffer.replay import Replay
from scripts.audit import Audit
from tests.buffer.paper import Paper

B, ROWS = 2, 5


def push(group_id: int, version: int = 0, digest: str = "d") -> Record:
    head = make_head(group_id, [(1, 2, 0, 1, 0.5)], [(version, 2)], {version: f"{digest}{version}"})
    return Record("push", [pack_heads([head]), version])


def admit(group_id: int) -> Record:
    cursor = PromptCursor(ROWS, seed=0, position=group_id)
    return Record("admit", [*cursor.next(), 1, 1])


def serve(batch: int, *ids: int) -> Record:
    return Record("serve", [batch, list(ids), 0])


def finish(batch: int) -> Record:
    return Record("finish", [batch])


def audited(*records: Record) -> Audit:
    return Audit(PromptCursor(ROWS, seed=0), B, 1, max_staleness=1).read(records)


START = [admit(0), admit(1), admit(2), admit(3), push(1), push(0), serve(0, 0, 1), finish(0)]


def test_a_run_that_crashed_and_trained_a_batch_again_is_in_order() -> None:
    journal, replay = Paper(), Replay(Bound(1, B), partial(in_order))
    replay.record = journal.append
    cursor = PromptCursor(ROWS, seed=0)
    for _ in range(8):
        replay.admit(*cursor.next(), 1, 1, "a", 0, 0.0)
    for group_id in range(4):
        replay.push(make_head(group_id, [(1, 2, 0, 1, 0.5)], [(0, 2)], {0: "d0"}), b"", 0, 0.0)
    for batch in (0, 1):
        assert replay.serve(batch)
        replay.finish(batch)
    again = Replay(Bound(1, B), partial(in_order))
    journal.restore(again, 1)
    assert [entry.id for entry in again.serve(1)] == [2, 3]
    again.finish(1)
    journal.append(SNAPSHOT, snapshot(again))
    again.drop(4, "end of run")
    found = audited(*journal.records)
    assert not any(found.findings.values()), found.findings
    assert found.ledger() == again.ledger()
    assert found.ledger() == {"admitted": 8, "trained": 4, "filtered": {}, "dropped": {"end of run": 1}, "active": 3}


@pytest.mark.parametrize(
    ("rule", "records"),
    [
        ("prompts", [*START, admit(5)]),
        ("prompts", [*START, Record("admit", [4, 99, 1, 1])]),
        ("fates", [*START, push(1)]),
        ("fates", [*START, push(2), push(2)]),
        ("fates", [*START, Record("drop", [0, "stale"])]),
        ("fates", [*START, Record("drop", [3, "stale"]), Record("filter", [3, "zero_variance"])]),
        ("fates", [*START, push(2), serve(1, 2, 1)]),
        ("fates", [*START, push(2), serve(1, 2, 3)]),
        ("batches", [*START, push(2), push(3), serve(1, 2, 3), serve(1, 3, 2)]),
        ("batches", [*START, push(2), serve(1, 2, 2)]),
        ("batches", [*START, push(2), push(3), serve(2, 2, 3), finish(2)]),
        ("batches", [*START, finish(1)]),
        ("bound", [*START, admit(4), push(2), push(3), serve(2, 2, 3)]),
        ("weights", [*START, push(2, digest="other")]),
        ("ledger", [*START, Record(SNAPSHOT, [[4, 2, {}, {"stale": 1}, 0, 0, 0], [], [], [0]])]),
        ("ledger", [*START, Record(SNAPSHOT, [[4, 2, {}, {}, 0, 0, 0], [], [], [0]])]),
    ],
)
def test_what_is_wrong_is_found_under_its_rule(rule: str, records: list[Record]) -> None:
    assert audited(*records).findings[rule]


def test_a_batch_one_of_whose_groups_has_left_may_be_made_anew() -> None:
    records = [push(2), push(3), serve(1, 2, 3), Record("drop", [2, "end of run"]), admit(4), push(4), serve(1, 3, 4)]
    found = audited(*START, *records, finish(1))
    assert not any(found.findings.values()), found.findings


def test_a_journal_without_its_beginning_proves_nothing() -> None:
    with pytest.raises(JournalError, match="keep_journal"):
        audited(Record(SNAPSHOT, [[0, 0, {}, {}, 0, 0, 0], [], [], []]))
