"""Data of a set age, through the real buffer: every trained sample is exactly as old as in the config."""

from pathlib import Path

import pytest

from tests.integration.runs import rows, summary, train

B, SAMPLES, STEPS = 4, 8, 14
TIMED = [
    "engine=timed",
    "learner=timed",
    "learner.base=0.02",
    "sampling.max_new_tokens=200",
    "engine.median=30",
    "run.trackers=[]",
]
COMMON = [*TIMED, f"groups_per_batch={B}", f"run.steps={STEPS}", "run.target_reward=null", "eval.prompts=4"]


def histogram(row: dict) -> dict[int, int]:
    return {int(age): count for age, count in row["staleness/histogram"].items()}


@pytest.mark.integration
@pytest.mark.parametrize("age", [4, 0])
def test_every_sample_has_its_age(tmp_path: Path, age: int) -> None:
    run = train(tmp_path, "run", *COMMON, f"inject_staleness={age}")
    assert len(rows(run)) == STEPS
    for step, row in enumerate(rows(run)):
        assert histogram(row) == {min(age, step): B * SAMPLES}
        assert row["version_span/max"] == row["staleness/in_flight_mean"] == 0
    assert summary(run)["staleness_bound"] == age == summary(run)["staleness_max"]
    assert summary(run)["ledger"]["trained"] == STEPS * B
