"""Answers of a server of weights, over a real socket; the served weights are made up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_like.weights import server as server_module
from areal_like.weights.history import Hop
from areal_like.weights.replica import NOTHING
from areal_like.weights.server import LATER_SECONDS, WeightServer
from areal_like.wire.bus import Dealer
from areal_like.wire.messages import Chunk, Fetch, Gone, Hops, Later, Message, Refused, Sync, Want

HOP = Hop(4, 5, 10, "checksum")
PAYLOAD = memoryview(bytes(range(10)))


class Served:
    """A history at version 5, with the hop from version 4; `plans` are its answers: requested, held → hops."""

    def __init__(self, plans: dict[tuple[int, int], list[Hop] | None]):
        self.version, self.plans, self.waited = 5, plans, set[bool]()

    def plan(self, version: int, held: int, digest: str, *, wait: bool = True) -> list[Hop] | None:
        assert digest == "digest"
        self.waited.add(wait)
        return self.plans[version, held]

    def payload(self, base: int, version: int) -> memoryview | None:
        return PAYLOAD if (base, version) == (4, 5) else None


class Serving:
    """A server of one part, number 1, and a client."""

    def __init__(self, folder: Path, progress: Callable[[], int] = int):
        self.history: Served | None = None
        self.server = WeightServer(f"ipc://{folder}/w", None, lambda part: self.history if part else None, progress)
        self.dealer = Dealer(self.server.endpoint, "asks", "server")

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


def wants(version: int, held: int) -> Sync:
    return Sync(1, version, held, "digest")


@pytest.mark.parametrize(
    ("plans", "asked", "hops"),
    [
        ({(5, 4): [HOP]}, (5, 4), [HOP.row()]),
        ({(3, 2): [], (5, 2): [HOP]}, (3, 2), [HOP.row()]),
        ({(3, 2): [], (5, 2): None}, (3, 2), []),
        ({(3, NOTHING): []}, (3, NOTHING), []),
        ({(4, 5): []}, (4, 5), []),
    ],
    ids=["the hops", "to the newest", "no way yet to the newest either", "a joiner waits for news", "it is ahead"],
)
def test_a_plan_leads_to_the_version_or_brings_forward(serving, plans, asked, hops) -> None:
    serving.history = Served(plans)
    assert serving.asked(wants(*asked)) == (Hops(1, asked[0], hops), [])
    assert serving.history.waited == {False}, "the server's thread merges nothing itself"


@pytest.mark.parametrize(
    ("offset", "size", "sent"), [(0, 10, PAYLOAD), (0, 1, PAYLOAD[:1]), (9, 1, PAYLOAD[9:]), (2, 100, PAYLOAD[2:6])]
)
def test_a_chunk_is_what_was_asked_for_up_to_a_limit(serving, monkeypatch, offset: int, size: int, sent) -> None:
    monkeypatch.setattr(server_module, "MAX_CHUNK_BYTES", 4 if size > 10 else 10)
    serving.history = Served({})
    assert serving.asked(Fetch(1, 4, 5, offset, size)) == (Chunk(1, 4, 5, offset), [bytes(sent)])
    assert serving.server.bytes_sent == len(sent)


@pytest.mark.parametrize(
    "asked",
    [Fetch(0, 4, 5, 0, 1), Fetch(1, 3, 5, 0, 1), Fetch(1, 4, 5, 10, 1), Fetch(1, 4, 5, 0, 0)],
    ids=["nothing of that part", "another hop", "beyond its end", "no bytes"],
)
def test_what_is_not_there_is_gone(serving, asked: Fetch) -> None:
    serving.history = Served({})
    assert serving.asked(asked) == (Gone(asked.part, 5), []) and serving.server.bytes_sent == 0


def test_what_is_no_request_for_weights_is_refused(serving) -> None:
    assert serving.asked(Want(0, 0)) == (Refused("weights are served to sync and fetch, not 'want'"), [])
    serving.dealer.socket.send(b"no message")
    (refused, _) = serving.answer()
    assert isinstance(refused, Refused)
    serving.history = Served({(5, 4): [HOP]})
    assert isinstance(serving.asked(wants(5, 4))[0], Hops), "it goes on"


class Clock:
    """Stands still but for `seconds`; `looks` counts the reads."""

    def __init__(self) -> None:
        self.seconds, self.looks = 1000.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.seconds

    def wait_for_looks(self, more: int) -> None:
        looks, deadline = self.looks + more, time.monotonic() + 20
        while self.looks < looks:
            assert time.monotonic() < deadline, "nobody looks"
            time.sleep(0.001)


def test_those_who_wait_hear_now_and_then_how_far_it_is_and_then_get_their_plan(tmp_path, monkeypatch) -> None:
    clock, progress = Clock(), itertools.count(7)
    monkeypatch.setattr(server_module, "time", clock)
    serving = Serving(tmp_path, lambda: next(progress))
    assert serving.asked(wants(5, 4)) == (Later(1, 5, 7), []), "no history"
    clock.wait_for_looks(10)
    serving.history = Served({(5, 4): None})
    clock.seconds += LATER_SECONDS
    assert serving.answer() == (Later(1, 5, 8), []), "once, whatever the number of looks; no plan yet"
    serving.history.plans[5, 4] = [HOP]
    assert serving.answer() == (Hops(1, 5, [HOP.row()]), [])
    assert serving.asked(Fetch(1, 4, 5, 0, 10))[0] == Chunk(1, 4, 5, 0), "nobody is told any more"
    serving.dealer.close()
    serving.server.close()
