"""A replay of recorded batches: each comes once, whole or in shares, again if it was lost, and is counted."""

from pathlib import Path

from areal_like.wire.groups import make_head
from areal_like.wire.stored import load
from buffer.events import Begin, Finish, Push, Requeue, Serve
from buffer.journal import Record
from buffer.replay_server import ReplayServer, count_batches, recorded_batches
from tests.buffer.house import FakeRouter, said
from tests.buffer.paper import admitted, rolled_out
from tests.buffer.test_journal import write


def train(batch: int, *ids: int) -> list[Record]:
    """Tokens of versions before the batch's third are masked."""
    return [Record(Serve(batch, list(ids), batch // 3)), Record(Finish(batch))]


def test_recorded_batches_come_once_each_and_in_order(tmp_path: Path) -> None:
    """Batch 1 was trained, the run crashed, and it was trained again; group 3 was rolled out twice."""

    def push(group_id: int, payload: bytes) -> Record:
        return Record(Push(make_head(group_id, [(1, 2, 0, 1, 0.0)], [(0, 2)], {0: "digest"}), 0, "a"), payload)

    first = [push(0, b"0"), push(1, b"1"), *train(0, 0, 1), push(2, b"2"), push(3, b"old"), Record(Requeue(3))]
    second = [push(3, b"3"), *train(1, 2, 3), Record(Begin(1)), *train(1, 2, 3), push(4, b"4"), *train(2, 4)]
    third = [push(5, b"5"), Record(Serve(3, [5], 0))]
    write(tmp_path, [Record(Begin(0)), *map(admitted, range(6)), *first, *second, *third])
    found = [[load(payload) for _, payload in groups] for groups, _ in recorded_batches(tmp_path)]
    assert found == [[b"0", b"1"], [b"2", b"3"], [b"4"]], "batch 3 was served and never trained"
    assert count_batches(tmp_path) == 3


class Playback:
    """The replay of `count` batches of two groups of three samples. The tokens of batch 3 are of version 1."""

    def __init__(self, folder: Path, count: int, **knobs: int):
        records: list[Record] = []
        for batch in range(count):
            made = batch // 3
            rows, runs = [(1, 2, 0, 1, 0.0)] * 3, [(made, 2)] * 3
            heads = [make_head(2 * batch + at, rows, runs, {made: "digest"}) for at in range(2)]
            for head in heads:
                records += rolled_out(head, b"p" * head.size)
            records += train(batch, *(head.id for head in heads))
        write(folder, records)
        self.router = FakeRouter()
        self.server = ReplayServer(self.router, folder, **knobs)

    def say(self, who: str, kind: str, **body: object) -> list[tuple[str, int]]:
        """(receiver, batch) of each batch that this makes the replay send."""
        before = len(self.router.sent)
        self.server.handle(who.encode(), said(kind, body))
        return [(who, body["index"]) for who, kind, body in self.router.sent[before:] if kind == "batch"]

    def report(self) -> dict:
        self.say("learner", "status")
        return self.router.sent[-1][2]["report"]


def test_a_replay_reports_the_batches_that_it_has_served_and_that_were_trained(tmp_path: Path) -> None:
    """Two steps make a version."""
    playback = Playback(tmp_path, 4, interval=2)
    playback.say("learner", "hello", role="learner", name="learner", pid=1, slots=1)
    assert playback.router.sent[-1][1] == "welcome"
    before = playback.report()
    assert not before["started"] and before["seconds"] == before["trained_seconds"] == 0.0 and before["waits"]
    assert before["ledger"] == {"admitted": 0, "trained": 0, "filtered": {}, "dropped": {}, "active": 0}
    for index in range(4):
        playback.say("learner", "want", index=index, version=index // 2)
    for index in (0, 0, 1):
        playback.say("learner", "trained", index=index)
    found = playback.report()
    assert found["started"] and found["seconds"] > 0 and found["waits"] == []
    assert found["ledger"] == {"admitted": 8, "trained": 4, "filtered": {}, "dropped": {}, "active": 4}
    assert found["staleness_max"] == 1 and found["staleness_mean"] == (0 + 0 + 1 + 0) / 4
    sent = [body for _, kind, body in playback.router.sent if kind == "batch"]
    assert [(body["version"], body["oldest_allowed"]) for body in sent] == [(0, 0), (0, 0), (1, 0), (1, 1)]


def test_a_batch_that_was_lost_on_its_way_comes_again(tmp_path: Path) -> None:
    playback = Playback(tmp_path, 3, interval=1)
    for index, comes in ((0, True), (0, True), (1, True), (1, True), (2, True), (3, False), (3, False)):
        assert playback.say("learner", "want", index=index, version=index) == [("learner", index)] * comes


def test_a_rank_gets_its_share_when_it_asks_until_the_batch_is_trained(tmp_path: Path) -> None:
    playback, ask = Playback(tmp_path, 2, interval=1, ranks=2), {"index": 0, "rank": 1}
    assert playback.say("rank-1", "want_share", **ask) == []
    assert playback.say("learner", "want", index=0, version=0) == [("learner", 0), ("rank-1", 0)]
    assert playback.say("rank-1", "want_share", **ask) == [("rank-1", 0)], "it was lost"
    assert playback.say("learner", "want", index=1, version=1) == [("learner", 1)], "the learner asks ahead"
    playback.say("learner", "trained", index=0)
    assert playback.say("rank-1", "want_share", **ask) == [], "it is trained"
    assert playback.say("rank-1", "want_share", index=1, rank=1) == [("rank-1", 1)], "this one is not"
