"""Folders for local sockets: short enough for Unix. The next start removes folders whose owner was killed: the owner
locks a file in its folder until it ends, so process ids, which may mislead, are not needed."""

import contextlib
import fcntl
import os
import sys
import tempfile
from pathlib import Path

from areal_like.errors import UserError

LONGEST = 107 if sys.platform == "linux" else 103
"""Bytes in the path of a Unix socket: of 108, on macOS of 104, the last one ends it."""
LONGEST_NAME = 20
"""Room for the names of sockets in such a folder: `/weights`, `/w4194304`, `/socket.new`."""
PREFIX = "areal-"
OWNER = "owner"
SHORT = Path("/tmp")


class SocketFolder:
    """A new folder for sockets. Raises UserError if there is no place for one, OSError."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=short_folder()))
        self._owner = (self.path / f".{OWNER}").open("w", encoding="utf-8")
        fcntl.flock(self._owner, fcntl.LOCK_EX)  # before the file gets its name: it is never unlocked while this runs
        (self.path / f".{OWNER}").rename(self.path / OWNER)

    def remove(self) -> None:
        clear(self.path)
        self._owner.close()


def short_folder() -> Path:
    """The temporary folder, or /tmp: paths of sockets in it stay short enough. Raises UserError."""
    name = len(PREFIX) + 8 + LONGEST_NAME  # mkdtemp adds 8 letters
    wanted = Path(tempfile.gettempdir())
    for place in (wanted, SHORT):
        if len(os.fsencode(place)) + 1 + name <= LONGEST and os.access(place, os.W_OK | os.X_OK):
            return place
    raise UserError(
        f"TMPDIR={wanted} is too long for local sockets (their paths have {LONGEST} bytes at most), and {SHORT} can't "
        "be written: set TMPDIR to a shorter folder, or use buffer.transport=tcp"
    )


def clear(folder: Path) -> None:
    """Remove a folder of sockets, but no other files."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_socket() or path.name == OWNER:
                path.unlink(missing_ok=True)
        folder.rmdir()


def sweep() -> None:
    """Remove this user's folders whose owners are dead. One without an owner's file may not be ours."""
    for place in {Path(tempfile.gettempdir()), SHORT}:
        for folder in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                    continue
                with (folder / OWNER).open(encoding="utf-8") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    clear(folder)
