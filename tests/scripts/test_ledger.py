"""The ledger agrees with the buffer's own, whether the journal is whole or was cut at a checkpoint."""

from functools import partial

import numpy as np
import pytest

from areal_like.types import Group, Sample
from areal_like.wire.groups import Head, encode_group, make_head
from buffer.events import Begin, Filter, Finish, LeaveOut, Push, Serve
from buffer.filters import zero_variance
from buffer.journal import Record
from buffer.policies import in_order
from buffer.replay import Replay
from buffer.staleness import Bound
from scripts.analysis.difficulty import tables
from scripts.analysis.offered import Offer
from scripts.ledger import ACTIVE, TRAINED, Books, bias, reasons, table
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


def test_the_bias_of_a_sampler_and_of_a_filter_is_shown() -> None:
    """Three prompts of pass rates 0, .5 and 1. Then the sampler draws the second one five times, the first one once;
    the filter leaves out the first one's groups."""
    replay, journal = Replay(Bound(9, 3), partial(in_order), group_filter=partial(zero_variance)), Paper()
    replay.record, rewards = journal.append, {0: (0.0, 0.0), 1: (0.0, 1.0), 2: (1.0, 1.0)}
    for group_id, row in enumerate([0, 1, 2, 1, 1, 0, 1, 1, 1]):
        if group_id % 3 == 0:
            replay.open_batch(3, None)
        replay.admit(group_id, row, 1, 1, "a", 0, 0.0, task="sums")
        head = make_head(group_id, [(1, 2, 0, 1, each) for each in rewards[row]], [(0, 2)] * 2, {0: "d"})
        replay.push(head, b"", 0, 0.0)
    assert [entry.id for entry in replay.serve(0)] == [1, 3, 4]
    replay.finish(0)
    books = Books()
    books.read(journal.records)
    for task in ("", "sums"):
        found = books.difficulty.of[task]
        assert found.drawn == {"new": 3, "right": 5, "hard": 1}
        assert found.uniform == {"hard": pytest.approx(2), "right": pytest.approx(2), "easy": pytest.approx(2)}
        assert found.trained == {"new": 1, "right": 2}
        assert found.rolled_out == {"hard": 2, "right": 6, "easy": 1} and +found.kept == {"right": 3}
        assert found.prompts == {0: 2, 1: 6, 2: 1}
    shown = list(tables(books.difficulty.of))
    assert [each if isinstance(each, str) else each.title for each in shown][:3] == [
        "draws by difficulty",
        "groups by difficulty",
        "3 prompts were drawn 9 times, one of them 6 times; the tenth that was drawn most has 66.7% of the draws",
    ]
    assert [list(column.cells) for column in shown[0].columns][4] == ["0.50", "2.50", "0.00", "-"]
    assert [list(column.cells) for column in shown[1].columns][5] == ["0.00", "0.50", "0.00"]
    assert not list(tables(Books().difficulty.of)), "nothing was chosen"


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
