"""The study of failures, small."""

import pytest

from scripts.claims import failures
from scripts.claims.failures import PromptLost, run, useful, warned
from scripts.simulation import costs


def test_a_taken_node_costs_throughput_and_no_prompt() -> None:
    """Over two histories, which differ."""
    rows = list(warned(8, 3, 2))
    assert [row["warning"] for row in rows] == [0.0, 30.0, 120.0] and all(0.0 < row["share"] <= 1.0 for row in rows)
    assert all(row["share"] == pytest.approx((row["least"] + row["most"]) / 2) for row in rows)
    assert any(row["least"] < row["most"] for row in rows)


def test_a_ledger_that_does_not_close_is_an_error(monkeypatch) -> None:
    whole = failures.Simulation.run

    def loses_one(self):
        outcome = whole(self)
        outcome.report["ledger"]["trained"] -= 1
        return outcome

    assert useful(run(8, 3, costs.Failures())) > 0
    monkeypatch.setattr(failures.Simulation, "run", loses_one)
    with pytest.raises(PromptLost, match="1 groups are missing"):
        run(8, 3, costs.Failures())
