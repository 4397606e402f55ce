"""An actor that is asked to end hands its groups back unfinished; other actors continue them, and the result is the
same."""

import re
import signal
import time
from pathlib import Path

import pytest

from buffer.events import HandBack
from buffer.journal import scan
from scripts.following.running import Running
from tests.integration.living import Run
from tests.integration.runs import rows, train

SYNC = ["mode=sync", "run.steps=2", "run.target_reward=null", "eval.prompts=0", "checkpoint.every=0"]
STILL = ["engine.batch_invariant=true", "learner.lr=1e-9"]
"""Samples that go on after a prefill have other last bits, which the optimizer would enlarge: some steps later, tokens
would differ."""
LONG = ["task.length_trace={median: 250, sigma: 0.3, max: 400}", "groups_per_batch=4"]


def broken_off(folder: Path, *overrides: str) -> Run:
    """A run in which one actor is asked to end in the middle of a round: between two rounds it has no groups."""
    run = Run(folder, *overrides, "buffer.keep_journal=true", name="broken")
    run.until_step(1)
    running = Running(run.folder)
    run.until("groups to roll out", lambda: running.report()["actors"]["actor-1"]["running"])
    running.close()
    time.sleep(0.1)  # to begin with them
    run.kill("actor-1", signal.SIGTERM)
    assert run.end() == 0 and "actor-1 was ended by SIGTERM: started again" in run.text(), run.text()
    return run


@pytest.mark.integration
def test_a_sync_run_is_the_same_with_an_actor_that_leaves(tmp_path: Path) -> None:
    undisturbed = train(tmp_path, "undisturbed", *SYNC, *LONG, *STILL)
    run = broken_off(tmp_path, *SYNC, *LONG, *STILL)
    (begun,) = re.findall(r"actor-1 leaves; (\d+) of its", run.log("buffer"))
    assert int(begun) > 0, "no group was broken off: the test is too quick to show anything"
    handed_back = [event.id for event, _ in scan(run.folder / "journal") if isinstance(event, HandBack)]
    assert len(handed_back) == int(begun)
    for ours, theirs in zip(rows(run.folder), rows(undisturbed), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"], f"step {ours['step']}: other tokens"
        assert ours["response_length/mean"] == theirs["response_length/mean"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6)
        assert ours["staleness/max"] == 0
