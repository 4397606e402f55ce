"""Whole runs whose samples come from agents at the endpoint: they learn, and crashes are in the ledger."""

from pathlib import Path

import pytest

from tests.integration.runs import rows, summary, train

pytestmark = pytest.mark.integration

AGENT = "workflow={name: agent, agent: 'examples.agent_function:copies'}"


def test_an_agent_that_speaks_openais_protocol_learns_without_being_rewritten(tmp_path: Path) -> None:
    """One digit, so that few samples are enough. Held-out prompts would be other digits: the test looks at the reward
    in training."""
    small = ["task.digits=1", "groups_per_batch=8", "run.steps=25", "learner.lr=4e-3", "run.target_reward=null"]
    small += ["actors.count=1", "eval.every=0"]
    run = train(tmp_path, "run", *small, "eval.prompts=4", AGENT, config="configs/copy4.yaml")
    rewards = [row["reward/mean"] for row in rows(run)]
    assert sum(rewards[:5]) / 5 < 0.3 and sum(rewards[-5:]) / 5 > 0.6, rewards
    found, last = summary(run), rows(run)[-1]
    assert found["staleness_max"] <= found["staleness_bound"]
    assert last["agents/turns"] > 0 and last["agents/crashes"] == last["agents/turns_left_out"] == 0
    mismatch = [row["mismatch_max"] for row in rows(run) if "mismatch_max" in row]
    assert mismatch and max(mismatch) < 1e-3, "the endpoint's logprobs are the learner's"
