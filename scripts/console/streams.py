"""Standard output that may disappear (`| head -1`, a killed reader, a full disk): the run continues."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


class Lasting:
    """Writes to `stream`. If that fails, it discards all further output, with a note on standard error."""

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
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # also for what is still in its buffer
            with contextlib.suppress(OSError):
                note = f"note: the output can't be written any more ({error.strerror}): continuing without it"
                print(note, file=sys.stderr)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    with contextlib.redirect_stdout(cast(TextIO, Lasting(sys.stdout))):
        yield
