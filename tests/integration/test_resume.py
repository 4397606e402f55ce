"""Runs that are killed and resumed: nothing is trained twice or skipped, and the result is the same."""

import signal
from pathlib import Path

import pytest

from areal_like.run.process import EXIT_PAUSED
from buffer.events import Serve
from buffer.journal import scan
from tests.integration.living import Run
from tests.integration.runs import rows, summary, train

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
