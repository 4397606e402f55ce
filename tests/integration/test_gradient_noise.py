"""SAGC hears from the learner how much of its gradients is noise, and a replay makes the same bits."""

from pathlib import Path

import pytest

from tests.integration.runs import rows, summary, train

SAGC = [
    *("launcher=inline", "mode=sync", "sizing={name: sagc, candidates: [4, 8, 16], least_prompts: 4}", "run.steps=8"),
    *("run.target_reward=null", "eval.every=0", "eval.prompts=4", "buffer.keep_journal=true"),
]


@pytest.mark.integration
def test_gradients_reach_the_sizing_and_a_replay_measures_them_again(tmp_path: Path) -> None:
    run = train(tmp_path, "run", *SAGC)
    found = rows(run)
    assert all({"gradient/signal", "gradient/between", "gradient/within"} <= row.keys() for row in found)
    assert found[-1]["sizing/decisions"] not in (32, found[-2]["sizing/decisions"])
    again = train(tmp_path, "again", *SAGC, f"replay={run}")
    assert [row["gradient/within"] for row in rows(again)] == [row["gradient/within"] for row in found]
    assert summary(again)["weights_digest"] == summary(run)["weights_digest"]
