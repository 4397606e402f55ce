"""The timeline of a run: shares, sections, pictures."""

import sys
from pathlib import Path

import pytest

from areal_like.run.spans import Span, Spans
from scripts.timeline import main, shares, timeline


def some_run(folder: Path) -> Path:
    spans = [("actor-10", "generate", 100, 104), ("actor-2", "generate", 101, 103), ("actor-2", "update", 102.5, 105)]
    for role, *span in [*spans, ("learner", "train", 104, 110)]:
        Spans(folder, role, since_1970=0.0).add(*span)
    return folder


def test_shares_count_what_overlaps_once_in_what_is_waited(tmp_path: Path) -> None:
    found = timeline(some_run(tmp_path))
    assert list(found) == ["actor-2", "actor-10", "learner"]
    assert found["learner"] == [Span("train", 4, 10)]
    assert shares(found)["actor-2"] == pytest.approx({"generate": 0.2, "update": 0.25, "waits": 0.6})
    assert shares(found)["learner"] == pytest.approx({"train": 0.6, "waits": 0.4})
    part = timeline(tmp_path, 3.5, 4.5)
    assert part["actor-2"] == [Span("update", 3.5, 4.5)] and part["actor-10"] == [Span("generate", 3.5, 4)]
    assert shares(timeline(tmp_path, 50, 60))["learner"] == {"waits": 1.0}


def test_the_time_between_a_run_and_its_resume_is_nobodys(tmp_path: Path) -> None:
    for begin in (100.0, 500.0):  # the first span comes 1 s after the start
        learner = Spans(some_run(tmp_path) if begin == 100 else tmp_path, "learner", since_1970=0.0)
        learner.start(begin - 1)
        learner.add("train", begin + 10, begin + 13)
    found = timeline(tmp_path)
    assert found["learner"] == [Span("train", 4, 13), Span("train", 24, 27)]
    assert shares(found)["learner"] == pytest.approx({"train": 12 / 27, "waits": 15 / 27})


def test_the_command_prints_shares_and_writes_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "timeline.png"
    monkeypatch.setattr(sys, "argv", ["timeline", str(tmp_path), "--plot", str(picture)])
    with pytest.raises(SystemExit, match="2"):
        main()  # no spans yet
    some_run(tmp_path)
    main()
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["actor-2"]]
    assert row == ["actor-2", "20%", "25%", "60%"]
    assert picture.read_bytes()[1:4] == b"PNG"
