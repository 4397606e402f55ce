"""The calculator task, from random weights: a short run in which the tool is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integration.runs import rows, summary, train

pytestmark = pytest.mark.integration


@pytest.mark.timeout(900)
def test_calls_are_learned(tmp_path: Path) -> None:
    """By 45 steps calls are right and answers begin to be right. Without credit for calls the reward stays near 0."""
    options = ["task={name: calculator, digits: 1}", "run.seed=1", "run.steps=45", "learner.lr=8e-3"]
    options += ["eval.every=0", "eval.prompts=16"]
    options += ["actors.count=1", "advantage=turn", "learner.entropy_bonus=0.005", "learner.eps=2e-5"]
    options += ["workflow={name: multi_turn, max_turns: 3, turn_tokens: 12, environment: {name: desk}}"]
    options += ["eval.workflow={environment: {call_credit: 0, credit: exact}}", "run.target_reward=null"]
    run = train(tmp_path, "run", *options, config="configs/quickstart.yaml")
    rewards = np.array([row["reward/mean"] for row in rows(run)])
    # The last 20 steps gave .46 to .54 over 3 seeds and 2 kernel settings: the bound leaves room for other CPUs.
    assert rewards[:10].mean() < 0.1 and rewards[-10:].mean() > 0.35
    assert summary(run)["reward_before"] == 0.0  # the rate of success: no credit for characters in it
