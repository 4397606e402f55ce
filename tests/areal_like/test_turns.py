"""Threads take turns: one at a time, in order; a thread with nothing to do gets no turn."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from areal_like import turns


class Ring:
    """Members that record their turns; this thread is the last one."""

    def __init__(self) -> None:
        self.turns, self.noted = turns.TurnOrder(), list[str]()
        self.here = self.turns.join("here")
        turns.become(self.here)
        self._threads: list[threading.Thread] = []

    def start(self, name: str, call: Callable[[], object]) -> turns.Member:
        member = self.turns.join(name, before=self.here)
        self._threads.append(threading.Thread(target=self.turns.run, args=(member, call), daemon=True))
        self._threads[-1].start()
        return member

    def until_done(self) -> None:
        deadline = time.monotonic() + 20.0
        while any(thread.is_alive() for thread in self._threads):
            assert time.monotonic() < deadline, self.noted
            turns.sleep(0.01)

    def close(self) -> None:
        self.turns.end()
        turns.become(None)
        for thread in self._threads:
            thread.join(5.0)
        self.turns.close()


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.close()


def test_turns_go_round_in_the_order_of_the_members(ring: Ring) -> None:
    def work(name: str) -> None:
        for _ in range(3):
            ring.noted.append(name)
            time.sleep(0.001)  # others would come in between, if they ran
            ring.noted.append(name)
            turns.wait(0.0)

    for name in ("a", "b", "c"):
        ring.start(name, lambda name=name: work(name))
    ring.until_done()
    assert ring.noted == [*"aabbcc"] * 3


def test_who_waits_is_passed_over_until_there_is_news(ring: Ring) -> None:
    news = os.eventfd(0)

    def wait() -> None:
        turns.wait(100.0, news)
        ring.noted.append("news")

    def tell() -> None:
        for number in range(3):
            ring.noted.append(str(number))
            turns.wait(0.0)
        os.eventfd_write(news, 1)

    ring.start("waits", wait)
    ring.start("tells", tell)
    ring.until_done()
    assert ring.noted == ["0", "1", "2", "news"]
    os.close(news)
