"""Data of a set age, through the real buffer: every trained sample is exactly as old as in the config."""

from collections import Counter
from pathlib import Path

import pytest

from buffer.injection import Ages
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


def expected(ages: Ages, step: int, interval: int = 1) -> dict[int, int]:
    version = step // interval
    return Counter(min(int(age), version) for age in ages.of_batch(step, B) for _ in range(SAMPLES))


@pytest.mark.integration
@pytest.mark.parametrize("spec", [4, 0, {0: 0.5, 4: 0.5}, {"uniform": [0, 5]}], ids=str)
def test_every_sample_has_its_age(tmp_path: Path, spec) -> None:
    run = train(tmp_path, "run", *COMMON, f"inject_staleness={spec}")
    assert len(rows(run)) == STEPS
    for step, row in enumerate(rows(run)):
        assert histogram(row) == expected(Ages(spec), step)
        assert row["version_span/max"] == 0 and set(row["staleness/in_flight_histogram"]) == {"0"}
    if spec == 4:
        assert all(histogram(row) == {4: B * SAMPLES} for row in rows(run)[4:])
    if spec == {0: 0.5, 4: 0.5}:
        assert all(histogram(row) == {0: B * SAMPLES // 2, 4: B * SAMPLES // 2} for row in rows(run)[4:])
    assert summary(run)["staleness_bound"] == Ages(spec).oldest == summary(run)["staleness_max"]
    assert summary(run)["ledger"]["trained"] == STEPS * B
