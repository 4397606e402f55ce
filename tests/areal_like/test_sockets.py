"""Folders for local sockets: their paths are short enough, and those of dead owners are removed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.launch import sockets
from areal_like.launch.sockets import LONGEST, SocketFolder, sweep

REPOSITORY = Path(__file__).resolve().parents[2]
OWNER = """
import socket, sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from areal_like.launch.sockets import SocketFolder
folder = SocketFolder()
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(folder.path / "buffer"))
print(folder.path, flush=True)
time.sleep(100)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        monkeypatch.setattr(sockets, "SHORT", Path(place))
        yield Path(place)


def test_folders_of_dead_owners_are_removed_and_no_others(temporary: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(temporary)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout
    left = Path(owner.stdout.readline().strip())
    mine = SocketFolder()
    for name in ("areal-of-an-earlier-version", "areal-", "others"):
        (temporary / name).mkdir()
    sweep()
    assert left.is_dir() and mine.path.is_dir(), "their owners live"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    (left / "what nobody expects").touch()
    sweep()
    assert [path.name for path in left.iterdir()] == ["what nobody expects"], "only sockets are removed"
    mine.remove()
    assert {path.name for path in temporary.iterdir()} == {left.name, "areal-of-an-earlier-version", "areal-", "others"}


@pytest.mark.parametrize("beyond", [0, 1])
def test_paths_of_sockets_are_short_enough(temporary: Path, monkeypatch: pytest.MonkeyPatch, beyond: int) -> None:
    """The longest folder that is taken has room for every socket; one letter more, and a short one takes its place."""
    length = LONGEST - sockets.LONGEST_NAME - len(sockets.PREFIX) - 8 - 1 + beyond
    place = temporary / ("x" * (length - len(os.fsencode(temporary)) - 1))
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    folder = SocketFolder()
    assert folder.path.parent == (temporary if beyond else place)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder.path / ("x" * (sockets.LONGEST_NAME - 1))))
    folder.remove()
    assert [path.name for path in temporary.iterdir()] == [place.name] and not any(place.iterdir())


def test_where_there_is_no_short_folder_one_sentence_says_so(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / ("x" * 100)))
    monkeypatch.setattr(sockets, "SHORT", temporary / "missing")
    with pytest.raises(UserError, match=r"^TMPDIR=.*xx is too long for .*: set TMPDIR to a shorter folder"):
        SocketFolder()
