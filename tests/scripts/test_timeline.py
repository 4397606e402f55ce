"""The timeline of a run: shares, sections, pictures, trace events; from a real run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.places import REPOSITORY
from areal_like.run.spans import Span
from scripts.timeline import main, shares, timeline, trace_events
from tests.areal_like.test_spans import written
from tests.integration.runs import train


def some_run(folder: Path) -> Path:
    written(folder, "actor-10", ("generate", 100, 104))
    written(folder, "actor-2", ("generate", 101, 103), ("update", 102.5, 105))
    return written(folder, "learner", ("train", 104, 110))


def test_shares_count_what_overlaps_once_in_what_is_waited(tmp_path: Path) -> None:
    found = timeline(some_run(tmp_path))
    assert list(found) == ["actor-2", "actor-10", "learner"]
    assert found["learner"] == [Span("train", 4, 10)]
    assert shares(found)["actor-2"] == pytest.approx({"generate": 0.2, "update": 0.25, "waits": 0.6})
    assert shares(found)["learner"] == pytest.approx({"train": 0.6, "waits": 0.4})


def test_a_part_of_the_time(tmp_path: Path) -> None:
    found = timeline(some_run(tmp_path), 3.5, 4.5)
    assert found == {"actor-2": [Span("update", 3.5, 4.5)], "actor-10": [Span("generate", 3.5, 4)]} | {
        "learner": [Span("train", 4, 4.5)]
    }
    assert shares(timeline(tmp_path, 50, 60))["learner"] == {"waits": 1.0}


def test_trace_events_name_their_processes(tmp_path: Path) -> None:
    events = trace_events(timeline(some_run(tmp_path)))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    (train,) = (event for event in events if event["name"] == "train")
    assert names[train["pid"]] == "learner" and (train["ts"], train["dur"]) == (4e6, 6e6)
    generate, update = (e for e in events if e["ph"] == "X" and names[e["pid"]] == "actor-2")
    assert update["ts"] < generate["ts"] + generate["dur"] < update["ts"] + update["dur"]
    assert generate["tid"] != update["tid"], "viewers ask of one thread's events that they do not overlap"


def test_a_folder_without_spans_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["timeline", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "has no spans" in capsys.readouterr().err


def test_a_real_run_says_who_did_what(tmp_path: Path) -> None:
    """A synchronous round is generated before it is trained, and trained before the next one is generated."""
    small = ["mode=sync", "run.steps=3", "learner.base=0.1", "engine.median=50"]
    train(tmp_path, "run", *small, config="configs/bench/modes.yaml")
    picture, trace = tmp_path / "timeline.png", tmp_path / "trace.json"
    command = [sys.executable, "-m", "scripts.timeline", str(tmp_path / "run")]
    shown = subprocess.run(
        [*command, "--plot", str(picture), "--trace", str(trace)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "generate" in shown.stdout and "actor-1" in shown.stdout
    assert picture.read_bytes()[1:4] == b"PNG" and json.loads(trace.read_text())["traceEvents"]
    found = timeline(tmp_path / "run")
    trains = [span for span in found["learner"] if span.name == "train"]
    assert len(trains) == 3 and all(span.end - span.begin >= 0.1 for span in trains)
    for actor in ("actor-0", "actor-1"):
        generated = [span for span in found[actor] if span.name == "generate"]
        assert len(generated) == 3
        for done, trained, begun in zip(generated, trains, [*generated[1:], None], strict=True):
            assert done.end <= trained.begin
            assert begun is None or trained.end <= begun.begin
        assert len([span for span in found[actor] if span.name == "update"]) >= 3
