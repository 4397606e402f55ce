"""The bench of calibrated simulations, with one small run in place of all."""

import json
from pathlib import Path

import pytest

from actors.engines import step_costs
from scripts.bench import calibrated
from scripts.bench.calibrated import SETTINGS, SOURCES, error_of, main, real
from tests.integration.runs import train


def test_the_error_is_that_of_means_with_the_interval_of_the_rounds() -> None:
    here, there = ([{"samples_per_second": each} for each in speeds] for speeds in ([11.0, 22.0], [10.0, 20.0]))
    assert error_of("samples_per_second", here, there) == "+10.0% [+10.0%, +10.0%]"
    assert error_of("samples_per_second", here[:1], there[:1]) == "+10.0%", "one round has no interval"
    idle = [{"actor_idle_share": each} for each in (0.2, 0.4)]
    assert error_of("actor_idle_share", idle, idle[::-1]).startswith("+0.0% [-"), "rounds' errors of -.2 and .2"


def test_each_setting_is_predicted_from_each_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["actors.count=1", "eval.prompts=0", "run.target_reward=null", "groups_per_batch=4", "run.steps=3"]
    monkeypatch.setattr(calibrated, "COMMON", small)
    run = train(tmp_path, "sync-1", *small, "mode=sync")
    assert real("sync", 1, tmp_path) == run, "it is there: not made again"
    counted = step_costs.read(run)
    assert counted.largest in counted.alone and len(counted.alone) > 1, "its actor has measured what it lacked"
    assert counted.decode[counted.largest][0, 0] > 10 and len(counted.lengths) == 12, "and kept what it had"
    monkeypatch.setattr(calibrated, "real", lambda setting, number, folder: run)
    file = tmp_path / "found.json"
    main(["--rounds", "2", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["predicted"].keys() == set(SOURCES)
    for each in (found["measured"], *found["predicted"].values()):
        assert each.keys() == SETTINGS.keys() and all(len(rounds) == 2 for rounds in each.values())
    said = capsys.readouterr().out
    assert "of 6 that were not calibrated on are within 10%" in said and "calibrated on async 1" in said


def test_a_run_that_is_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(words: list[str]) -> None:
        (tmp_path / "sync-1").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrated, "trained", interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            real("sync", 1, tmp_path)
        assert not list(tmp_path.iterdir())


def test_an_interrupt_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrated, "real", interrupt)
    assert main([]) == 130 and capsys.readouterr().err == "ended by SIGINT; nothing is kept\n"
