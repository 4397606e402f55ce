"""A run with an actor that pushes a group that must not be trained, to a buffer that doesn't check it. (Wrong digests:
`tests/learners/test_attestation.py`.)"""

from pathlib import Path

import pytest

from areal_like.run.samples import read
from scripts.ledger import audit
from tests.integration.living import train_in_processes
from tests.integration.runs import summary
from tests.integration.spoiling import BAD_TOKEN

CONFIG = ["groups_per_batch=4", "run.target_reward=null", "eval.prompts=4", "eval.every=0", "run.trackers=[]"]
CONFIG += ["buffer.keep_journal=true", "learner.ranks=2", "run.steps=8"]


@pytest.mark.integration
def test_a_poisoned_batch_is_set_aside_by_all_ranks_and_a_replay_has_the_weights_of_the_run(tmp_path: Path) -> None:
    poison = ["filter=tests.integration.spoiling:blind", "workflow=tests.integration.spoiling:poisoning"]
    run = train_in_processes(tmp_path, "poisoned", *CONFIG, *poison)
    dropped = summary(run)["ledger"]["dropped"]["untrainable"]
    assert dropped and dropped % 4 == 0 and not any(audit(run).findings.values())
    kept = [each for each in read(run, ["dropped"]) if each.why.startswith("untrainable: ")]
    assert kept and all(f"token {BAD_TOKEN}" in each.why for each in kept)
    assert all(f"batch {each.step} can't be trained" in each.why for each in kept)
    again = train_in_processes(tmp_path, "again", *CONFIG, f"replay={run}")
    assert summary(again)["weights_digest"] == summary(run)["weights_digest"]
