"""The display of `train`: the facts of `metrics.jsonl`, complete at any width, and nothing twice."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_like.config import run_config as configs
from areal_like.launch.outcome import Death
from scripts.console.output import sparkline
from scripts.following.display import Display, ledger_line, print_summary
from scripts.following.fault_counts import faults
from scripts.following.last_sample import LastSample
from tests.scripts.written_runs import QUESTION, written_run

ROW = {
    "step": 30,
    "seconds": 6.0,
    "reward/mean": 0.25,
    "staleness/mean": 0.5,
    "staleness/max": 1,
    "staleness/bound": 1,
    "buffer/waiting": 3,
    "buffer/running": 12,
    "rollout/tokens_per_second": 12345.6,
    "rollout/idle_share": 0.125,
    "train/idle_share": 0.0625,
    "eval/reward": 0.75,
    "eval/version": 20,
}
FACTS = ("30/300", "0.250", "0.750 (v20)", "0.50, max 1 of 1", "3 groups wait, 12 run", "12,346", "actors 12%, ")
FAULTY = {"train/nonfinite_steps": 2, "rewards/timeouts": 16.0, "rewards/errors": 0.0, "refused/tokens": 3}
SUMMARY = {
    "reward_before": 0.1,
    "reward_after": 0.9762,
    "steps": 300,
    "seconds": 25.3,
    "stopped_because": "300 steps are done",
    "actor_idle_share": None,
    "learner_idle_share": 0.25,
    "ledger": {"admitted": 9, "trained": 4, "filtered": {"all equal": 1}, "dropped": {"stale": 2}, "active": 2},
    "restarts": 3,
    "faults": FAULTY,
}


def display(folder: Path, *overrides: str) -> Display:
    return Display(configs.load(["configs/quickstart.yaml", "run.steps=300", *overrides]), folder, plain=True)


def write(folder: Path, *rows: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_line_has_the_facts_of_the_last_step_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = display(tmp_path)
    write(tmp_path, {"step": 29, "reward/mean": 0.2}, ROW)
    for _ in range(3):
        seen.update(last=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert [fact for fact in FACTS if fact not in line] == [] and "\x1b" not in line
    seen.status = {"started": True, "waits": ["all processes wait for the journal's disk"]}
    for _ in range(3):
        seen.update(last=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "step 30/300 | waits all processes wait for the journal's disk", "no step came meanwhile"
    seen.close()


@pytest.mark.parametrize("width", [60, 120])
def test_the_display_is_whole_at_any_width(tmp_path: Path, width: int) -> None:
    seen = display(tmp_path)
    write(tmp_path, ROW)
    seen.update()
    seen.status = {"started": True, "waits": [f"actor-{i} waits for weights" for i in range(8)]}
    file = io.StringIO()
    Console(file=file, width=width).print(seen._table())
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    for fact in (*FACTS, "0:00:54 left", "actor-0 waits for weights", "actor-7 waits for weights"):
        assert fact in text
    seen.close()


def test_time_left_ends_with_the_limit_of_time(tmp_path: Path) -> None:
    seen = display(tmp_path, "run.max_seconds=10")
    assert seen._left() == ""
    write(tmp_path, ROW)
    seen.update()
    assert seen._left() == "0:00:04 left"
    seen.close()


def test_each_death_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = display(tmp_path)
    first = Death("actor-1", 5, "was killed by SIGKILL", 1)
    for _ in range(2):
        seen.update([first])
    seen.update([first, Death("actor-1", 7, "was killed by SIGSEGV", 3, again_in=None)])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "actor-1 was killed by SIGKILL", "actor-1 was killed by SIGSEGV",
    ]  # fmt: skip
    seen.row = ROW
    assert "left out actor-1" in seen._line()


def test_the_newest_sample_is_shown_unless_the_task_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run(tmp_path / "a", steps=4)
    (run / "samples" / "trained.jsonl").open("ab").write(b'{"torn')
    seen, deadline = LastSample(run), time.monotonic() + 30
    while not (text := seen.text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert text == f"{QUESTION} → 4271 (reward 0.5, step 4)"

    def breaks(*_: object) -> str:
        raise TypeError("the user's own")

    monkeypatch.setattr("scripts.samples.Texts.of", breaks)
    assert seen.text() == ""


def test_a_board_that_fails_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("areal_like.trackers.board.Board.add", full)
    seen = display(tmp_path)
    with seen:
        write(tmp_path, ROW, ROW | {"step": 31})
        seen.update()
    seen.close()
    assert seen.row["step"] == 31
    assert capsys.readouterr().out.count("No space left on device") == 1


def test_the_summary_has_each_fact_and_whole_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = Path("/a" * 60)
    print_summary(SUMMARY, folder)
    text = capsys.readouterr().out
    for fact in ("0.100 before, 0.976 after", "300 in 25.3 s", "actors -, learner 25%", "16 verifier time-outs"):
        assert fact in text
    for path in (folder / "logs", folder / "checkpoints" / "final"):
        assert any(line.endswith(str(path)) for line in text.splitlines())
    line = ledger_line(SUMMARY["ledger"])  # type: ignore[arg-type]
    assert line == "admitted 9 = trained 4 + filtered 1 (all equal) + dropped 2 (stale) + active 2"


def test_faults_are_counted_and_expected_drops_are_none() -> None:
    dropped = {"ledger/dropped/untrainable": 4, "ledger/dropped/stale": 9, "ledger/dropped/end of run": 9}
    assert [each.split()[0] for each in faults(FAULTY | dropped).split(", ")] == ["2", "16", "3", "4"]
    assert not faults(ROW)


def test_a_sparkline_spans_all_values_in_few_bars() -> None:
    assert sparkline([]) == "" and sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0.0, 1.0, float("nan"), 0.5]) == "▁█▅"
    assert sparkline([n // 100 for n in range(800)], width=8) == "▁▂▃▄▅▆▇█"
