"""Gradients of groups while their round still runs, in real processes: crashes within a round, and replays."""

import os
import signal
from pathlib import Path

import pytest

from areal_like.wire.groups import Head
from buffer.events import Push
from buffer.journal import scan
from tests.integration.runs import rows, summary, train
from tests.integration.test_resume import pid_of, start, trained_ids, wait_for_step

STREAM = [
    "mode=sync",
    "task.length_trace={median: 20, sigma: 1.0, noise: 0.6, max: 200}",
    "scheduler.oversample_prompts=1.25",
    "sizing={name: sagc, group_size: 8, candidates: [4, 8, 16]}",
    "learner.stream=true",
    "engine.slots=256",
    "groups_per_batch=8",
    "learner.num_minibatches=1",
    "run.target_reward=null",
    "eval.every=0",
    "eval.prompts=8",
]


def heads_of(run: Path) -> dict[int, Head]:
    """The heads of all pushed groups; the newest push of each."""
    heads = (event.head for event, _ in scan(run / "journal") if isinstance(event, Push))
    return {head.id: head for head in heads}


@pytest.mark.integration
def test_a_streamed_run_that_was_killed_within_a_round_ends_as_its_replay(tmp_path: Path) -> None:
    """Groups come early and not in the order of their prompts; the replay gets whole batches, and ends with the same
    bits."""
    overrides = [*STREAM, "run.steps=6", "checkpoint.every=2"]
    process = start(tmp_path, "run", *overrides)
    run = tmp_path / "run"
    wait_for_step(run, 3, process)
    os.kill(pid_of(run, "learner"), signal.SIGKILL)
    process.wait(timeout=60)
    output, _ = (resumed := start(tmp_path, "run", *overrides, "resume=auto")).communicate(timeout=180)
    assert resumed.returncode == 0, output
    assert [row["step"] for row in rows(run)] == list(range(1, 7))
    assert all({"sizing/dual", "rounds/long"} <= row.keys() for row in rows(run)), "also of batches served again"
    assert sum(row["stream/share"] for row in rows(run)) > 1, "much was trained before its batch was complete"
    assert summary(run)["staleness_max"] == 0
    ledger = summary(run)["ledger"]
    gone = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["admitted"] == gone + ledger["active"]
    digests: dict[int, set[str]] = {}
    heads = heads_of(run)
    for index, ids in enumerate(trained_ids(run)):
        for head in (heads[group_id] for group_id in ids):
            assert head.versions == [index], "every token of every sample that is trained is of the round's own weights"
            digests.setdefault(index, set()).add(head.digests[index])
    assert all(len(found) == 1 for found in digests.values()) and len(set().union(*digests.values())) == len(digests)
    again = train(tmp_path, "again", *STREAM, f"replay={run}", "run.steps=99")
    assert [row["loss"] for row in rows(again)] == [row["loss"] for row in rows(run)]
    assert all(row["stream/share"] == 0 for row in rows(again))
    assert summary(again)["weights_digest"] == summary(run)["weights_digest"]
