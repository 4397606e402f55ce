"""The study of failures, small."""

from types import SimpleNamespace

import pytest

from scripts.claims import failures
from scripts.claims.failures import PromptLost, run, useful, warned
from scripts.simulation import costs


def test_a_taken_node_costs_throughput_and_no_prompt() -> None:
    rows = list(warned(8, 3, 1))
    assert [row["warning"] for row in rows] == [0.0, 30.0, 120.0] and all(0.0 < row["share"] <= 1.0 for row in rows)


def test_the_quick_study_has_failures_of_all_kinds() -> None:
    nodes, steps, often = failures.QUICK
    rows = list(failures.checkpoints(nodes, steps, 1, often))
    assert sum(row.get("deaths", 0) for row in rows) > 0 and sum(row.get("crashes", 0) for row in rows) > 0
    assert sum(row["made"] for row in failures.unseen(nodes, steps, 3, often)) > 0
    assert all(row["taken"] > 0 for row in warned(nodes, steps, 1, often))


def test_each_point_is_the_mean_over_histories_and_says_how_far_they_lie_apart(monkeypatch) -> None:
    def run(*words, history: int, **how) -> SimpleNamespace:
        return SimpleNamespace(staleness={0: 10 * (history + 1)}, seconds=1.0, taken=history)

    monkeypatch.setattr(failures, "run", run)
    monkeypatch.setattr(failures, "undisturbed", lambda *words: 20.0)
    rows = list(warned(8, 3, 2))
    assert [(row["share"], row["least"], row["most"], row["taken"]) for row in rows] == [(0.75, 0.5, 1.0, 0.5)] * 3
    assert failures._share(rows[0]) == "75.0% [50.0% to 100.0%]"
    assert failures._share({"share": 0.5, "least": 0.5, "most": 0.5}) == "50.0%"


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
