"""Standard output that may disappear (`| head -1`, a killed reader, a full disk): the run continues."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class Lasting:
    """Writes to `stream`. If that fails, it discards all further output, with a note on standard error."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also for what is still in its buffer
            os.close(nowhere)
        with contextlib.suppress(OSError):
            note = f"note: the output can't be written any more ({error.strerror}): continuing without it"
            print(note, file=sys.stderr)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    with contextlib.redirect_stdout(cast(TextIO, Lasting(sys.stdout))):
        yield
