"""The ledger agrees with the buffer's own, whether the journal is whole or was cut at a checkpoint."""

from functools import partial

import numpy as np

from areal_like.groups import Head, encode_group
from areal_like.types import Group, Sample
from buffer.events import Begin, Filter, Finish, LeaveOut, Push, Serve
from buffer.journal import Record
from buffer.policies import in_order
from buffer.replay import Replay
from buffer.staleness import Bound
from scripts.ledger import ACTIVE, TRAINED, Books, bias, reasons, table
from scripts.offered import Offer
from tests.buffer.paper import Paper


def group(group_id: int, length: int, reward: float) -> tuple[Head, bytes]:
    arrays = np.zeros(length + 1, np.int32), np.zeros(length, np.float32), np.ones(length, bool)
    sample = Sample(arrays[0], 1, arrays[1], arrays[2], [(0, length)], reward, "stop")
    return encode_group(Group(group_id, [sample], {0: "digest"}))


def played() -> tuple[Replay, list[Record], int]:
    """A buffer whose groups have met every fate, its records, and how many of them came before a checkpoint."""
    replay, journal = Replay(Bound(3, 2), partial(in_order)), Paper()
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


def test_a_batch_that_is_trained_again_after_a_crash_counts_once() -> None:
    _, records, _ = played()
    again = [record for record in records if isinstance(record.event, Serve | Finish)]
    assert Books().read([*records, Record(Begin(0)), *again])[TRAINED].count == 2


def test_what_was_cut_or_redrawn_is_shown_and_counts_as_offered() -> None:
    _, records, _ = played()
    at = next(n for n, record in enumerate(records) if isinstance(record.event, Push))
    records.insert(at, Record(LeaveOut(0, (40, 60), ["reward crashed: it's late", "reward crashed: it's late"])))
    books = Books()
    accounts = books.read(records)
    assert (accounts[TRAINED].cut, len(accounts[TRAINED].redrawn)) == (2, 2)
    assert reasons(accounts) == ["  2 × reward crashed: it's late"]
    shown = [column.header for column in table(accounts).columns]
    assert "cut" in shown and "redrawn" in shown
    assert Offer([10], [40, 60]) in books.offers and Offer([20], []) in books.offers
    assert bias(accounts, books.offers) < 15 / np.mean([10, 40, 60, 20, 300, 30]) - 1 + 1e-9
    early = Books()
    early.read(records, steps=1)
    assert early.accounts[TRAINED].count == 2 and "filtered: zero_variance" not in early.accounts
