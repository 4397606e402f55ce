"""Forked processes behave as if started with `python -m`, and share one server."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from areal_like.launch.forks import Forked
from areal_like.launch.group import environment
from areal_like.launch.outcome import RunFailed
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
