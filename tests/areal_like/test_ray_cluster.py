"""Ray clusters that answer, refuse, or stay silent, each played by a process; and nodes that do not answer."""

import logging
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from areal_like.launch import children, ray
from areal_like.launch.children import RestartLimits
from areal_like.launch.outcome import RunFailed, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.ray import RayLauncher
from areal_like.places import REPOSITORY

SILENT = "import time\nprint('Unauthenticated: InvalidAuthToken', file=__import__('sys').stderr, flush=True)\n"
SILENT += "time.sleep(600)"
NONE = "import sys\nprint('none was found', file=sys.stderr)\nsys.exit(3)"


def test_the_address_that_a_cluster_reports_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, found in (("print('something of Ray')\nprint('10.0.0.1:6379')", "10.0.0.1:6379"), (NONE, None)):
        monkeypatch.setattr(ray, "_PROBE", code)
        assert ray.answering("auto", nothing) == found


@pytest.mark.parametrize(
    ("code", "address", "reason"),
    [
        (NONE, "10.0.0.1:6379", r"launcher.address=10.0.0.1:6379: .*none was"),
        (SILENT, "auto", r"wants a token.* launcher.address=local"),  # the user may mean a cluster that is down
    ],
)
def test_a_cluster_that_was_meant_and_does_not_answer_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, code: str, address: str, reason: str
) -> None:
    monkeypatch.setattr(ray, "_PROBE", code)
    with pytest.raises(RunFailed, match=reason):
        ray.answering(address, nothing, 1.0)


def test_a_signal_ends_the_wait_for_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_PROBE", SILENT)
    with pytest.raises(InterruptedError):
        ray.answering("auto", Mock(side_effect=InterruptedError), 600.0)


HOST = """
import sys, time
from areal_like.launch.ray_host import Host
Host().begin(["-c", "import time; time.sleep(600)"], 1, sys.argv[1], ("127.0.0.1", int(sys.argv[2])))
print("begun", flush=True)
time.sleep(600)
"""


def test_a_host_ends_when_its_starter_does_though_nobody_tells_it(tmp_path: Path) -> None:
    """As when Ray's head ends with the starter. Nobody accepts the connection: the kernel keeps it open."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        command = [sys.executable, "-c", HOST, str(tmp_path / "actor-0"), str(held.getsockname()[1])]
        host = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert host.stdout and host.stdout.readline() == "begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            host.wait(0.5)
        role = psutil.Process(host.pid).children()[0]
    try:
        assert host.wait(60) == 1
    finally:
        host.kill()
        role.kill()  # this one has not asked to end with its starter


SILENT_ROLE = Mock(pid=0, **{"poll.return_value": None, "wait.side_effect": subprocess.TimeoutExpired("role", 0.1)})
"""A role's process on a node that does not answer."""
ENDED_ROLE = Mock(pid=0, **{"poll.return_value": None})


def test_a_node_that_does_not_answer_is_named_and_the_rest_is_cleared_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(children, "KILL_SECONDS", 0.1)
    launcher = RayLauncher(tmp_path, RestartLimits(1))
    launcher.running = children.Children(
        tmp_path, RestartLimits(1), lambda role, name: SILENT_ROLE if name == "learner" else ENDED_ROLE, on_nodes=True
    )
    launcher.running.start([RoleSpec("learner", "", 1, True), RoleSpec("actor-0", "", 1, False)])
    launcher._held = held = socket.create_server(("127.0.0.1", 0))
    with caplog.at_level(logging.WARNING):
        launcher.stop()
    assert held.fileno() == -1, "the hosts that can be reached end by it"
    assert [record.getMessage() for record in caplog.records] == [
        "learner: killed, and no end is known after 0.1 s; it may still run"
    ]
    assert launcher.running.none_left
