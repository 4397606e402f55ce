"""Reports of peers, in simulation: parts of the study, small."""

import pytest

from scripts.claims import peers
from scripts.claims.peers import Comparison, fitted, of, seconds, table
from scripts.simulation import costs


def test_a_plain_rollout_takes_the_seconds_that_the_source_tells() -> None:
    cost = of("7B", "H20")
    cost.answers = costs.Answers(100, 0.5, 0.3, most=400, prompt=50)
    scaled = fitted(cost, 30.0, 2, 8, 4)
    assert cost.engine.base != scaled.engine.base and seconds(scaled, 2, 8, 4, 6, "mode=sync") == pytest.approx(
        30, 0.02
    )


def test_an_async_run_gains_at_most_what_its_learner_allows() -> None:
    cost = of("1.5B", "H800")
    cost.answers, cost.learner = costs.Answers(100, 0.0, 0.0, most=400, prompt=50), costs.LearnerCost(base=5.0)
    assert seconds(cost, 2, 8, 4, 9, "scheduler.max_staleness=1") == pytest.approx(5.0, rel=0.05)


def test_the_table_says_whether_a_claim_is_within() -> None:
    found = [Comparison("one", 2.0, {"short": 1.5, "long": 2.5}), Comparison("two", 3.0, {"short": 1.5, "long": 2.5})]
    lines = table(found).splitlines()
    assert lines[2].rstrip(" |").endswith("yes") and lines[3].rstrip(" |").endswith("above")
    assert set(peers.STUDIES) == {"areal", "verl", "rollpacker"}
