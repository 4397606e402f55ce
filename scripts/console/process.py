"""What ends a command or its output: signals, which it takes when it can; a reader of its output that is gone."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


class Interrupted(Exception):
    """The user or the system asked the run to end."""


class Signals:
    """Records the signal that asked the run to end, and SIGUSR1, which asks for a checkpoint first. It raises nothing,
    so it can't interrupt a start or a clean-up. `close` restores the earlier handlers, as the process may continue."""

    def __init__(self) -> None:
        self.received = ""
        self._pause = False
        self._before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks to ignore it
                self._before[number] = signal.signal(number, self._record)

    def _record(self, number: int, frame: Any) -> None:
        if number == signal.SIGUSR1:
            self._pause = True
        else:
            self.received = self.received or signal.Signals(number).name

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_pause(self) -> bool:
        """Has a signal asked for a pause since the last call?"""
        asked, self._pause = self._pause, False
        return asked

    def check(self) -> None:
        """Raises Interrupted."""
        if self.received:
            raise Interrupted(self.received)


class Lasting:
    """Writes to `stream`. After a failure (`| head -1`, a full disk) it discards output; standard error has a note."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except OSError as error:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w", encoding="utf-8") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # also for what is still in its buffer
            with contextlib.suppress(OSError):
                note = f"note: the output can't be written any more ({error.strerror}): continuing without it"
                print(note, file=sys.stderr)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    with contextlib.redirect_stdout(cast(TextIO, Lasting(sys.stdout))):
        yield
