"""Runs with a group reward: a judge's rewards are trained, counted, and the same again while the judge is off."""

from pathlib import Path

import pytest

from tests.actors.judging import judging
from tests.integration.runs import rows, summary, train

pytestmark = pytest.mark.integration

ALONE = ["actors.count=1", "engine.slots=1", "groups_per_batch=2", "sizing.group_size=4", "run.target_reward=null"]
"""One sequence at a time, so that two runs sample the same answers."""
TEXT = ["task.name=calculator", "task.digits=1", "eval.prompts=2", "mode=sync"]


def test_a_judges_cache_makes_a_run_again_while_the_judge_is_off(tmp_path: Path) -> None:
    def judge(url: str) -> list[str]:
        return [
            *("group_reward.name=judge", f"group_reward.base_url={url}", "group_reward.model_name=m"),
            *("group_reward.compare=pairs", f"group_reward.cache={tmp_path / 'cache'}", "group_reward.retries=0"),
        ]

    options = [*ALONE, *TEXT, "run.steps=2"]
    with judging(later) as server:
        first = train(tmp_path, "first", *options, *judge(server.url))
    again = train(tmp_path, "again", *options, *judge(server.url))
    assert summary(first)["weights_digest"] == summary(again)["weights_digest"]
    assert [row["reward/mean"] for row in rows(first)] == [row["reward/mean"] for row in rows(again)]
    assert all(row["reward/std"] > 0 for row in rows(first)), "the judge's verdicts are what is trained"
    assert len(server.asked) > 8 and rows(again)[-1].get("judge/requests", 0) == 0
    assert summary(first)["reward_before"] == 0.5, "a held-out answer is alone: nothing to be compared with"


def later(text: str) -> str:
    """Of two answers it likes the one that sorts later."""
    first, second = (text.partition(f"Answer {name}:\n")[2].partition("\n")[0] for name in "AB")
    return f"Winner: {'tie' if first == second else 'A' if first > second else 'B'}"
