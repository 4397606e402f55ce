"""Spans of time that processes record, and how a reader joins them."""

import json
import time
from pathlib import Path

import pytest

from areal_like.run.spans import FOLDER, Busy, Span, Spans, read


def written(folder: Path, role: str, *rows: tuple[str, float, float]) -> Path:
    (folder / FOLDER).mkdir(exist_ok=True)
    lines = [json.dumps({"name": name, "begin": begin, "end": end}) for name, begin, end in rows]
    (folder / FOLDER / f"{role}.jsonl").write_text("\n".join([*lines, ""]))
    return folder


def test_what_is_written_is_read_on_the_clock_of_the_world_also_where_the_work_fails(tmp_path: Path) -> None:
    spans = Spans(tmp_path, "learner", since_1970=100.0)
    spans.add("train", 1.0, 2.5)
    spans.add("nothing", 3.0, 3.0)
    with pytest.raises(KeyError), spans.during("publish"):
        raise KeyError
    train, publish = read(tmp_path)["learner"]
    assert train == Span("train", 101.0, 102.5) and publish.name == "publish"
    assert Spans()._since_1970 == pytest.approx(time.time() - time.monotonic(), abs=1.0)


def test_several_things_at_once_are_one_span_and_a_long_one_is_written_in_pieces(tmp_path: Path) -> None:
    now = iter([1.0, 2.0, 3.0])
    spans = Spans(tmp_path, "actor-0", since_1970=0.0)
    busy = Busy(spans, "generate", lambda: next(now))
    busy.so_far()
    busy.enter()
    busy.enter()
    busy.leave()
    assert read(tmp_path)["actor-0"] == []
    busy.so_far()
    busy.leave()
    assert len((tmp_path / FOLDER / "actor-0.jsonl").read_text().splitlines()) == 2
    assert read(tmp_path)["actor-0"] == [Span("generate", 1.0, 3.0)]


def test_adjacent_spans_are_one_also_with_others_in_between(tmp_path: Path) -> None:
    rows = [("generate", 0, 1), ("update", 0.9, 1), ("generate", 1.0001, 2), ("generate", 3, 4), ("update", 2.5, 2.6)]
    assert read(written(tmp_path, "actor-0", *rows))["actor-0"] == [
        Span("generate", 0, 2),
        Span("update", 0.9, 1),
        Span("update", 2.5, 2.6),
        Span("generate", 3, 4),
    ]


def test_torn_and_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, "learner", ("train", 0, 1)) / FOLDER / "learner.jsonl"
    with path.open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"name": "train"}\n{"name": "train", "begin": 5, "end": 6}\n{"name": "tra')
    assert read(tmp_path)["learner"] == [Span("train", 0, 1), Span("train", 5, 6)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_ends_the_writing_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "learner.jsonl").symlink_to("/dev/full")
    spans = Spans(tmp_path, "learner")
    for at in range(3):
        spans.add("train", at, at + 0.5)
    assert len(caplog.records) == 1 and "No space" in caplog.text
