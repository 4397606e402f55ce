"""The bench of the simulator, with real figures from a file."""

import json
from pathlib import Path

import pytest

from scripts.bench import simulation
from scripts.bench.simulation import FIGURES, compared, main

CELL = "balanced, sync, 2 actors"


def real(speed: float) -> dict[str, float]:
    return dict.fromkeys(FIGURES, 0.5) | {"samples_per_second": speed}


def test_the_error_is_that_of_means_and_the_scatter_half_of_the_range() -> None:
    here, there = [real(100.0), real(120.0)], [real(90.0), real(100.0), real(110.0)]
    assert compared("samples_per_second", here, there) == pytest.approx((0.1, 0.1))
    shares = [{"actor_idle_share": each} for each in (0.2, 0.3)]
    assert compared("actor_idle_share", shares[:1], shares) == pytest.approx((-0.05, 0.05)), "differences"
    still = [{"learner_idle_share": 0.4}]
    assert compared("learner_idle_share", still, still) == (0.0, 0.0)


def test_real_figures_of_an_earlier_run_are_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulation, "real", None)  # it may not be called
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    earlier, file = tmp_path / "earlier.json", tmp_path / "found.json"
    there = [real(290.0), real(300.0)]
    earlier.write_text(json.dumps({CELL: {"real": there, "simulated": []}}))
    main(["--cells", CELL, "--histories", "2", "--real", str(earlier), "--json", str(file)])
    found = json.loads(file.read_text())
    assert list(found) == [CELL] and found[CELL]["real"] == there and len(found[CELL]["simulated"]) == 2
    assert found[CELL]["simulated"][0] != found[CELL]["simulated"][1]
    said = capsys.readouterr().out
    assert "samples_per_second: 1 of 1 within 5% or the real scatter" in said and "±1.7%" in said
    assert "staleness_mean: 0 of 1 within 5%" in said, "a simulated run in sync mode has no stale samples"
    with pytest.raises(SystemExit):
        main(["--cells", "longtail, sync, 2", "--real", str(earlier)])


def test_an_interrupt_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation, "real", interrupt)
    assert main([]) == 130 and capsys.readouterr().err == "ended by SIGINT; nothing is kept\n"
