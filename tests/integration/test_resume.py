"""Runs that are killed or ended, and resumed: nothing is trained twice or skipped, and prompts and the result are
the same."""

import re
import signal
import time
from pathlib import Path

import pytest

from areal_like.run.process import EXIT_PAUSED
from buffer.events import Admit, Requeue, Serve
from buffer.journal import Recorded, scan
from buffer.recovery import standing
from scripts.following.running import Running
from scripts.ledger import audit
from tests.integration.living import Run, train
from tests.integration.runs import rows, summary

COMMON = ["run.target_reward=null", "buffer.keep_journal=true", "eval.prompts=4", "eval.every=0"]


def trained_ids(run: Path) -> list[list[int]]:
    """The groups of each batch, from the journal; a batch that was served again must be the same."""
    batches: dict[int, list[int]] = {}
    for event, _ in scan(run / "journal"):
        if isinstance(event, Serve):
            batch, ids = event.batch, event.ids
            assert batches.setdefault(batch, ids) == ids, f"batch {batch} was served with other groups after the crash"
    return [batches[index] for index in sorted(batches)]


@pytest.mark.integration
def test_a_resumed_learner_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Its learner is killed, and the run is paused (SIGUSR1). Synchronous, and no sum depends on which sequences
    share a decode step. So every loss is that of a run without these and with another number of actors, to the last
    bit."""
    overrides = [*COMMON, "mode=sync", "engine.batch_invariant=true", "groups_per_batch=4", "run.steps=9"]
    overrides += ["checkpoint.every=2"]
    undisturbed = train(tmp_path, "undisturbed", "actors.count=1", *overrides)
    live = Run(tmp_path, *overrides, name="killed")
    live.until_step(3)
    live.kill("learner")
    live.end()
    live.start("resume=auto")
    live.until_step(6)
    live.process.send_signal(signal.SIGUSR1)
    assert live.end() == EXIT_PAUSED, live.text()
    live.start("resume=auto")
    assert live.finish()["weights_digest"] == summary(undisturbed)["weights_digest"]
    for ours, theirs in zip(rows(live.folder), rows(undisturbed), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"], f"step {ours['step']}: other tokens"
        assert ours["loss"] == theirs["loss"], f"step {ours['step']}"
    assert not (undisturbed / "checkpoints" / "final" / "adapter").exists()


CHOSEN = ["actors.count=1", "engine.slots=1", "groups_per_batch=4", "run.target_reward=null", "eval.prompts=0"]
CHOSEN += ["buffer.keep_journal=true", "task={name: copy, digits: 2, train_size: 6}"]


@pytest.mark.integration
def test_a_resume_and_async_at_zero_draw_what_the_whole_run_draws(tmp_path: Path) -> None:
    options = [*CHOSEN, "filter=zero_variance"]
    whole = train(tmp_path, "whole", *options, "mode=sync", "run.steps=4")
    zero = train(tmp_path, "zero", *options, "mode=async", "scheduler.max_staleness=0", "run.steps=4")
    begun = train(tmp_path, "begun", *options, "mode=sync", "run.steps=2", "checkpoint.every=2")
    train(tmp_path, "begun", *options, "mode=sync", "run.steps=4", f"resume={begun}")
    drawn = []
    for run in (whole, zero, begun):
        assert summary(run)["weights_digest"] == (whole / "published.log").read_text().split()[-1]
        assert not any(audit(run).findings.values())
        events = [event for event, _ in standing(Recorded(run / "journal", whole=True))]
        drawn.append([event.row for event in events if isinstance(event, Admit)][:16])
        assert set(drawn[-1]) == set(range(6)), "each prompt of the task, some of them again"
    assert drawn[0] == drawn[1] == drawn[2]


TINY = ["mode=sync", "engine.batch_invariant=true", "actors.count=1", "groups_per_batch=4", "eval.prompts=4"]
TINY += ["run.target_reward=null", "eval.every=2"]
SCHEDULED = ["learner.schedule=cosine", "learner.schedule_steps=6", "learner.warmup_steps=1"]


def digest(run: Path) -> str:
    return summary(run)["weights_digest"]


@pytest.mark.integration
def test_a_resumed_run_with_adapters_and_a_schedule_ends_with_the_same_bits(tmp_path: Path) -> None:
    setting = [*TINY, *SCHEDULED, "learner.lora={rank: 2}"]
    whole = train(tmp_path, "whole", *setting, "run.steps=6")
    parted = train(tmp_path, "parted", *setting, "run.steps=3")
    train(tmp_path, "parted", *setting, "run.steps=6", f"resume={parted}")
    assert digest(parted) == digest(whole)
    for key in ("loss", "lr", "grad_norm", "eval/reward"):
        assert [row.get(key) for row in rows(parted)] == [row.get(key) for row in rows(whole)], key
    assert [each["version"] for each in summary(whole)["evaluations"]] == [0, 2, 4, 6]
    assert (whole / "checkpoints" / "final" / "adapter").exists()


SYNC = ["mode=sync", "run.steps=2", "run.target_reward=null", "eval.prompts=0", "checkpoint.every=0"]
LONG = ["engine.batch_invariant=true", "task.length_trace={median: 150, sigma: 0.3, max: 250}", "groups_per_batch=4"]
LONG += ["sizing.group_size=4"]


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
    undisturbed = train(tmp_path, "undisturbed", *SYNC, *LONG)
    run = broken_off(tmp_path, *SYNC, *LONG)
    (left,) = re.findall(r"actor-1 leaves; its (\d+) groups", run.log("buffer"))
    assert int(left) > 0, "no group was broken off: the test is too quick to show anything"
    assert sum(isinstance(event, Requeue) for event, _ in scan(run.folder / "journal")) >= int(left)
    for ours, theirs in zip(rows(run.folder), rows(undisturbed), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"], f"step {ours['step']}: other tokens"
        assert ours["response_length/mean"] == theirs["response_length/mean"]
        assert ours["loss"] == theirs["loss"]
        assert ours["staleness/max"] == 0
