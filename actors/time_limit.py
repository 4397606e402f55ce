"""A time limit for code that runs in the actor's own event loop, whether it waits or computes.

What waits is cancelled, as ever. What computes holds up the whole actor, and no task can end it: so every step of the
coroutine, from one await to the next, is made under an interval timer whose signal raises an exception in it. That
ends Python code, regular expressions among it; code in C that never looks at signals goes on, and then the buffer
takes the actor for dead.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
AGAIN_SECONDS = 1.0
"""How often the exception is raised anew in code that has caught it."""


class Overtime(TimeoutError):
    """A coroutine took longer than it might; says which limit that was."""


class _Overrun(BaseException):
    """Raised by the timer; not an Exception, so that a verifier's own `except Exception` lets it through."""


async def within(seconds: float, step_seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns, if all of it takes `seconds` at most and no step between two awaits more than
    `step_seconds`. Raises Overtime otherwise, and whatever the coroutine raises.

    The limit of steps holds in the main thread alone, which is where Python handles signals; it uses SIGALRM.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await _Steps(coroutine, step_seconds)
    except TimeoutError:
        if limit.expired():
            raise Overtime(f"it took more than {seconds:g} s") from None
        raise
    except _Overrun:
        raise Overtime(f"it kept the actor busy for more than {step_seconds:g} s") from None


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
        if threading.current_thread() is not threading.main_thread():
            return resume(value)
        signal.signal(signal.SIGALRM, _overrun)
        signal.setitimer(signal.ITIMER_REAL, self._seconds, AGAIN_SECONDS)
        try:
            return resume(value)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _overrun(number: int, frame: Any) -> None:
    raise _Overrun
