"""Answers of a server of weights, over a real socket; the served weights are made up."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_like.weights import server as server_module
from areal_like.weights.history import Hop
from areal_like.weights.replica import NOTHING
from areal_like.weights.server import LATER_SECONDS, WeightServer
from areal_like.wire.bus import Dealer
from areal_like.wire.messages import Chunk, Fetch, Gone, Hops, Later, Message, Refused, Sync, Want

HOP = Hop(4, 5, 10, "checksum")
PAYLOAD = bytes(range(10))
LEADS = Hops(1, 5, [HOP])


class Serving:
    """A server of one part, number 1, and a client. The history is at version 5, with the hop from version 4; `plans`
    are its answers: requested, held → hops (None: there is no history)."""

    def __init__(self, folder: Path):
        self.plans: dict[tuple[int, int], list[Hop] | None] | None = None
        self.server = WeightServer(f"ipc://{folder}/w", None, self.history, progress=itertools.count(7).__next__)
        self.dealer = Dealer(self.server.endpoint, "asks", "server")

    def history(self, part: int) -> SimpleNamespace | None:
        if part != 1 or self.plans is None:
            return None
        payload = lambda base, version: memoryview(PAYLOAD) if (base, version) == (4, 5) else None  # noqa: E731
        return SimpleNamespace(version=5, plan=lambda version, held, _: self.plans[version, held], payload=payload)

    def asked(self, message: Message) -> tuple[Message, list[bytes]]:
        self.dealer.send(message)
        return self.answer()

    def answer(self) -> tuple[Message, list[bytes]]:
        received = self.dealer.receive(timeout=20)
        assert received is not None, "no answer"
        return received.message, [bytes(each) for each in received.payloads]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path)
    yield serving
    serving.dealer.close()
    serving.server.close()


@pytest.mark.parametrize(
    ("plans", "asked", "hops"),
    [
        ({(5, 4): [HOP]}, (5, 4), [HOP]),
        ({(3, 2): [], (5, 2): [HOP]}, (3, 2), [HOP]),
        ({(3, 2): [], (5, 2): None}, (3, 2), []),
        ({(3, NOTHING): []}, (3, NOTHING), []),
        ({(4, 5): []}, (4, 5), []),
    ],
    ids=["the hops", "to the newest", "no way yet to the newest either", "a joiner waits for news", "it is ahead"],
)
def test_a_plan_leads_to_the_version_or_brings_forward(serving, plans, asked, hops) -> None:
    serving.plans = plans
    assert serving.asked(Sync(1, *asked, "digest")) == (Hops(1, asked[0], hops), [])


@pytest.mark.parametrize(("offset", "size", "sent"), [(0, 1, PAYLOAD[:1]), (9, 1, PAYLOAD[9:]), (2, 100, PAYLOAD[2:6])])
def test_a_chunk_is_what_was_asked_for_up_to_a_limit(serving, monkeypatch, offset: int, size: int, sent) -> None:
    monkeypatch.setattr(server_module, "MAX_CHUNK_BYTES", 4)
    serving.plans = {}
    assert serving.asked(Fetch(1, 4, 5, offset, size)) == (Chunk(1, 4, 5, offset), [sent])
    assert serving.server.bytes_sent == len(sent)


def test_what_is_not_there_is_gone_and_what_is_no_request_refused(serving) -> None:
    serving.plans = {(5, 4): [HOP]}
    for asked in (Fetch(0, 4, 5, 0, 1), Fetch(1, 3, 5, 0, 1), Fetch(1, 4, 5, 10, 1), Fetch(1, 4, 5, 0, 0)):
        assert serving.asked(asked) == (Gone(asked.part, 5), []) and serving.server.bytes_sent == 0
    assert isinstance(serving.asked(Want(0, 0))[0], Refused)
    serving.dealer.socket.send(b"no message")
    assert isinstance(serving.answer()[0], Refused)
    assert serving.asked(Sync(1, 5, 4, "digest"))[0] == LEADS, "it goes on"


def test_those_who_wait_get_their_progress_now_and_then_and_in_the_end_their_plan(tmp_path, monkeypatch) -> None:
    clock, looks = [1000.0], itertools.count()
    monotonic = lambda: (next(looks), clock[0])[1]  # noqa: E731
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=monotonic))
    serving = Serving(tmp_path)
    assert serving.asked(Sync(1, 5, 4, "digest")) == (Later(1, 5, 7), []), "no history"
    enough, deadline = next(looks) + 10, time.monotonic() + 20
    while next(looks) < enough:
        assert time.monotonic() < deadline, "nobody looks"
        time.sleep(0.001)
    serving.plans = {(5, 4): None}
    clock[0] += LATER_SECONDS
    assert serving.answer() == (Later(1, 5, 8), []), "once, however many the looks; no plan yet"
    serving.plans = {(5, 4): [HOP]}
    assert serving.answer() == (LEADS, [])
    serving.dealer.close()
    serving.server.close()
