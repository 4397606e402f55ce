"""A wait for a socket that other threads can end."""

import contextlib
import math
import os
import select
import sys


class Wake:
    """`wait` returns when the given descriptor is readable, when another thread calls `set`, or after some seconds. It
    holds an eventfd, or where the system has none a pipe."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._begin = self._end = os.eventfd(0, os.EFD_NONBLOCK)
            return
        self._begin, self._end = os.pipe()
        os.set_blocking(self._begin, False)
        os.set_blocking(self._end, False)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is readable
            os.write(self._end, (1).to_bytes(8, sys.byteorder))

    def wait(self, descriptor: int, seconds: float) -> None:
        poll = select.poll()
        for each in (descriptor, self._begin):
            poll.register(each, select.POLLIN)
        poll.poll(max(0, math.ceil(1000 * seconds)))
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._begin, 4096)) == 4096:
                pass

    def close(self) -> None:
        for descriptor in {self._begin, self._end}:
            os.close(descriptor)
