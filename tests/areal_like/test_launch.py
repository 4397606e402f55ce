"""The local launcher and its roles, with real processes: restarts, printed lines, and remains."""

import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from areal_like.config import run_config as configs
from areal_like.launch import children, group, ray
from areal_like.launch.children import Children, RestartLimits, Restarts
from areal_like.launch.local import LocalLauncher, spawn_role
from areal_like.launch.outcome import RunFailed, is_from_outside, nothing
from areal_like.launch.plan import RoleSpec, plan
from areal_like.launch.ray import RayLauncher
from areal_like.launch.slurm import SlurmLauncher
from areal_like.places import REPOSITORY, python_path
from areal_like.run.process import EXIT_TERMINATED
from areal_like.run.run_folder import note_step
from tests.actors.test_reward_pool import is_alive as alive
from tests.forked import until

QUICKSTART = "configs/quickstart.yaml"
MODULE = "tests.areal_like.acting_role"


@pytest.mark.parametrize(
    ("overrides", "names", "threads", "forked"),
    [
        ("actors.count=2", "buffer learner actor-0 actor-1", [1, 1, 1, 1], [1, 2, 3]),
        ("actors.count=1 actors.threads=3", "buffer learner actor-0", [1, 3, 3], [1, 2]),
        ("actors.count=1 actors.threads=3 learner.threads=2", "buffer learner actor-0", [1, 2, 3], [1, 2]),
        ("actors.count=1 learner.ranks=3", "buffer learner-1 learner-2 learner actor-0", [1] * 5, [1, 2, 3, 4]),
        ("actors.count=1 engine=timed learner=timed", "buffer learner actor-0", [1] * 3, []),
        ("actors.count=1 learner.device=cuda", "buffer learner actor-0", [1] * 3, [2]),
    ],
)
def test_the_plan_starts_the_buffer_first_lets_only_actors_die_and_forks_models_on_the_cpu(
    overrides: str, names: str, threads: list[int], forked: list[int]
) -> None:
    roles = plan(configs.load([QUICKSTART, *overrides.split()]))
    assert [role.name for role in roles] == names.split() and [role.threads for role in roles] == threads
    assert all(role.essential == (not role.name.startswith("actor")) for role in roles)
    assert [number for number, role in enumerate(roles) if role.imports_torch] == forked


def test_a_users_folders_reach_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which the run is started, and folders that a script or notebook has added."""
    own = tmp_path / "modules"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(own)])
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere{os.pathsep}{REPOSITORY}")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    folders = python_path().split(os.pathsep)
    assert folders[:2] == [str(REPOSITORY), str(tmp_path)] and {str(own), "/elsewhere"} <= set(folders)
    assert len(set(folders)) == len(folders) and not [each for each in folders if each.startswith(f"{sys.prefix}/")]
    made = group.environment(2)
    assert made["PYTHONPATH"] == python_path()
    assert (made["OMP_NUM_THREADS"], made["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    roles = plan(configs.load([f"{REPOSITORY}/configs/copy4.yaml"]))
    submission = SlurmLauncher(tmp_path, RestartLimits(0)).submission(roles)
    assert submission and submission.environment["PYTHONPATH"] == python_path()
    assert f"--chdir={tmp_path}" in submission.command


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_delays_double_and_deaths_that_are_long_ago_do_not_count() -> None:
    clock = Clock()
    counted = Restarts(RestartLimits(max_restarts=4, window=3000.0), clock)
    assert [counted.delay("a") for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    assert counted.delay("b") == 0.0, "each is counted by itself"
    for _ in range(24):
        clock.now += 3600.0
        assert counted.delay("a") == 0.0


def test_a_common_fault_is_one_that_has_struck_each_actor_at_least_twice_in_all() -> None:
    deaths = [("a", "port 1, at 0x7f"), ("a", "port 2, at 0x1"), ("b", "another error"), ("b", "port 3, at 0xab")]
    for actors, struck in {"ab": [False, False, False, True], "a": [False, True]}.items():
        counted = Restarts(RestartLimits(9))
        assert [counted.strikes_all(*death, actors) for death in deaths if death[0] in actors] == struck
    counted = Restarts(RestartLimits(9))
    assert not counted.strikes_all("a", "", "ab") and not counted.strikes_all("b", "", "ab"), "from outside"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    configs.save(configs.load(["configs/quickstart.yaml"]), tmp_path / "config.yaml")
    (tmp_path / "parts").mkdir()
    return tmp_path


class Launcher(LocalLauncher):
    forked = True


@pytest.fixture
def launcher(run_folder: Path) -> Iterator[Launcher]:
    launcher = Launcher(run_folder, RestartLimits(2))
    yield launcher
    launcher.stop()


def start(launcher: Launcher, **parts: str) -> None:
    """Start roles that act by `parts`; those named actor_… may fail."""
    for name, part in parts.items():
        (launcher.running.run / "parts" / name).write_text(part)
    launcher.start([RoleSpec(name, MODULE, 1, not name.startswith("actor"), launcher.forked) for name in parts])


def offered(launcher: Launcher, *names: str) -> bool:
    return all((launcher.running.run / "rendezvous" / f"{name}.json").exists() for name in names)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "FIRST_DELAY", 0.01)


def kill(launcher: Launcher, name: str) -> None:
    if pid := launcher.running.pids.get(name):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("soon")
def test_an_actor_that_dies_too_often_is_left_out_and_the_run_goes_on(launcher: Launcher) -> None:
    start(launcher, buffer="sleep", actor_0="raise", actor_1="sleep")
    note_step(launcher.running.run)
    until("the last death", lambda: launcher.running.poll() or launcher.running.left_out)
    deaths = launcher.running.deaths
    assert {death.error for death in deaths} == {"RuntimeError: out of memory"}
    assert [(death.name, death.count) for death in deaths] == [("actor_0", 1), ("actor_0", 2), ("actor_0", 3)]
    assert not launcher.running.poll() and launcher.running.pids.keys() == {"buffer", "actor_1"}
    with pytest.raises(RunFailed, match="none of 2 actors is left"):
        until("the end", lambda: launcher.running.poll() or kill(launcher, "actor_1"))


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("parts", "stepped", "killed", "told", "resumable"),
    [
        ("buffer=sleep actor_0=raise", True, None, "actor_0 after 2 restarts: RuntimeError: out of memory", True),
        ("buffer=sleep actor_0=raise", False, None, "out of memory.*it fails again", False),
        ("buffer=sleep actor_0=raise actor_1=raise", False, None, "all 2 actors fail alike", False),
        ("actor_0=refuse", False, None, r"^actor_0: this input is no good \(its log: .*actor_0\.log\)$", False),
        ("learner=refuse", True, None, "^learner: this input is no good", False),
        ("learner=fill-the-disk", False, None, r"^learner: No space left on device: make room \(.* MB are free", True),
        ("learner=sleep actor_0=sleep", False, signal.SIGKILL, "learner was killed by SIGKILL; its log is", True),
        ("buffer=sleep actor_0=sleep", False, signal.SIGKILL, "buffer was killed by SIGKILL", True),
        ("learner=sleep", False, signal.SIGTERM, "learner was ended by SIGTERM", True),
    ],
)
def test_the_end_of_a_role_ends_the_run_with_its_reason(
    launcher: Launcher, parts: str, stepped: bool, killed: signal.Signals | None, told: str, resumable: bool
) -> None:
    acts = dict(part.split("=") for part in parts.split())
    start(launcher, **acts)
    if stepped:
        note_step(launcher.running.run)
    if killed:
        first = next(iter(acts))
        until("the start", lambda: offered(launcher, first))
        os.kill(launcher.running.pids[first], killed)
    with pytest.raises(RunFailed, match=told) as failed:
        until("the end", launcher.running.poll)
    assert failed.value.resumable is resumable


def test_an_error_that_may_pass_restarts_the_actor(launcher: Launcher) -> None:
    """TimeoutError is an OSError: neither it nor a ValueError is the user's fault."""
    start(launcher, buffer="sleep", actor_0="fail-once", actor_1="sleep")
    until("the restart", lambda: launcher.running.poll() or offered(launcher, "actor_0", "actor_1"))
    assert [(death.how, death.error) for death in launcher.running.deaths] == [
        ("ended with exit code 1", "TimeoutError: the engine has not answered")
    ]


def test_who_waits_to_be_started_again_keeps_nobody_waiting(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FIRST_DELAY", 3600.0)
    start(launcher, learner="sleep", actor_0="raise", actor_1="sleep")
    until("the second death", lambda: launcher.running.poll() or len(launcher.running.deaths) == 2)
    assert not launcher.running.poll() and "actor_0" not in launcher.running.pids
    shutil.rmtree(launcher.running.run)
    os.kill(launcher.running.pids["learner"], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"the run folder .* is gone.*learner was killed"):
        until("the end", launcher.running.poll)


def test_a_guest_that_is_left_out_ends_nothing(launcher: Launcher) -> None:
    (launcher.running.run / "parts" / "guest").write_text("refuse")
    run = launcher.running.run
    guests = Children(run, RestartLimits(2), lambda role, name: spawn_role(run, role, name), guests=True)
    guests.start([RoleSpec("guest", MODULE, 1, False, False)])
    until("the end of all guests", lambda: guests.poll() or guests.none_left)
    assert "this input is no good" in guests.left_out["guest"]


@pytest.mark.parametrize("forked", [True, False])
def test_stop_ends_those_that_will_not_and_what_they_started(launcher: Launcher, forked: bool) -> None:
    launcher.forked = forked
    start(launcher, actor_0="ignore", actor_1="sleep")
    until("the start", lambda: offered(launcher, "actor_0", "actor_1"))
    pids = [*launcher.running.pids.values(), int((launcher.running.run / "actor_0.child").read_text())]
    sockets = launcher.sockets
    assert all(alive(pid) for pid in pids) and sockets and sockets.path.is_dir()
    with (launcher.running.run / "config.yaml").open() as config, pytest.raises(BlockingIOError):
        fcntl.flock(config, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no resume may begin
    launcher.stop()
    until("the end of all", lambda: not any(alive(pid) for pid in pids))
    assert not sockets.path.exists()


def test_what_a_dead_actor_started_dies_with_it(launcher: Launcher) -> None:
    start(launcher, actor_0="die-with-a-child")
    until("the death", lambda: launcher.running.poll() or launcher.running.deaths)
    child = int((launcher.running.run / "actor_0.child").read_text())
    until("the child's end", lambda: not alive(child))


def alone(run: Path, part: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A role of this test's own."""
    (run / "parts" / "actor_0").write_text(part)
    command = [sys.executable, "-m", MODULE, "--name", "actor_0", "--run", str(run), "--sockets", str(run)]
    return subprocess.Popen([*command, *arguments], cwd=REPOSITORY)


def test_the_end_comes_even_if_the_exception_is_swallowed_and_counts_as_one_from_outside(run_folder: Path) -> None:
    process = alone(run_folder, "swallow")
    until("the start", (run_folder / "rendezvous" / "actor_0.json").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGALRM and is_from_outside(-signal.SIGALRM)


def test_a_role_whose_starter_is_gone_ends_at_once(run_folder: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert alone(run_folder, "sleep", "--starter", str(gone.pid)).wait(60) == EXIT_TERMINATED


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
