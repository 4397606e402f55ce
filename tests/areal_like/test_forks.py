"""Roles that are forked from a warm process behave as if started by themselves, and all end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.launch import forks
from areal_like.launch.forks import Forks, ForksGone
from areal_like.launch.local import LocalLauncher
from areal_like.launch.outcome import RunFailed, in_words, nothing
from areal_like.launch.plan import RoleSpec, plan
from areal_like.launch.restarts import RestartLimits
from areal_like.places import REPOSITORY
from areal_like.run.process import EXIT_FORKS_GONE
from tests.areal_like.test_launch import MODULE, alive, offered, until

PROBE = """
    import json, os, signal, sys
    found = {
        "argv": sys.argv[1:], "main": __name__, "folder": os.getcwd(), "parent": os.getppid(), "leader": os.getsid(0),
        "threads": os.environ["OMP_NUM_THREADS"], "colour": os.environ.get("COLOUR"), "warm": "decimal" in sys.modules,
        "blocked": signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)), "open": len(os.listdir("/proc/self/fd")),
    }
    from setproctitle import setproctitle
    setproctitle("a title")
    found["title"] = open("/proc/self/cmdline").read().rstrip("\\0")
    print(json.dumps(found))
    sys.exit(7)
"""


@pytest.fixture(autouse=True)
def quick_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused library, and a fork server that other tests don't share."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(forks, "LIBRARIES", ("decimal",))
    monkeypatch.delenv(forks.VARIABLE, raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Forks]:
    server = Forks(tmp_path)
    yield server
    server.close()


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_probe.py").write_text(textwrap.dedent(PROBE))
    (tmp_path / "a_sleeper.py").write_text("import time\ntime.sleep(100)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_probe"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_fork_is_as_a_process_that_was_started(probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Forks(tmp_path)
    monkeypatch.setenv("COLOUR", "red")  # after the server has started
    log = tmp_path / "role.log"
    role = server.start(probe, ["--name", "x"], 3, log, nothing)
    assert role.wait(60) == role.poll() == 7, log.read_text()
    found = json.loads(log.read_text())
    parent = found.pop("parent")
    assert found == {
        "argv": ["--name", "x", "--parent", str(parent)], "main": "__main__", "folder": str(REPOSITORY),
        "leader": role.pid, "threads": "3", "colour": "red", "warm": True, "blocked": True,
        "files": sorted(["/dev/null", str(log), str(log)]), "open": 4, "title": "a title",
    }  # fmt: skip
    assert alive(parent) and parent != os.getpid()
    assert Path(f"/proc/{parent}/cmdline").read_text().startswith(f"forks areal_like --run {tmp_path} ")
    server.close()
    assert not alive(parent)
    assert not (tmp_path / "logs" / "forks.log").exists(), "it had nothing to say"


def test_ends_are_told_of_each(probe: str, server: Forks, tmp_path: Path) -> None:
    modules = [probe, probe, "a_sleeper", "a_sleeper"]
    roles = [server.start(module, [], 1, tmp_path / "role.log", nothing) for module in modules]
    assert [role.wait(60) for role in roles[:2]] == [7, 7]
    with pytest.raises(subprocess.TimeoutExpired):
        roles[2].wait(0.2)
    roles[2].end(signal.SIGKILL)
    assert roles[2].wait(60) == -signal.SIGKILL
    assert roles[3].poll() is None
    roles[3].send_signal(signal.SIGTERM)
    assert roles[3].wait(60) == -signal.SIGTERM


def test_a_module_that_is_missing_says_so_in_the_roles_log(server: Forks, tmp_path: Path) -> None:
    role = server.start("no.such.module", [], 1, tmp_path / "role.log", nothing)
    assert role.wait(60) == 1
    assert "No module named" in (tmp_path / "logs" / "forks.log").read_text() + (tmp_path / "role.log").read_text()


ENDING = """
    import atexit, sys, threading, time
    class Kept:
        def __del__(self):
            print("taken apart", flush=True)
    kept, unclosed = Kept(), open(__file__ + ".txt", "w")
    unclosed.write("whole")
    atexit.register(print, "handler", end=" ")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread", end=" "))).start()
    END
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, "thread handler"),
        ("sys.exit(259)", 3, "thread handler"),
        ("sys.exit('no more')", 1, "no more"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_fork_ends_with_its_threads_and_handlers_and_is_not_taken_apart(
    probe: str, server: Forks, tmp_path: Path, end: str, code: int, said: str
) -> None:
    (tmp_path / "an_end.py").write_text(textwrap.dedent(ENDING).replace("END", end))
    role = server.start("an_end", [], 1, tmp_path / "role.log", nothing)
    assert role.wait(60) == code
    log = (tmp_path / "role.log").read_text()
    assert said in log and log.rstrip().endswith("thread handler") and "taken apart" not in log
    assert (tmp_path / "an_end.py.txt").read_text() == "whole"


def test_a_fork_ends_without_finalizers_of_what_all_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "import weakref\nclass Kept: pass\nkept = Kept()\nweakref.finalize(kept, print, __name__, 'is gone')\n"
    (tmp_path / "a_library.py").write_text(made)
    (tmp_path / "a_role.py").write_text(f"import a_library\n{made}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forks, "LIBRARIES", ("a_library",))
    server = Forks(tmp_path)
    assert server.start("a_role", [], 1, tmp_path / "role.log", nothing).wait(60) == 0
    server.close()
    assert (tmp_path / "role.log").read_text() == "__main__ is gone\n"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    configs.save(configs.load(["configs/quickstart.yaml"]), tmp_path / "config.yaml")
    (tmp_path / "parts").mkdir()
    for name in ("learner", "actor_0"):
        (tmp_path / "parts" / name).write_text("sleep")
    launcher = LocalLauncher(tmp_path, RestartLimits(2))
    yield launcher
    launcher.stop()


LEARNER, ACTOR = RoleSpec("learner", MODULE, 1, True, True), RoleSpec("actor_0", MODULE, 1, False, True)


def test_a_server_that_is_killed_takes_the_run_along(launcher: LocalLauncher) -> None:
    launcher.start([LEARNER, ACTOR])
    until("the start", lambda: offered(launcher, "learner", "actor_0"))
    pids = launcher.running.pids
    os.kill(parent_of(pids["learner"]), signal.SIGKILL)
    with pytest.raises(RunFailed, match="learner ended with the fork server, which was killed or has died"):
        until("the end", launcher.running.poll)
    until("the end of all", lambda: not any(alive(pid) for pid in pids.values()))


def test_without_a_server_roles_are_started_by_themselves(launcher: LocalLauncher) -> None:
    launcher.start([ACTOR])
    until("the start", lambda: offered(launcher, "actor_0"))
    pid = launcher.running.pids["actor_0"]
    os.kill(parent_of(pid), signal.SIGKILL)
    until("a new one", lambda: launcher.running.poll() or launcher.running.pids.get("actor_0", pid) != pid)
    assert parent_of(launcher.running.pids["actor_0"]) == os.getpid()
    assert [(death.name, death.how) for death in launcher.running.deaths] == [("actor_0", in_words(EXIT_FORKS_GONE))]


def test_where_runs_share_a_server_all_roles_are_forked_but_those_on_gpus(launcher: LocalLauncher) -> None:
    roles = [RoleSpec(name, MODULE, 1, True, gpus=gpus) for name, gpus in (("learner", 0), ("actor_0", 1))]
    with forks.listening():
        launcher.start(roles)
        until("the start", lambda: offered(launcher, "learner", "actor_0"))
    pids = launcher.running.pids
    assert parent_of(pids["actor_0"]) == os.getpid() != parent_of(pids["learner"])


def test_a_server_that_is_gone_starts_nothing(probe: str, server: Forks, tmp_path: Path) -> None:
    role = server.start("a_sleeper", [], 1, tmp_path / "role.log", nothing)
    assert server._server
    server._server.kill()
    with pytest.raises(ForksGone, match="json: the fork server did not start it"):
        server.start("json", [], 1, tmp_path / "role.log", nothing)
    role.end(signal.SIGKILL)  # this one has not asked for a signal when its parent dies
    assert role.wait(60) == EXIT_FORKS_GONE


def test_who_waits_for_imports_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(100)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forks, "LIBRARIES", ("slow_library",))
    server = Forks(tmp_path)

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        server.start("json", [], 1, tmp_path / "role.log", check)
    assert server._server
    server.close()
    assert server._server.returncode == -signal.SIGKILL, "it has not slept to its end"
    assert not (tmp_path / "role.log").exists()


STARTER = """
    import sys, time
    from pathlib import Path
    from areal_like.launch import forks
    forks.LIBRARIES = ("decimal",)
    run = sys.argv[1]
    arguments = ["--name", "actor_0", "--run", run, "--sockets", run]
    server = forks.Forks(Path(run))
    role = server.start("tests.areal_like.acting_role", arguments, 1, Path(run) / "log", lambda: None)
    print(role.pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_outlives_a_starter_that_was_killed(tmp_path: Path, shared: bool) -> None:
    configs.save(configs.load(["configs/quickstart.yaml"]), tmp_path / "config.yaml")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "actor_0").write_text("sleep")

    def start_and_kill() -> None:
        command = [sys.executable, "-c", textwrap.dedent(STARTER), str(tmp_path)]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as starter:
            assert starter.stdout
            pid = int(starter.stdout.readline())
            parent = parent_of(pid)
            assert shared or parent_of(parent) == starter.pid
            starter.kill()
        until("the end of both", lambda: not alive(pid) and not alive(parent))

    if not shared:
        return start_and_kill()
    with forks.listening():
        for _ in range(2):
            start_and_kill()


def test_runs_share_a_server_that_listens_and_do_without_one_that_is_gone(probe: str, tmp_path: Path) -> None:
    def parent_of_parent() -> int:
        server = Forks(tmp_path)
        log = tmp_path / "role.log"
        role = server.start(probe, [], 1, log, nothing)
        role.wait(60)
        parent = json.loads(log.read_text().splitlines()[-1])["parent"]
        above = parent_of(parent)
        server.close()
        until("the end of the run's own server", lambda: not alive(parent))
        return above

    with forks.listening():
        path = os.environ[forks.VARIABLE]
        shared = parent_of_parent()
        assert shared != os.getpid() and parent_of_parent() == shared
        with forks.listening():
            assert os.environ[forks.VARIABLE] == path, "one is enough"
    assert forks.VARIABLE not in os.environ and not Path(path).exists() and not alive(shared)
    os.environ[forks.VARIABLE] = path
    try:
        assert parent_of_parent() == os.getpid()
    finally:
        del os.environ[forks.VARIABLE]


def test_only_roles_with_a_model_on_the_cpu_are_forked() -> None:
    def forked(*overrides: str) -> list[str]:
        config = configs.load(["configs/quickstart.yaml", "actors.count=1", *overrides])
        return [role.name for role in plan(config) if role.imports_torch]

    assert forked() == ["learner", "actor-0"]
    assert forked("learner.ranks=2") == ["learner-1", "learner", "actor-0"]
    assert forked("engine=timed", "learner=timed") == []
    assert forked("learner.device=cuda") == ["actor-0"]
