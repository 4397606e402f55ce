"""Free places of the engine, as the buffer knows them: a sequence counts from its lease until its end is reported."""

import asyncio
from collections.abc import Callable


class Credit:
    """Counts sequences of an engine with `slots` places. `report` gets the number that have ended: once for all that
    end in one turn of the event loop, if there is room for another lease of the smallest size, or nothing runs."""

    def __init__(self, slots: int, report: Callable[[int], None]):
        self._slots, self._report, self._smallest = slots, report, slots
        self._active = self._ended = self._reported = 0
        self._due = False

    def lease(self, launch: int) -> None:
        self._smallest = min(self._smallest, launch)

    def begin(self) -> None:
        self._active += 1

    def end(self) -> None:
        self._active -= 1
        self._ended += 1
        free = self._slots - self._active
        known = free - (self._ended - self._reported)
        if not self._active or free // self._smallest > known // self._smallest:
            self.report_soon()

    def restart(self) -> None:
        """The buffer counts from 0 again. Sequences that still run count against the next leases."""
        self._ended, self._reported = -self._active, 0

    def report_rest(self) -> None:
        """Report ended sequences that the buffer does not know about."""
        if self._reported != self._ended:
            self.report_soon()

    def report_soon(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._report_now)

    def _report_now(self) -> None:
        self._due, self._reported = False, self._ended
        self._report(self._ended)
