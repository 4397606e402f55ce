"""An actor that is asked to end hands its groups back unfinished; other actors continue them, and the result is the
same."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from buffer.events import HandBack
from buffer.journal import scan
from scripts.following.running import Running
from tests.integration.runs import rows, train
from tests.integration.test_resume import pid_of, start, wait_for_step

SYNC = ["mode=sync", "run.steps=2", "run.target_reward=null", "eval.prompts=0", "checkpoint.every=0"]
STILL = ["engine.batch_invariant=true", "learner.lr=1e-9"]
"""Samples that go on after a prefill have other last bits, which the optimizer would enlarge: some steps later, tokens
would differ."""
LONG = ["task.length_trace={median: 250, sigma: 0.3, max: 400}", "groups_per_batch=4"]


def broken_off(folder: Path, *overrides: str) -> Path:
    """A run in which one actor is asked to end in the middle of a round."""
    process = start(folder, "broken", *overrides)
    run = folder / "broken"
    wait_for_step(run, 1, process)
    wait_for_work(run, "actor-1")
    os.kill(pid_of(run, "actor-1"), signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "actor-1 was told to end by SIGTERM: started again" in output
    return run


def wait_for_work(run: Path, actor: str) -> None:
    """Wait until the actor has groups to roll out: between two rounds it has none."""
    running, deadline = Running(run), time.monotonic() + 60
    try:
        while not running.report()["actors"][actor]["running"]:
            assert time.monotonic() < deadline, f"{actor} has got nothing to do"
            time.sleep(0.01)
    finally:
        running.close()
    time.sleep(0.1)  # to begin with them


@pytest.mark.integration
def test_a_sync_run_is_the_same_with_an_actor_that_leaves(tmp_path: Path) -> None:
    undisturbed = train(tmp_path, "undisturbed", *SYNC, *LONG, *STILL)
    run = broken_off(tmp_path, *SYNC, *LONG, *STILL)
    (begun,) = re.findall(r"actor-1 leaves; (\d+) of its", (run / "logs" / "buffer.log").read_text())
    assert int(begun) > 0, "no group was broken off: the test is too quick to show anything"
    handed_back = [event.id for event, _ in scan(run / "journal") if isinstance(event, HandBack)]
    assert len(handed_back) == int(begun)
    for ours, theirs in zip(rows(run), rows(undisturbed), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"], f"step {ours['step']}: other tokens"
        assert ours["response_length/mean"] == theirs["response_length/mean"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6)
        assert ours["staleness/max"] == 0
