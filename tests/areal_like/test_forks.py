"""Forked processes behave as if started with `python -m`, and share one server; folders for local sockets."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.launch import sockets
from areal_like.launch.forks import Forked
from areal_like.launch.group import environment
from areal_like.launch.outcome import RunFailed
from areal_like.launch.sockets import LONGEST, SocketFolder, sweep
from areal_like.places import REPOSITORY
from tests.areal_like.test_launch import alive, launcher, offered, run_folder, start  # noqa: F401 - fixtures
from tests.forked import until

PROBE = """
    import json, os, signal, sys
    from setproctitle import setproctitle
    setproctitle("a title")
    print(json.dumps({
        "argv": sys.argv[1:], "main": __name__, "folder": os.getcwd(), "leader": os.getsid(0), "torch": "torch" in
        sys.modules, "colour": os.environ.get("COLOUR"), "home": os.environ.get("HOME"),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "title": open("/proc/self/cmdline").read(),
        "output": [os.readlink(f"/proc/self/fd/{n}") for n in (1, 2)],
    }))
    sys.exit(7)
"""


def test_a_fork_is_as_a_process_that_was_started(tmp_path: Path) -> None:
    (tmp_path / "a_probe.py").write_text(textwrap.dedent(PROBE))
    log = tmp_path / "role.log"
    variables = environment(3) | {"COLOUR": "red", "PYTHONPATH": str(tmp_path)}
    del variables["HOME"]
    role = Forked("a_probe", ["--name", "x"], variables, log, block=[signal.SIGUSR1])
    assert role.wait(60) == role.poll() == 7, log.read_text()
    found = json.loads(log.read_text())
    assert found.pop("title").rstrip("\0") == "a title"
    assert found == {
        "argv": ["--name", "x"], "main": "__main__", "folder": str(REPOSITORY), "leader": role.pid, "torch": True,
        "colour": "red", "home": None, "blocked": [signal.SIGUSR1], "output": [str(log)] * 2,
    }  # fmt: skip


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[forkserver.ForkServer]:
    """A server that no other test uses, and that imports nothing."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([])
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    yield server
    server._stop()


def test_a_server_that_is_killed_ends_the_run(own_server, launcher) -> None:  # noqa: F811
    start(launcher, learner="sleep", actor_0="sleep")
    until("the start", lambda: offered(launcher, "learner", "actor_0"))
    pids = list(launcher.running.pids.values())
    os.kill(own_server._forkserver_pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="was killed by SIGKILL") as failed:
        until("the end", launcher.running.poll)
    assert failed.value.resumable
    launcher.stop()
    until("the end of all", lambda: not any(alive(pid) for pid in pids))


def test_a_server_starts_where_the_temporary_folder_has_a_long_path(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    code = f"""
from pathlib import Path
from areal_like.launch import forks
from areal_like.launch.group import environment
forks._context.set_forkserver_preload([])
print(forks.Forked("this", [], environment(1), Path({str(tmp_path / "log")!r})).wait(60))
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(long)}, capture_output=True)
    assert done.returncode == 0 and done.stdout == b"0\n", done.stderr


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
