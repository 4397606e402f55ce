"""Ray clusters that answer, refuse, or stay silent, each played by a process; and impossible placements."""

from __future__ import annotations

import logging
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_like.launch import children, ray_cluster
from areal_like.launch.outcome import RunFailed, nothing
from areal_like.launch.plan import RoleSpec
from areal_like.launch.ray import RayLauncher
from areal_like.launch.restarts import RestartLimits
from areal_like.places import REPOSITORY
from scripts import train

SILENT = "import time\nprint('Unauthenticated: InvalidAuthToken', file=__import__('sys').stderr, flush=True)\n"
SILENT += "time.sleep(600)"


class Interrupted(Exception):
    pass


def played(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(ray_cluster, "_PROBE", code)


def test_the_address_that_a_cluster_tells_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, "print('something of Ray')\nprint('10.0.0.1:6379')")
    assert ray_cluster.answering("auto", nothing) == "10.0.0.1:6379"


def test_no_cluster_is_fine_unless_one_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, "import sys\nprint('none was found', file=sys.stderr)\nsys.exit(3)")
    assert ray_cluster.answering("auto", nothing) is None
    with pytest.raises(RunFailed, match=r"launcher.address=10.0.0.1:6379: no Ray cluster answers there \(none was"):
        ray_cluster.answering("10.0.0.1:6379", nothing)


def test_a_cluster_that_never_answers_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also "auto": the user may mean a cluster that is down."""
    played(monkeypatch, SILENT)
    with pytest.raises(RunFailed, match=r"machine belongs to: no answer within 1 s.* launcher.address=local"):
        ray_cluster.answering("auto", nothing, 1.0)


def test_a_signal_is_heard_while_a_cluster_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, SILENT)

    def check() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        ray_cluster.answering("auto", check, 600.0)


@pytest.mark.parametrize("place", [{"CPU": -1}, {"CPU": "many"}, {"GPU": 1.5}, {"CPU": 0}, {"GPU": float("nan")}])
def test_a_place_that_there_cannot_be_is_refused(place: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"launcher.actor_place: "):
        RayLauncher(Path("runs/a"), RestartLimits(1), actor_place=place)


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        (["launcher=ray", "launcher.actor_place={CPU: -1}"], "launcher.actor_place: CPU: -1 is no amount"),
        (["launcher=slurm", 'launcher.container="\'unclosed"'], "launcher.container: "),
        (["launcher=slurm", "launcher.script=nowhere.sbatch"], "launcher.script: there is no nowhere.sbatch"),
    ],
)
def test_knobs_of_a_launcher_are_checked_before_anything_is_made(knobs: list[str], told: str, tmp_path: Path) -> None:
    arguments = ["configs/quickstart.yaml", f"run.dir={tmp_path}", *knobs]
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        train.prepare(train.parse(arguments), arguments)
    assert not any(tmp_path.iterdir())


def test_the_placement_names_every_resource() -> None:
    launcher = RayLauncher(Path("runs/a"), RestartLimits(1), learner_place={"GPU": 1, "high_memory": 2, "memory": 1000})
    told = launcher.placement([RoleSpec("learner", "learners.main", 3, True), RoleSpec("actor-0", "", 1, False)])
    assert "  learner     3 CPU, 1 GPU, 2 high_memory, 1000 memory\n" in told
    assert "  actor-0     1 CPU\n" in told


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


class Silent:
    """A role's process on a node that does not answer."""

    pid = 0

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float = 5.0, /) -> None:
        raise subprocess.TimeoutExpired(["a role's process"], timeout)

    def send_signal(self, number: signal.Signals) -> None: ...

    def end(self, number: signal.Signals) -> None: ...


class Ended(Silent):
    def wait(self, timeout: float = 5.0, /) -> None: ...


def test_a_node_that_does_not_answer_is_named_and_the_rest_is_cleared_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(children, "KILL_SECONDS", 0.1)
    launcher = RayLauncher(tmp_path, RestartLimits(1))
    launcher.running = children.Children(
        tmp_path, RestartLimits(1), lambda role, name: Silent() if name == "learner" else Ended(), on_nodes=True
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
