"""Threads that take turns: of the roles of an inline run (`areal_like.launch.inline`) one runs at a time.

A thread gives up its turn when it waits: for a message, for a time, for another thread. The turn goes to the next
thread with something to do, in the order in which they joined. So nothing else runs while a user steps through a role,
and the order of events depends on the messages alone. For threads of other processes all functions are plain waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

CHECK_SECONDS = 0.1
"""Seconds between checks for an interrupt while a thread waits for its turn."""
FOR_EVER = 1e7

_this = threading.local()


class Member:
    """A thread that takes turns: the event that it awaits, and the exception that its next wait raises, if any."""

    def __init__(self, turns: TurnOrder, name: str):
        self.turns, self.name = turns, name
        self.descriptors: tuple[int, ...] = ()
        self.until = 0.0
        self.error: BaseException | None = None
        self._go = threading.Semaphore(0)
        self.go = self._go.release

    def await_turn(self, check: Callable[[], None] | None = None) -> None:
        """Wait for the turn. Calls `check` now and then; if it raises, the wait ends without the turn."""
        while not self._go.acquire(timeout=CHECK_SECONDS if check else None):
            if check:
                check()


class Wake:
    """A `descriptor` that any thread makes readable; `clear` makes it unreadable. An eventfd, or where the system has
    none a pipe."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.descriptor = self._end = os.eventfd(0, os.EFD_NONBLOCK)
            return
        self.descriptor, self._end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._end, False)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is readable
            os.write(self._end, (1).to_bytes(8, sys.byteorder))

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.descriptor, 4096)) == 4096:
                pass

    def close(self) -> None:
        for descriptor in {self.descriptor, self._end}:
            os.close(descriptor)


class TurnOrder:
    """The members, in their order, and whose turn it is."""

    def __init__(self) -> None:
        self.over = False
        self._ring: list[Member] = []
        self._news = Wake()  # the ring has changed

    def join(self, name: str, before: Member | None = None) -> Member:
        """Add a member, in front of another one; it has something to do at once."""
        member = Member(self, name)
        self._ring.insert(self._ring.index(before) if before else len(self._ring), member)
        return member

    def end(self) -> None:
        """Stop taking turns: from now on all threads run at once."""
        self.over = True
        self._news.set()
        for member in list(self._ring):
            member.go()

    def close(self) -> None:
        self._news.close()

    def wait(
        self, member: Member, seconds: float, descriptors: Sequence[int], check: Callable[[], None] | None = None
    ) -> None:
        """Let the others have their turns; returns when a descriptor is readable or the time is over, or sooner."""
        member.until, member.descriptors = time.monotonic() + seconds, tuple(descriptors)
        following = self._following(member)
        if not self.over and following is not member:
            following.go()
            member.await_turn(check)

    def _following(self, member: Member) -> Member:
        """The next one that has something to do, waited for."""
        while not self.over:
            place = self._ring.index(member) + 1
            order = self._ring[place:] + self._ring[:place]
            left = min(each.until for each in order) - time.monotonic()
            ready = _readable([self._news.descriptor, *(number for each in order for number in each.descriptors)], left)
            if self._news.descriptor in ready and not self.over:
                self._news.clear()
            now = time.monotonic()
            for each in order:
                if each.until <= now or not ready.isdisjoint(each.descriptors):
                    return each
        return member

    @contextlib.contextmanager
    def left_by(self, member: Member) -> Iterator[None]:
        """Meanwhile the others take turns without it."""
        alone = self._ring == [member]
        place = self._leave(member)
        try:
            yield
        finally:
            member.until = 0.0
            self._ring.insert(place, member)
            if not self.over and not alone:
                self._news.set()
                member.await_turn()

    def run(self, member: Member, call: Callable[[], object]) -> None:
        """In the member's own thread: wait for the first turn, call, and leave for good."""
        _this.member = member
        member.await_turn()
        try:
            call()
        finally:
            self._leave(member)
            _this.member = None

    def _leave(self, member: Member) -> int:
        """The turn goes to the next one. Returns the member's place."""
        place = self._ring.index(member)
        self._ring.remove(member)
        if not self.over and self._ring:
            self._ring[place % len(self._ring)].go()
        return place


def _readable(descriptors: Sequence[int], seconds: float) -> set[int]:
    """Which of them are, waited for."""
    poll = select.poll()
    for number in descriptors:
        poll.register(number, select.POLLIN)
    return {number for number, _ in poll.poll(max(0, math.ceil(1000 * seconds)))}


def current() -> Member | None:
    """The member of the calling thread, or None outside an inline run."""
    return getattr(_this, "member", None)


def become(member: Member | None) -> None:
    """This thread is that member, and has the turn; None: it takes no turns any more."""
    _this.member = member


def wait(seconds: float, *descriptors: int) -> None:
    """Until a descriptor is readable or the time is over, or sooner. Raises the exception that ends this thread."""
    member = current()
    if member is None:
        _readable(descriptors, seconds)
        return
    if not member.turns.over:
        member.turns.wait(member, seconds, descriptors)
    elif member.error is None:
        _readable(descriptors, seconds)
    if member.error is not None:
        error, member.error = member.error, None
        raise error


def sleep(seconds: float, check: Callable[[], None] | None = None) -> None:
    """As `time.sleep`, while others have their turns; `check` is called now and then, and may raise."""
    member, deadline = current(), time.monotonic() + seconds
    if member is None:
        time.sleep(seconds)
        return
    while (left := deadline - time.monotonic()) > 0:
        if check and not member.turns.over:
            member.turns.wait(member, left, (), check)
        else:
            wait(left)


def outside() -> contextlib.AbstractContextManager[None]:
    """Around what blocks this thread: others take turns meanwhile."""
    member = current()
    return contextlib.nullcontext() if member is None or member.turns.over else member.turns.left_by(member)


def thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """A daemon thread, not started yet, that takes turns if this one does. It must be joined `outside` of them."""
    member = current()
    if member is None or member.turns.over:
        return threading.Thread(target=target, name=name, daemon=True)
    helper = member.turns.join(f"{member.name} {name}", before=member)
    return threading.Thread(target=member.turns.run, args=(helper, target), name=helper.name, daemon=True)


class _Selector(selectors.DefaultSelector):
    """An event loop that looks for events gives up its turn."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        member = current()
        if member is None or member.turns.over:
            return super().select(timeout)
        member.turns.wait(member, FOR_EVER if timeout is None else max(0.0, timeout), (self.fileno(),))
        return super().select(0)


def event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop() if current() is None else asyncio.SelectorEventLoop(_Selector())
