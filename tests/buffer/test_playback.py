"""What a replay counts and reports."""

from pathlib import Path

from areal_like.groups import make_head
from buffer.events import Finish, Serve
from buffer.journal import Record
from buffer.playback import Playback
from tests.buffer.house import FakeRouter, said
from tests.buffer.paper import rolled_out
from tests.buffer.test_journal import write


def test_a_replay_reports_what_it_has_served_and_what_was_trained(tmp_path: Path) -> None:
    """Two batches of two groups; with two steps per version, batch 2 is trained at version 1."""
    records: list[Record] = []
    for batch in range(3):
        heads = [make_head(2 * batch + at, [(1, 2, 0, 1, 0.0)] * 3, [(0, 2)] * 3, {0: "digest"}) for at in range(2)]
        for head in heads:
            records += rolled_out(head, b"p" * head.size)
        records += [Record(Serve(batch, [head.id for head in heads], 0)), Record(Finish(batch))]
    write(tmp_path, records)
    router = FakeRouter()
    playback = Playback(router, tmp_path, interval=2)

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
    for index in range(3):
        say("want", index=index, version=index // 2)
    say("trained", index=0)
    say("trained", index=0)
    say("trained", index=1)
    found = report()
    assert found["started"] and found["seconds"] > 0 and found["waits"] == []
    assert found["ledger"] == {"admitted": 6, "trained": 4, "filtered": {}, "dropped": {}, "active": 2}
    assert found["staleness_max"] == 1 and found["staleness_mean"] == 6 / 18, "of samples, at the versions of batches"
    versions = [body["version"] for _, kind, body in router.sent if kind == "batch"]
    assert versions == [0, 0, 1]
