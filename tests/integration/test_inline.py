"""Runs in one process (`launcher=inline`): the same weights as with processes, and a person can look inside."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from actors.subscriber import Subscriber
from areal_like.launch import inline
from areal_like.run.api import Run
from areal_like.weights import device
from scripts import ledger
from scripts import train as command
from tests.integration.living import train_in_processes
from tests.integration.runs import REPOSITORY, published, rows, summary, train

pytestmark = pytest.mark.integration

ALONE = ["actors.count=1", "engine.slots=1", "groups_per_batch=4", "run.target_reward=null", "eval.prompts=0"]
"""One sequence at a time: nothing is left to when messages arrive."""
EXACT = ["actors.count=2", "engine.batch_invariant=true", *ALONE[2:]]
"""As many as there are slots, and as exact (`test_replay`)."""
HERE = "tests.integration.looked_into"


def test_the_weights_are_those_of_processes_and_each_resumes_the_other(tmp_path: Path) -> None:
    """Also those of the other mode (`test_replay`): sync in one process, and async at 0 in several."""
    ours, sync, zero = tmp_path / "begun-inline", ["mode=sync", *EXACT], ["scheduler.max_staleness=0", *EXACT]
    whole = train(tmp_path, "whole", *sync, "run.steps=6")
    train(tmp_path, ours.name, *sync, "run.steps=3")
    assert published(ours) == published(whole)[:4]
    train_in_processes(tmp_path, ours.name, *zero, "run.steps=6", f"resume={ours}")
    train(tmp_path, ours.name, *sync, "run.steps=8", f"resume={ours}")
    assert [row["step"] for row in rows(ours)] == list(range(1, 9))
    assert published(ours)[:7] == published(whole)
    for row, other in zip(rows(ours)[:6], rows(whole), strict=True):
        assert all(row[name] == other[name] for name in ("loss", "grad_norm", "reward/mean", "tokens"))
    assert len(set(published(whole))) == 7, "each step has moved the weights"


def test_parts_of_rewards_reach_metrics_and_samples_and_groups_do_without_samples_that_have_none(tmp_path: Path):
    run = train(
        tmp_path, "run", f"task={HERE}:Parted", *ALONE[:-1], "eval.prompts=2", "run.steps=4", "sizing.group_size=4"
    )
    for row in rows(run):
        assert row["reward/mean"] == pytest.approx(row["reward/part/place"] + 0.5 * row["reward/part/even"])
    assert summary(run)["faults"]["rewards/unscored"] > 0 and "rewards/unverified" not in summary(run)["faults"]
    kept = [sample for sample in Run(run).samples() if sample.parts]
    assert kept and all(sample.reward == sample.parts["place"] + 0.5 * sample.parts["even"] for sample in kept)
    counts = {
        group: [each.group for each in Run(run).samples()].count(group) for group in {each.group for each in kept}
    }
    assert set(counts.values()) & {2, 3}, "a group is trained without them"
    assert summary(run)["steps"] == 4 and ledger.main([str(run), "--verify"]) == 0


@pytest.mark.parametrize("more", [[], ["learner.lora={rank: 2}"]], ids=["whole", "adapters"])
def test_weights_that_stay_on_a_device_are_those_of_the_host(tmp_path: Path, monkeypatch, more: list[str]) -> None:
    """Learner and actor compare, digest and write the bits there, from the first version on and after a resume."""
    common = ["mode=sync", *EXACT, "weights.sweep_every=2", *more]
    host = train(tmp_path, "host", *common, "run.steps=5")
    seen = list[type]()
    monkeypatch.setattr(device, "ON_DEVICE", {"cpu"})
    close = Subscriber.close
    monkeypatch.setattr(Subscriber, "close", lambda each: (seen.append(type(each.replica.state)), close(each)))
    ours = train(tmp_path, "device", *common, "run.steps=3")
    train(tmp_path, ours.name, *common, "run.steps=5", f"resume={ours}")
    assert published(ours) == published(host) and len(set(published(host))) == 6
    assert seen == 4 * [device.DeviceState]
    for row, other in zip(rows(ours), rows(host), strict=True):
        assert all(row.get(name) == other.get(name) for name in ("loss", "publish/delta_bytes", "publish/density"))


def test_an_error_of_a_role_is_the_runs_error_with_its_frames(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="trained: ZeroDivisionError: this loss is broken") as caught:
        train(tmp_path, "run", *ALONE, f"loss={HERE}:broken")
    assert "in broken" in "".join(traceback.format_exception(caught.value)), "its causes are there, with their frames"
    assert "in broken" in (tmp_path / "run" / "logs" / inline.LOG).read_text()
    assert "in broken" in capfd.readouterr().err
    argv = ["configs/quickstart.yaml", "launcher=inline", *ALONE, f"loss={HERE}:broken", f"run.dir={tmp_path}"]
    assert command.main(argv) == 1
    said = capfd.readouterr().err
    assert "in broken" in said and "error: learner: RuntimeError: 1 batches in a row" in said
    assert not roles_that_live()


def roles_that_live() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(("buffer", "learner", "actor"))]


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """The exit code of a run that gets Ctrl-C after a while."""
    monkeypatch.setattr(inline, "END_SECONDS", 1.0)
    log = folder / "run" / "logs" / inline.LOG

    def interrupt() -> None:
        while not (log.exists() and "first lease" in log.read_text()):
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    argv = ["configs/quickstart.yaml", "launcher=inline", f"run.dir={folder}", "run.name=run", *ALONE, *overrides]
    return command.main([*argv, "run.steps=100000"])


@pytest.mark.parametrize(
    "overrides", [["engine=timed", "learner=timed", "learner.base=0.01"], [f"loss={HERE}:endless"]], ids=["run", "loop"]
)
def test_ctrl_c_ends_all_threads_also_one_that_computes_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert interrupted(tmp_path, monkeypatch, *overrides) == 130
    assert not roles_that_live() and signal.getsignal(signal.SIGINT) is before


def at_a_terminal(arguments: list[str], answers: list[tuple[str, str]]) -> tuple[int, str]:
    """Run a command at a terminal of its own; whenever the next expected text appears, send the answer."""
    ours, theirs = pty.openpty()
    # Ray, where a test before this one used it, has its own debugger answer to breakpoint().
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen([sys.executable, *arguments], cwd=REPOSITORY, env=environment, **streams)
    os.close(theirs)
    said, seen = "", 0
    with contextlib.suppress(OSError):  # the other side is closed
        while True:
            said += os.read(ours, 1 << 16).decode(errors="replace")
            if answers and answers[0][0] in said[seen:]:
                os.write(ours, answers.pop(0)[1].encode())
                seen = len(said)
    os.close(ours)
    return process.wait(timeout=60), said


def test_breakpoints_work_in_a_scheduler_a_workflow_a_reward_and_a_loss(tmp_path: Path) -> None:
    """At a terminal, where other runs have a live display; the debugger answers, and the run continues to its end."""
    components = [f"scheduler.name={HERE}:LookedInto", f"workflow={HERE}:workflow", f"loss={HERE}:loss"]
    components += [f"task.name={HERE}:Verified", "task.digits=4"]
    run = [f"run.dir={tmp_path}", "run.name=run", "run.steps=2", *ALONE, *components]
    asked = {"trained_batches": "scheduler", "limits": "workflow", "answer": "verifier", "denominator": "loss"}
    spoken = []
    for name in asked:
        spoken += [("(Pdb) ", f"p 'found', type({name}).__name__, {len(name)} * 1000\r"), ("(Pdb) ", "c\r")]
    code, said = at_a_terminal(["-m", "scripts.train", "configs/quickstart.yaml", "launcher=inline", *run], spoken)
    assert code == 0 and "finished: 2 steps are done" in said, said
    for name in asked:
        assert f"{len(name)}000)" in said, f"{asked[name]}: {said}"
    assert "\x1b[2K" not in said, "a live display draws over the debugger"
