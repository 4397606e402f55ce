"""A run whose prompts a sampler chooses: a resume draws what the whole run draws, and the record proves it."""

from pathlib import Path

import pytest

from buffer.events import Admit
from buffer.journal import Recorded
from buffer.recovery import standing
from scripts.ledger import audit
from scripts.samples import Texts
from tests.integration.runs import summary, train

COMMON = ["actors.count=1", "engine.slots=1", "groups_per_batch=4", "run.target_reward=null", "eval.prompts=0"]
COMMON += ["buffer.keep_journal=true", "task={name: copy, digits: 2, train_size: 6}"]
POOLS = ["sampler=pass_rate_pools", "filter=zero_variance"]


@pytest.mark.integration
def test_a_resume_and_async_at_zero_draw_what_the_whole_run_draws(tmp_path: Path) -> None:
    options = [*COMMON, *POOLS]
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
    assert drawn[0] == drawn[1] == drawn[2] == [Texts(whole).row(group_id) for group_id in range(16)]
