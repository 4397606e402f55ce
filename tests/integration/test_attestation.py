"""Runs with an actor that pushes groups that must not be trained, to a buffer that doesn't check them."""

import re
from pathlib import Path

import pytest

from areal_like.run.samples import Kept, read
from scripts.ledger import audit
from tests.integration.living import train_in_processes
from tests.integration.runs import summary
from tests.integration.spoiling import BAD_TOKEN, LIE

CONFIG = [
    "groups_per_batch=4",
    "run.target_reward=null",
    "eval.prompts=4",
    "eval.every=0",
    "buffer.keep_journal=true",
    "run.trackers=[]",
]


def set_aside(run: Path, broken: tuple[str, ...] = ()) -> list[Kept]:
    """Kept samples of the batches of a finished run that were set aside. The ledger balances, and the audit finds no
    other violation."""
    dropped = summary(run)["ledger"]["dropped"]["untrainable"]
    assert dropped and dropped % 4 == 0
    findings = audit(run).findings
    assert tuple(rule for rule, found in findings.items() if found) == broken, findings
    return [each for each in read(run, ["dropped"]) if each.why.startswith("untrainable: ")]


@pytest.mark.integration
def test_the_learner_refuses_what_a_lying_actor_has_made(tmp_path: Path) -> None:
    timed = ["engine=timed", "learner=timed", "engine.median=8", "learner.base=0.02", "run.steps=20"]
    lie = ["filter=tests.integration.spoiling:blind", "workflow=tests.integration.spoiling:lying"]
    kept = set_aside(
        train_in_processes(tmp_path, "lies", *CONFIG, *timed, *lie, "run.max_untrainable=20"), ("weights",)
    )
    assert kept
    for each in kept:
        said = re.search(r"batch (\d+), group \d+ of actor-\d: its tokens of version \d+ .* digest (\w+),", each.why)
        assert said and (int(said[1]), said[2]) == (each.step, LIE)


@pytest.mark.integration
def test_a_poisoned_batch_is_set_aside_by_all_ranks_and_a_replay_has_the_weights_of_the_run(tmp_path: Path) -> None:
    config = [*CONFIG, "learner.ranks=2", "run.steps=8"]
    poison = ["filter=tests.integration.spoiling:blind", "workflow=tests.integration.spoiling:poisoning"]
    run = train_in_processes(tmp_path, "poisoned", *config, *poison)
    assert {
        f"token {BAD_TOKEN}" in each.why and f"batch {each.step} can't be trained" in each.why
        for each in set_aside(run)
    } == {True}
    again = train_in_processes(tmp_path, "again", *config, f"replay={run}")
    assert summary(again)["weights_digest"] == summary(run)["weights_digest"]
