"""The local launcher and its roles, with real processes: restarts, printed lines, and remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_like.config import run_config as configs
from areal_like.launch import group, restarts
from areal_like.launch.children import Children
from areal_like.launch.local import LocalLauncher, spawn_role
from areal_like.launch.outcome import RunFailed, is_from_outside
from areal_like.launch.plan import RoleSpec, describe, plan
from areal_like.launch.restarts import RestartLimits
from areal_like.launch.slurm import SlurmLauncher
from areal_like.places import REPOSITORY, python_path
from areal_like.run.process import EXIT_TERMINATED
from areal_like.run.run_folder import note_step

MODULE = "tests.areal_like.acting_role"


def until(what: str, event: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 200.0
    while time.monotonic() < deadline:
        if result := event():
            return result
        time.sleep(0.01)
    raise AssertionError(f"waited in vain for {what}")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_users_folders_reach_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which the run is started, and folders that a script or notebook has added: for local, Slurm and Ray
    alike."""
    own = tmp_path / "modules"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(own)])
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere{os.pathsep}{REPOSITORY}")
    folders = python_path().split(os.pathsep)
    assert folders[:2] == [str(REPOSITORY), str(tmp_path)] and {str(own), "/elsewhere"} <= set(folders)
    assert len(set(folders)) == len(folders) and not [each for each in folders if each.startswith(f"{sys.prefix}/")]
    assert group.environment(1)["PYTHONPATH"] == python_path()
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    submission = SlurmLauncher(tmp_path, RestartLimits(0)).submission(
        plan(configs.load([f"{REPOSITORY}/configs/copy4.yaml"]))
    )
    assert submission and submission.environment["PYTHONPATH"] == python_path()
    assert f"--chdir={tmp_path}" in submission.command


def test_the_console_command_finds_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def prefer(batch, denominator, *, strength: float = 2.5):\n    ...\n")
    code = "from scripts.cli import main; main(['config', 'loss.mine:prefer'])"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-P", "-c", code]  # -P: as a console command, which starts in its own folder
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "strength" in done.stdout and "2.5" in done.stdout, done.stderr


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


def test_the_plan_starts_the_buffer_first_and_lets_only_actors_die() -> None:
    roles = plan(configs.load(["configs/quickstart.yaml", "actors.count=3"]))
    assert [role.name for role in roles] == ["buffer", "learner", "actor-0", "actor-1", "actor-2"]
    assert [role.name for role in roles if role.essential] == ["buffer", "learner"]


def test_the_learner_may_have_threads_of_its_own() -> None:
    """The number of threads decides the last bits of a sum, so idle cores of the actors don't change it."""
    config = ["configs/quickstart.yaml", "actors.count=1", "actors.threads=3"]
    for more, threads in ([], [1, 3, 3]), (["learner.threads=2"], [1, 2, 3]):
        assert [role.threads for role in plan(configs.load([*config, *more]))] == threads


def test_threads_that_wait_sleep_unless_the_person_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    made = group.environment(2)
    assert (made["OMP_NUM_THREADS"], made["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert group.environment(2)["OMP_WAIT_POLICY"] == "ACTIVE"


def test_other_ranks_of_the_learner_are_processes_before_it_which_may_not_die() -> None:
    roles = plan(configs.load(["configs/quickstart.yaml", "actors.count=1", "learner.ranks=3"]))
    assert [role.name for role in roles] == ["buffer", "learner-1", "learner-2", "learner", "actor-0"]
    assert [role.name for role in roles if not role.essential] == ["actor-0"]
    assert describe(roles).count("learners.follower") == 2
    part = SlurmLauncher(Path("run"), RestartLimits(0), learner_part={"gpus-per-task": 1}, actors_part={}).parts(roles)[
        0
    ]
    assert (part.tasks, part.cpus, part.options) == (1, 4, {"gpus-per-task": 3}), "all ranks on one node"


def test_the_run_is_over_when_the_learner_is_done(launcher: Launcher) -> None:
    start(launcher, buffer="sleep", learner="done", actor_0="sleep")
    until("the learner's end", launcher.running.poll)
    pids = list(launcher.running.pids.values())
    assert len(pids) == 2
    launcher.stop()
    assert not any(alive(pid) for pid in pids)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.01)


@pytest.mark.usefixtures("soon")
def test_an_actor_that_dies_too_often_is_left_out_and_the_run_goes_on(launcher: Launcher) -> None:
    start(launcher, buffer="sleep", actor_0="raise", actor_1="sleep")
    note_step(launcher.running.run)
    until("the last death", lambda: launcher.running.poll() or launcher.running.left_out)
    assert [str(death) for death in launcher.running.deaths] == [
        "actor_0 ended with exit code 1 (RuntimeError: out of memory): started again (restart 1)",
        "actor_0 ended with exit code 1 (RuntimeError: out of memory): started again in 0 s (restart 2)",
        "actor_0 ended with exit code 1 (RuntimeError: out of memory): left out, after 3 deaths",
    ]
    assert not launcher.running.poll() and launcher.running.pids.keys() == {"buffer", "actor_1"}
    launcher.running.limits = RestartLimits(2, min_alive=2)
    os.kill(launcher.running.pids["actor_1"], signal.SIGKILL)
    with pytest.raises(
        RunFailed, match=r"actor_1 was killed by SIGKILL.*1 of 2 actors are left \(actors\.min_alive=2\)"
    ):
        until("the end", launcher.running.poll)


@pytest.mark.usefixtures("soon")
def test_the_last_actor_that_is_left_out_ends_the_run(launcher: Launcher) -> None:
    start(launcher, buffer="sleep", actor_0="raise")
    note_step(launcher.running.run)
    with pytest.raises(RunFailed, match=r"actor_0 after 2 restarts: RuntimeError: out of memory") as failed:
        until("the end", launcher.running.poll)
    assert failed.value.resumable


def test_an_error_that_may_pass_restarts_the_actor(launcher: Launcher) -> None:
    """TimeoutError is an OSError: neither it nor a ValueError is the user's fault."""
    start(launcher, buffer="sleep", actor_0="fail once", actor_1="sleep")
    until("the restart", lambda: launcher.running.poll() or offered(launcher, "actor_0", "actor_1"))
    assert [(death.how, death.error) for death in launcher.running.deaths] == [
        ("ended with exit code 1", "TimeoutError: the engine has not answered")
    ]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("count", [1, 2])
def test_a_fault_that_strikes_all_actors_before_the_first_step_ends_the_run(launcher: Launcher, count: int) -> None:
    start(launcher, buffer="sleep", **{f"actor_{number}": "raise" for number in range(count)})
    with pytest.raises(RunFailed, match=r"out of memory.*(all 2 actors fail alike|it fails again)") as failed:
        until("the end", launcher.running.poll)
    assert not failed.value.resumable and not launcher.running.left_out


def test_who_waits_to_be_started_again_keeps_nobody_waiting(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY", 3600.0)
    start(launcher, learner="sleep", actor_0="raise", actor_1="sleep")
    until("the second death", lambda: launcher.running.poll() or len(launcher.running.deaths) == 2)
    assert not launcher.running.poll() and "actor_0" not in launcher.running.pids
    os.kill(launcher.running.pids["learner"], signal.SIGKILL)
    with pytest.raises(RunFailed, match="learner was killed"):
        until("the end", launcher.running.poll)


def test_an_actor_is_not_restarted_where_that_would_not_help(launcher: Launcher) -> None:
    start(launcher, actor_0="refuse")
    with pytest.raises(RunFailed, match=r"^actor_0: this input is no good \(its log: .*actor_0\.log\)$") as failed:
        until("the end", launcher.running.poll)
    assert not failed.value.resumable


def test_a_guest_that_is_left_out_ends_nothing(launcher: Launcher) -> None:
    (launcher.running.run / "parts" / "guest").write_text("refuse")
    run = launcher.running.run
    guests = Children(run, RestartLimits(2), lambda role, name: spawn_role(run, role, name), guests=True)
    guests.start([RoleSpec("guest", MODULE, 1, False, False)])
    until("the end of all guests", lambda: guests.poll() or guests.none_left)
    assert "this input is no good" in guests.left_out["guest"]


def test_a_full_disk_is_told_though_the_log_has_no_room(launcher: Launcher) -> None:
    start(launcher, learner="fill the disk")
    with pytest.raises(
        RunFailed, match=r"^learner: No space left on device: make room \(.* MB are free on the disk"
    ) as f:
        until("the end", launcher.running.poll)
    assert f.value.resumable


def test_a_run_folder_that_is_gone_is_named(launcher: Launcher) -> None:
    start(launcher, learner="sleep")
    until("the start", lambda: offered(launcher, "learner"))
    shutil.rmtree(launcher.running.run)
    os.kill(launcher.running.pids["learner"], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"the run folder .* is gone"):
        until("the end", launcher.running.poll)


@pytest.mark.parametrize("name", ["buffer", "learner"])
def test_a_killed_essential_role_ends_the_run(launcher: Launcher, name: str) -> None:
    start(launcher, **{name: "sleep", "actor_0": "sleep"})
    until("the start", lambda: offered(launcher, name))
    os.kill(launcher.running.pids[name], signal.SIGKILL)
    with pytest.raises(RunFailed, match=f"{name} was killed by SIGKILL; its log is .*{name}.log"):
        until("the end", launcher.running.poll)


def test_a_learner_that_was_terminated_is_not_done(launcher: Launcher) -> None:
    start(launcher, learner="sleep")
    until("the start", lambda: offered(launcher, "learner"))
    os.kill(launcher.running.pids["learner"], signal.SIGTERM)
    with pytest.raises(RunFailed, match="learner was told to end by SIGTERM"):
        until("the end", launcher.running.poll)


@pytest.mark.parametrize("forked", [True, False])
def test_stop_ends_those_that_will_not_and_what_they_started(launcher: Launcher, forked: bool) -> None:
    launcher.forked = forked
    start(launcher, actor_0="ignore", actor_1="sleep")
    until("the start", lambda: offered(launcher, "actor_0", "actor_1"))
    pids = [*launcher.running.pids.values(), int((launcher.running.run / "actor_0.child").read_text())]
    assert all(alive(pid) for pid in pids)
    sockets = launcher.sockets
    assert sockets and sockets.path.is_dir()
    launcher.stop()
    until("the end of all", lambda: not any(alive(pid) for pid in pids))
    assert not sockets.path.exists()


def test_what_a_dead_actor_started_dies_with_it(launcher: Launcher) -> None:
    start(launcher, actor_0="die with a child")
    until("the death", lambda: launcher.running.poll() or launcher.running.deaths)
    child = int((launcher.running.run / "actor_0.child").read_text())
    until("the child's end", lambda: not alive(child))


def test_the_end_comes_even_if_the_exception_is_swallowed_and_counts_as_one_from_outside(run_folder: Path) -> None:
    (run_folder / "parts" / "actor_0").write_text("swallow")
    command = [sys.executable, "-m", MODULE, "--name", "actor_0", "--run", str(run_folder)]
    command += ["--sockets", str(run_folder)]
    process = subprocess.Popen(command, cwd=REPOSITORY)
    until("the start", (run_folder / "rendezvous" / "actor_0.json").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGALRM and is_from_outside(-signal.SIGALRM)


def test_a_role_whose_starter_is_gone_ends_at_once(run_folder: Path) -> None:
    (run_folder / "parts" / "actor_0").write_text("sleep")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", MODULE, "--name", "actor_0", "--run", str(run_folder)]
    command += ["--sockets", str(run_folder), "--starter", str(gone.pid)]
    assert subprocess.run(command, cwd=REPOSITORY, timeout=60).returncode == EXIT_TERMINATED
