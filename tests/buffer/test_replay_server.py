"""What a replay counts and reports."""

from pathlib import Path

from areal_like.wire.groups import make_head
from buffer.events import Finish, Serve
from buffer.journal import Record
from buffer.replay_server import ReplayServer
from tests.buffer.house import FakeRouter, said
from tests.buffer.paper import rolled_out
from tests.buffer.test_journal import write


def test_a_replay_reports_what_it_has_served_and_what_was_trained(tmp_path: Path) -> None:
    """Batches of two groups of three samples; two steps make a version."""
    records: list[Record] = []
    for batch in range(4):
        made = batch // 3  # the tokens of batch 3 are of version 1, those of the others of version 0
        rows, runs = [(1, 2, 0, 1, 0.0)] * 3, [(made, 2)] * 3
        heads = [make_head(2 * batch + at, rows, runs, {made: "digest"}) for at in range(2)]
        for head in heads:
            records += rolled_out(head, b"p" * head.size)
        records += [Record(Serve(batch, [head.id for head in heads], 0)), Record(Finish(batch))]
    write(tmp_path, records)
    router = FakeRouter()
    playback = ReplayServer(router, tmp_path, interval=2)

    def say(kind: str, **body: object) -> None:
        playback.handle(b"learner", said(kind, body))

    def report() -> dict:
        say("status")
        return router.sent[-1][2]["report"]

    say("hello", role="learner", name="learner", pid=1, slots=1)
    assert router.sent[-1][1] == "welcome"
    before = report()
    assert not before["started"] and before["seconds"] == before["trained_seconds"] == 0.0
    assert before["waits"] == ["the replay waits for the learner"]
    assert before["ledger"] == {"admitted": 0, "trained": 0, "filtered": {}, "dropped": {}, "active": 0}
    for index in range(4):
        say("want", index=index, version=index // 2)
    say("trained", index=0)
    say("trained", index=0)
    say("trained", index=1)
    found = report()
    assert found["started"] and 0 < found["seconds"] < 1000 and found["waits"] == []
    assert found["ledger"] == {"admitted": 8, "trained": 4, "filtered": {}, "dropped": {}, "active": 4}
    assert found["staleness_max"] == 1 and found["staleness_mean"] == (0 + 0 + 1 + 0) / 4
    batches = [body for _, kind, body in router.sent if kind == "batch"]
    assert [body["version"] for body in batches] == [0, 0, 1, 1]
    assert all(0 <= body["info"]["seconds"] < 1000 for body in batches)


def test_a_rank_of_a_replay_gets_its_share_when_it_asks_until_the_batch_is_trained(tmp_path: Path) -> None:
    records: list[Record] = []
    for batch in range(2):
        heads = [make_head(2 * batch + at, [(1, 2, 0, 1, 0.0)], [(0, 2)], {0: "digest"}) for at in range(2)]
        for head in heads:
            records += rolled_out(head, b"p" * head.size)
        records += [Record(Serve(batch, [head.id for head in heads], 0)), Record(Finish(batch))]
    write(tmp_path, records)
    router = FakeRouter()
    playback = ReplayServer(router, tmp_path, 1, ranks=2)

    def say(who: str, kind: str, **body: object) -> list[tuple[str, int]]:
        """(receiver, batch) of what this makes the replay send."""
        before = len(router.sent)
        playback.handle(who.encode(), said(kind, body))
        return [(who, body["index"]) for who, kind, body in router.sent[before:] if kind == "batch"]

    ask = {"index": 0, "rank": 1}
    assert say("rank-1", "want_share", **ask) == []
    assert say("learner", "want", index=0, version=0) == [("learner", 0), ("rank-1", 0)]
    assert say("rank-1", "want_share", **ask) == [("rank-1", 0)], "it was lost"
    assert say("learner", "want", index=1, version=1) == [("learner", 1)], "the learner asks ahead"
    assert say("learner", "trained", index=0) == []
    assert say("rank-1", "want_share", **ask) == [], "it is trained"
    assert say("rank-1", "want_share", index=1, rank=1) == [("rank-1", 1)], "this one is not"
