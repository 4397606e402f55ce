"""The study of over-provisioned responses: its table is made from its results, which are kept."""

from argparse import Namespace

import pytest

from scripts.claims import cut_responses, kept


def test_cut_responses_shorten_what_is_trained_and_prompts_do_not() -> None:
    plain, prompts, responses = (
        cut_responses.measure(cut_responses.MODES[mode], 0, 20) for mode in ("plain", "prompts 1.25", "responses 1.25")
    )
    assert plain["length"] == plain["reward"] == pytest.approx(0.0)
    assert responses["length"] < -0.1 and responses["reward"] > 0.1 and responses["steps"] < plain["steps"]
    assert abs(prompts["length"]) < abs(responses["length"]) / 2


def test_speeds_are_paired_by_seed_and_the_table_is_that_of_the_results(tmp_path, monkeypatch) -> None:
    steps = {("plain", 0): 100.0, ("plain", 1): 300.0, ("fast", 0): 50.0, ("fast", 1): 150.0}
    monkeypatch.setattr(cut_responses, "MODES", {"plain": {}, "fast": {"fast": True}})
    monkeypatch.setattr(
        cut_responses,
        "measure",
        lambda mode, seed, rounds: {
            "length": -0.125, "reward": 0.25, "effective": 0.8, "steps": steps["fast" if mode else "plain", seed % 2],
        },
    )  # fmt: skip
    told: list[str] = []
    monkeypatch.setattr(cut_responses.kept, "publish", lambda results, study: told.append(study))
    cut_responses.main(Namespace(quick=False, out=tmp_path, publish=True))
    (table,) = cut_responses.tables(tmp_path / "results.csv").values()
    assert table == (tmp_path / "table.md").read_text() and told == ["cut_responses"]
    fast = table.splitlines()[-1]
    for part in ("| fast ", "-12 [", "25 [", "0.80 [", "2.0 [2.0, 2.0]"):
        assert part in fast, part
    assert len(kept.read(tmp_path / "results.csv", cut_responses.COLUMNS, ("mode",))) == 20


def test_published_results_lie_in_the_documentation(tmp_path) -> None:
    kept.write(tmp_path / "results.csv", ("seed", "rate"), [{"seed": 1, "rate": 0.0123456}])
    kept.publish(tmp_path / "results.csv", "some", tmp_path)
    assert kept.read(tmp_path / kept.PUBLISHED / "some.csv", ("seed", "rate"), ()) == [{"seed": 1, "rate": 0.01235}]
