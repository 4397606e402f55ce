"""How runs start, end and fail, and are inspected, joined, stopped and drained from outside, with real processes:
nothing stays behind, and every end has a reported reason.

The engine and the learner are the timed ones (no model, no torch), so that a run takes a second or two.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.run.metrics import MetricsFollower
from areal_like.wire import keys
from areal_like.wire.link import BusError
from areal_like.wire.supervisor_client import SupervisorClient
from scripts import status, stop
from scripts.following.running import Running
from scripts.ledger import audit
from tests.forked import until
from tests.integration.living import Run, processes, train
from tests.integration.runs import REPOSITORY, rows, summary

pytestmark = pytest.mark.integration

TIMED = ["engine=timed", "learner=timed", "run.target_reward=null", "groups_per_batch=4", "eval.prompts=8"]
ENDLESS = [*TIMED, "learner.base=0.02", "run.steps=100000", "run.trackers=[]"]
WITH_MODEL = ["run.target_reward=null", "run.steps=100000", "eval.prompts=8", "run.trackers=[]"]
"""The quickstart's own model and learner: these roles are forked."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path, as sockets need it."""
    folder = Path(tempfile.mkdtemp(prefix="life-", dir="/tmp"))
    yield folder
    for pid in processes(folder):  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder)


def begin(place: Path, *overrides: str, **how) -> Run:
    """A run with its folder for sockets in `place`."""
    (place / "tmp").mkdir(exist_ok=True)
    return Run(place, *overrides, TMPDIR=str(place / "tmp"), **how)


def left(run: Run) -> dict[int, str]:
    """All processes of this run, except the one started here."""
    return {pid: line for pid, line in processes(run.place).items() if pid != run.process.pid}


def assert_nothing_is_left(run: Run) -> None:
    """No process, socket or rendezvous is left, and the user saw no traceback."""
    assert not left(run) and not (files := list((run.place / "tmp").rglob("*"))), files
    assert not (run.folder / "rendezvous").exists() and "Traceback" not in run.text()


def test_a_run_leaves_its_folder_and_nothing_else(place: Path) -> None:
    run = begin(place, *TIMED, "run.steps=6", "eval.every=2")
    assert run.end() == 0, run.text()
    assert_nothing_is_left(run)
    assert {path.name for path in run.folder.iterdir()} == {
        "checkpoints", "config.yaml", "journal", "lock", "logs", "metrics.jsonl", "published.log", "run.json",
        "samples", "spans", "summary.json", "tb",
    }  # fmt: skip
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert logs == {"actor-0.log", "actor-1.log", "buffer.log", "learner.log"}
    assert [row["step"] for row in rows(run.folder)] == [1, 2, 3, 4, 5, 6]
    assert summary(run.folder)["ledger"]["trained"] == 6 * 4
    record = json.loads((run.folder / "run.json").read_text())
    assert "commit" in record and "configs/quickstart.yaml" in record["command"]
    assert "\x1b" not in run.text(), "control codes although the output is no terminal"
    assert str(run.folder / "checkpoints" / "final") in run.text()


def test_max_seconds_ends_a_run(place: Path) -> None:
    run = train(place, "run", *ENDLESS, "run.max_seconds=0.5")
    assert summary(run)["stopped_because"] == "0.5 seconds have passed"
    assert 0 < summary(run)["steps"] == len(rows(run)) < 100_000


MOMENTS = ["starting", "training", "importing", "training a model"]


def at(moment: str, place: Path) -> Run:
    """A run that has come to this point."""
    run = begin(place, *(ENDLESS if moment in MOMENTS[:2] else WITH_MODEL), fresh=moment == "importing")
    if moment == "starting":
        run.until("the last actor's process", lambda: "actor-1" in run.roles())
    elif moment == "importing":  # torch, for roles that don't exist yet
        run.until("the fork server", lambda: "multiprocessing.forkserver" in children(run))
    else:
        run.until_step(3)
    return run


def children(run: Run) -> str:
    """The command lines of the starter's own children."""
    command = ["ps", "-o", "args=", "--ppid", str(run.process.pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting", signal.SIGTERM),
        ("training", signal.SIGINT),
        ("importing", signal.SIGINT),
        ("training a model", signal.SIGTERM),
    ],
)
def test_a_signal_ends_everything(place: Path, number: signal.Signals, moment: str) -> None:
    run = at(moment, place)
    run.process.send_signal(number)
    run.process.send_signal(number)  # an impatient person
    assert run.end() == 130
    assert f"ended by {number.name}" in run.text()
    assert_nothing_is_left(run)


@pytest.mark.parametrize("moment", MOMENTS)
def test_processes_do_not_outlive_a_killed_starter(place: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    run = at(moment, place)
    run.process.kill()
    run.process.wait()
    until("the end of all", lambda: not left(run))
    if "training" in moment:
        assert list((place / "tmp").iterdir()) == []


def test_a_killed_actor_is_started_again_and_its_groups_are_not_lost(place: Path) -> None:
    run = begin(place, *TIMED, "learner.base=0.02", "run.steps=60", "buffer.heartbeat_timeout=3600")
    run.until_step(3)
    killed = run.kill("actor-1")
    run.until_step(len(rows(run.folder)) + 5)
    learner = run.kill("learner", signal.SIGSTOP)  # so that the run can't end before the actor is back
    run.until("another actor-1", lambda: run.roles().get("actor-1", killed) != killed)
    run.until("its return to the buffer", lambda: run.log("buffer").count("actor-1 joined") == 2)
    os.kill(learner, signal.SIGCONT)
    report = run.finish()
    # Long before the heartbeat's time-out: the supervisor has told it.
    assert "actor-1 was killed by SIGKILL: its" in run.log("buffer")
    assert "actor-1 was killed by SIGKILL: started again (restart 1)" in run.text()
    assert (report["steps"], report["restarts"]) == (60, 1) and report["staleness_max"] <= report["staleness_bound"]
    assert set(report["ledger"]["dropped"]) <= {"end of run"}
    assert_nothing_is_left(run)


def assert_one_error(run: Run, *words: str) -> None:
    """The run ends with one line for a person, and nothing is left."""
    assert run.end() == 1, run.text()
    (error,) = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert all(word in error for word in words), error
    assert_nothing_is_left(run)


def test_keys_that_the_buffer_does_not_list_end_the_run_with_a_reason(place: Path) -> None:
    keys.make(place / "keys")
    (place / "keys" / "clients" / "learner.key").unlink()
    run = begin(place, *TIMED, f"security.key_folder={place / 'keys'}")
    assert_one_error(run, "allow-list", str(place / "keys"))
    assert "refused a connection: its key is not in" in run.log("buffer")


def no_more_bytes(run: Run, role: str, name: str) -> None:
    """From here on no file of a role can grow beyond the size of this one and half a line: like a full disk."""
    size = (run.folder / name).stat().st_size + 100
    resource.prlimit(run.roles()[role], resource.RLIMIT_FSIZE, (size, size))


def test_a_file_that_can_not_grow(place: Path) -> None:
    """The learner's metrics fail in the middle of a row."""
    run = begin(place, *ENDLESS, "buffer.journal=off")
    run.until_step(10)
    no_more_bytes(run, "learner", "metrics.jsonl")
    assert_one_error(run, "learner", "File too large", "metrics.jsonl")
    found = MetricsFollower(run.folder / "metrics.jsonl").new_rows()
    assert found and [row["step"] for row in found] == list(range(1, len(found) + 1))


def test_a_journal_that_can_not_grow_makes_everybody_wait_and_says_so(place: Path) -> None:
    """Nothing is acknowledged that is not recorded: on a full disk the run waits, and ends cleanly when told to."""
    run = begin(place, *ENDLESS, "checkpoint.every=0")
    run.until_step(3)
    no_more_bytes(run, "buffer", f"journal/{max(os.listdir(run.folder / 'journal'))}")
    run.until("the word about the disk", lambda: "wait for the journal's disk" in run.text())
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 130
    assert_nothing_is_left(run)


LIVELY = ["engine=timed", "learner=timed", "learner.base=0.05", "engine.median=8", "groups_per_batch=4"]
SMALL = [*LIVELY, "run.target_reward=null", "eval.prompts=4", "eval.every=0", "run.steps=100000", "run.trackers=[]"]


KEPT = ["checkpoint.every=100000", "buffer.keep_journal=true"]


@pytest.fixture
def live(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run that goes on until it is ended from outside."""
    live = Run(tmp_path, *SMALL, *KEPT, *getattr(request, "param", ()))
    yield live
    live.close()


def test_a_stopped_run_goes_on_and_a_drained_one_has_trained_all_that_it_admitted(
    live: Run, capsys: pytest.CaptureFixture
) -> None:
    live.until_steps(3)
    assert stop.main([str(live.folder)]) == 0
    assert live.end() == 130
    assert "stopped at a checkpoint" in live.text() and f"resume={live.folder}" in live.text()
    done = live.steps()
    assert (live.folder / "checkpoints" / f"step-{done:08d}" / "meta.json").exists()
    assert not (live.folder / "summary.json").exists()

    live.start("resume=auto")
    live.until_steps(3)
    assert stop.main([str(live.folder), "--drain"]) == 0
    found = live.finish()
    assert "finished: it was drained" in live.text()
    assert found["ledger"]["dropped"] == {} and found["ledger"]["trained"] == found["ledger"]["admitted"]
    assert found["reward_after"] is not None
    assert [row["step"] for row in rows(live.folder)] == list(range(1, found["steps"] + 1)), "nothing was trained twice"
    assert (live.folder / "checkpoints" / f"step-{found['steps']:08d}" / "meta.json").exists()
    assert not any(audit(live.folder).findings.values())

    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        stop.main([str(live.folder)])
    assert "its buffer is not running: it has ended" in capsys.readouterr().err
    assert status.main([str(live.folder)]) == 0, "of an ended run: its summary"
    assert "finished: it was drained" in capsys.readouterr().out
    (live.folder / "summary.json").unlink()
    with pytest.raises(SystemExit, match="2"):
        status.main([str(live.folder)])
    assert f"ended without a summary after train step {found['steps']}" in capsys.readouterr().err


@pytest.mark.parametrize("live", [["buffer.transport=tcp"]], indirect=True)
def test_a_run_on_tcp_makes_keys_and_nobody_without_them_gets_in(
    live: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    live.until_steps(3)
    offered = json.loads((live.folder / "rendezvous" / "buffer.json").read_text())
    stranger = SupervisorClient(offered["endpoint"])
    with pytest.raises(BusError, match="asks for keys"):
        stranger.report(30.0)
    stranger.close()
    made = [live.folder / "keys", *(live.folder / "keys").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    actors_only = keys.add_client(live.folder / "keys", "far").rename(tmp_path / "far")
    guests = live.join("--keys", str(actors_only))
    view = Running(live.folder)
    live.until("the guest", lambda: any(name.startswith("guest") for name in view.report()["actors"]))
    view.close()
    capsys.readouterr()
    assert status.main([str(live.folder), "--json", "-", "--keys", str(actors_only)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["actors"].keys() > {"actor-0", "actor-1"} and found["step"]["step"] >= 3
    assert found["report"]["ledger"]["admitted"] >= found["report"]["ledger"]["trained"] >= 4
    assert status.main([str(live.folder)]) == 0 and "staleness" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        stop.main([str(live.folder), "--keys", str(actors_only)])
    assert "a key of role actor may not say 'stop'" in capsys.readouterr().err
    assert stop.main([str(live.folder)]) == 0 and live.end() == 130
    assert guests.wait(60) == 0


def test_usr1_during_the_start_is_not_lost(live: Run) -> None:
    live.until("the buffer", (live.folder / "rendezvous" / "buffer.json").exists)
    live.process.send_signal(signal.SIGUSR1)
    assert live.end() == 75 and "paused at a checkpoint" in live.text()


LINUXS = """
import ctypes, os
from pathlib import Path

for name in [*dir(os)]:
    if name.startswith(("eventfd", "sched_", "posix_fadvise", "fdatasync", "memfd", "pidfd")):
        delattr(os, name)
found, exists = ctypes.CDLL.__getattr__, Path.exists

def without(library, name):
    if name in ("prctl", "mallopt"):
        raise AttributeError(name)
    return found(library, name)

ctypes.CDLL.__getattr__ = without
Path.exists = lambda path, **knobs: not str(path).startswith("/proc") and exists(path, **knobs)
"""


def test_a_run_needs_nothing_that_only_linux_has(tmp_path: Path) -> None:
    """The calls of the standard library that macOS lacks are taken away from all of its processes."""
    (tmp_path / "sitecustomize.py").write_text(LINUXS)
    command = [sys.executable, "-m", "scripts.train", "copy4", f"run.dir={tmp_path / 'runs'}"]
    command += ["run.steps=2", "run.target_reward=null", "eval.prompts=4", "actors.count=1"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in rows(next((tmp_path / "runs").iterdir()))] == [1, 2]
