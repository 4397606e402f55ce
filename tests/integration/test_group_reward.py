"""Runs with a group reward: a judge's rewards are trained, counted, and the same again while the judge is off."""

import random
from pathlib import Path

import pytest

from tests.actors.judging import judging
from tests.integration.runs import rows, summary, train

pytestmark = pytest.mark.integration

ALONE = ["actors.count=1", "engine.slots=1", "groups_per_batch=2", "sizing.group_size=4", "run.target_reward=null"]
"""One sequence at a time, so that two runs sample the same answers."""
TEXT = ["task={name: copy, digits: 2}", "eval.prompts=2", "mode=sync"]


def test_a_judges_cache_makes_a_run_again_while_the_judge_is_off(tmp_path: Path) -> None:
    """The judge replies at random."""

    def judge(url: str) -> list[str]:
        return [
            *("group_reward.name=judge", f"group_reward.base_url={url}", "group_reward.model_name=m"),
            *("group_reward.template=$answer", "group_reward.max_tokens=16", "group_reward.temperature=1"),
            *(f"group_reward.cache={tmp_path / 'cache'}", "group_reward.retries=0"),
        ]

    options = [*ALONE, *TEXT, "run.steps=2"]
    with judging(lambda text: f"Score: {random.randrange(10)}") as server:
        first = train(tmp_path, "first", *options, *judge(server.url))
    asked = sum(file.read_text().count("\n") for file in (tmp_path / "cache").glob("*.jsonl"))
    again = train(tmp_path, "again", *options, *judge(server.url))
    assert summary(first)["weights_digest"] == summary(again)["weights_digest"]
    assert [row["reward/mean"] for row in rows(first)] == [row["reward/mean"] for row in rows(again)]
    assert all(row["reward/std"] > 0 for row in rows(first)), "the judge's verdicts are what is trained"
    kept = sum(file.read_text().count("\n") for file in (tmp_path / "cache").glob("*.jsonl"))
    assert asked > 8 and kept == asked, "the second run asks for nothing"
    assert summary(first)["reward_before"] > 0, "held-out answers are graded, too"
