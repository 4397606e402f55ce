"""Files of lines that one process appends to while others read. A process or a disk can fail in the middle of a line:
readers leave an unfinished last line for later and skip a damaged one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class Follower(Generic[T]):
    """Reads the lines of a growing file, each once. `decode` returns None for a damaged line."""

    def __init__(self, path: Path, decode: Callable[[bytes], T | None]):
        self.path, self._decode, self._position = path, decode, 0

    def new_rows(self) -> list[T]:
        return list(self.each_new_row())

    def each_new_row(self) -> Iterator[T]:
        """Like `new_rows`, one at a time: those of a long run fill no memory."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                if (row := self._decode(line)) is not None:
                    yield row


def keep_lines(path: Path, is_kept: Callable[[bytes], bool]) -> None:
    """Remove the other lines of a file, if there is one, and an unfinished last line."""
    if path.is_file():
        beside = path.with_suffix(".tmp")
        with beside.open("wb") as file:
            file.writelines(Follower(path, lambda line: line if is_kept(line) else None).each_new_row())
        beside.replace(path)
