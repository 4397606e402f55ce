"""A time limit for code that runs in the actor's own event loop, whether it waits or computes.

Waiting code is cancelled as usual. Computing code blocks the whole actor, and no task can end it. So every step of the
coroutine, from one await to the next, runs under an interval timer whose signal raises an exception in it. That ends
Python code, also regular expressions. C code that never checks signals continues, and the buffer then counts the actor
as dead. Tasks that the coroutine starts are not timed, except by the limit on all of it.

There is one such timer and one handler of its signal per process, and others use them: SIGTERM's last resort
(`run.process`), and verifiers with limits of their own. So both are restored after each step, and another alarm
that is due sooner, or is set within the step, is left alone.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
AGAIN_SECONDS = 1.0
"""Seconds between repetitions of the exception in code that catches it."""
BREATH_SECONDS = 0.01

_SOON = 1e-6


class Overtime(TimeoutError):
    """A coroutine exceeded a limit; the text says which."""


class _Overrun(BaseException):
    """Raised by the timer; not an Exception, so that a verifier's own `except Exception` lets it through."""


async def within(seconds: float, step_seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine, and return its result, if all of it takes at most `seconds` and no step between two awaits
    more than `step_seconds` (infinity: no limit). Raises Overtime otherwise, and whatever the coroutine raises. The
    limit of steps works in the main thread only, where Python handles signals; it uses SIGALRM."""
    limit = asyncio.timeout(seconds if seconds < math.inf else None)
    try:
        async with limit:
            return await _Steps(coroutine, step_seconds)
    except TimeoutError:
        if limit.expired():
            raise Overtime(f"it took more than {seconds:g} s") from None
        raise
    except _Overrun:
        raise Overtime(f"it kept the actor busy for more than {step_seconds:g} s") from None


class Breathing:
    """`within`, with a pause after each overrun, in which no other call begins: many samples may continue in the same
    turn of the loop, and the actor must send a heartbeat between any two overruns."""

    def __init__(self) -> None:
        self._overran = -math.inf

    async def within(self, seconds: float, step_seconds: float, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        while time.monotonic() - self._overran < BREATH_SECONDS:
            await asyncio.sleep(BREATH_SECONDS)
        try:
            return await within(seconds, step_seconds, make())
        except Overtime:
            self._overran = time.monotonic()
            raise


class _Steps:
    """Awaits a coroutine, step by step."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], seconds: float):
        self._coroutine, self._seconds = coroutine, seconds

    def __await__(self) -> Generator[Any, Any, Any]:
        resume, value = self._coroutine.send, None
        while True:
            try:
                waits_for = self._timed(resume, value)
            except StopIteration as done:
                return done.value
            except _Overrun:
                self._coroutine.close()  # the signal may have come between the end of the step and that of the timer
                raise
            try:
                resume, value = self._coroutine.send, (yield waits_for)
            except BaseException as error:  # a cancellation, mostly: the coroutine's to deal with
                resume, value = self._coroutine.throw, error

    def _timed(self, resume: Callable[[Any], Any], value: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or self._seconds == math.inf:
            return resume(value)
        before = signal.signal(signal.SIGALRM, _overrun)
        left, every = signal.setitimer(signal.ITIMER_REAL, self._seconds, AGAIN_SECONDS)
        begin = time.monotonic()
        if 0 < left < self._seconds:
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, left, every)
            return resume(value)
        try:
            return resume(value)
        finally:
            new, again = signal.setitimer(signal.ITIMER_REAL, 0)
            if signal.getsignal(signal.SIGALRM) is _overrun:
                signal.signal(signal.SIGALRM, before)
            if new and not again:  # ours is raised again and again, so this is an alarm that was set within the step
                signal.setitimer(signal.ITIMER_REAL, new)
            elif left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begin), _SOON), every)


def _overrun(number: int, frame: Any) -> None:
    raise _Overrun
