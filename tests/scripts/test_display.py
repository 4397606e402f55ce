"""What a person sees: the facts of `metrics.jsonl`, complete at any width, and nothing twice."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from areal_like.config import run_config as configs
from areal_like.launch.outcome import Death
from areal_like.run.samples import TRAINED, SampleLog, kept
from areal_like.types import Sample
from scripts.following.display import Display, ledger_line, print_summary
from scripts.following.fault_counts import faults
from scripts.following.last_sample import LastSample
from tests.scripts.written_runs import written_run

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


def display(folder: Path, *overrides: str) -> Display:
    return Display(configs.load(["configs/quickstart.yaml", "run.steps=300", *overrides]), folder, plain=True)


def write(folder: Path, *rows: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_line_holds_the_facts_of_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = display(tmp_path)
    write(tmp_path, {"step": 29, "reward/mean": 0.2}, ROW)
    seen.update(last=True)
    (line,) = capsys.readouterr().out.splitlines()
    for fact in FACTS:
        assert fact in line
    assert "\x1b" not in line
    seen.close()


@pytest.mark.parametrize("width", [60, 80, 120])
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


def test_a_line_that_repeats_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = display(tmp_path)
    for _ in range(3):
        seen.update(last=True)
    seen.status = {"started": False, "waits": ["the start waits for 2 actors"]}
    for _ in range(3):
        seen.update(last=True)
    assert [line[:13] for line in capsys.readouterr().out.splitlines()] == ["start, 1 of 4", "start, 2 of 4"]


def test_the_live_display_has_the_rewards_as_a_curve_and_the_last_sample(tmp_path: Path) -> None:
    config = configs.load(["configs/quickstart.yaml"])
    configs.save(config, tmp_path / "config.yaml")
    seen = display(tmp_path)
    write(tmp_path, *({"step": n, "reward/mean": n / 8} for n in range(1, 9)))
    prompt = np.array([1, 2, 3, 10], np.int32)
    log = SampleLog(tmp_path, TRAINED, steps=1, most=None)
    for number, said in enumerate(([4, 5, 6], [1, 2, 3])):
        tokens = np.append(prompt, np.array(said, np.int32))
        made = Sample(tokens, 4, np.zeros(3, np.float32), np.ones(3, bool), [(0, 3)], float(number), "length")
        log.write(kept(TRAINED, 7, 7, (0, number), made))
    log.close()
    with (tmp_path / "samples" / "trained.jsonl").open("ab") as file:
        file.write(b'{"torn')
    seen.update()
    deadline = time.monotonic() + 30
    while not seen._last_sample.text() and time.monotonic() < deadline:
        time.sleep(0.01)
    text = io.StringIO()
    Console(file=text, width=100).print(seen._table())
    assert "▁▂▃▄▅▆▇█" in text.getvalue()
    assert "123> → 123 (reward 1, step 7)" in text.getvalue()
    seen.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("broken", ["__init__", "of"])
def test_a_task_that_breaks_costs_the_display_its_last_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    run, called = written_run(tmp_path / "a"), []

    def breaks(*_: object) -> str:
        called.append(1)
        raise TypeError("the user's own")

    monkeypatch.setattr(f"scripts.samples.Texts.{broken}", breaks)
    seen = LastSample(run)
    deadline = time.monotonic() + 30
    while not called and time.monotonic() < deadline:
        assert seen.text() == ""
        time.sleep(0.01)
    assert seen._thread
    seen._thread.join()
    assert called and seen.text() == ""


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
    seen.update([first])
    seen.update([first])
    second = Death("actor-1", 6, "ended with exit code 1", 2, again_in=2.0, error="no answer")
    seen.update([first, second, Death("actor-1", 7, "was killed by SIGSEGV", 3, again_in=None)])
    assert len(capsys.readouterr().out.splitlines()) == 3
    seen.row = ROW
    assert "left out actor-1" in seen._line()


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


SUMMARY = {
    "reward_before": 0.1,
    "reward_after": 0.9762,
    "steps": 300,
    "seconds": 25.3,
    "stopped_because": "300 steps are done",
    "staleness_mean": 0.5,
    "staleness_max": 1,
    "staleness_bound": 1,
    "tokens_per_second": 12345.6,
    "trained_tokens_per_second": 11111.0,
    "actor_idle_share": None,
    "learner_idle_share": 0.25,
    "ledger": {"admitted": 9, "trained": 4, "filtered": {"all equal": 1}, "dropped": {"stale": 2}, "active": 2},
    "restarts": 3,
}


def test_the_summary_is_not_cut_where_the_terminal_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = Path("/a" * 60)
    print_summary(SUMMARY, folder)
    text = capsys.readouterr().out
    for fact in ("0.100 before, 0.976 after", "300 in 25.3 s", "actors -, learner 25%", "12,346 rolled out"):
        assert fact in text
    for path in (folder / "logs", folder / "checkpoints" / "final"):
        assert any(line.endswith(str(path)) for line in text.splitlines())


def test_the_ledger_is_a_sum() -> None:
    line = ledger_line(SUMMARY["ledger"])  # type: ignore[arg-type]
    assert line == "admitted 9 = trained 4 + filtered 1 (all equal) + dropped 2 (stale) + active 2"


FAULTY = {"train/nonfinite_steps": 2, "rewards/timeouts": 16.0, "rewards/errors": 0.0, "refused/tokens": 3}


def test_faults_are_in_the_line_and_in_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dropped = {"ledger/dropped/untrainable": 4, "ledger/dropped/stale": 9, "ledger/dropped/end of run": 9}
    said = faults(FAULTY | dropped)
    for fact in (
        "2 train steps without",
        "16 verifier time-outs",
        "3 groups refused (tokens)",
        "4 groups dropped (untr",
    ):
        assert fact in said
    assert "stale" not in said and "end of run" not in said and "errors" not in said and not faults(ROW)
    seen = display(tmp_path)
    seen.status = {"started": True, "waits": [], **FAULTY}
    seen.update(last=True)
    write(tmp_path, ROW)
    seen.update(last=True)
    assert [line.count("16 verifier time-outs") for line in capsys.readouterr().out.splitlines()] == [1, 1]
    seen.close()
    ledger = {"admitted": 0, "trained": 0, "filtered": {}, "dropped": {}, "active": 0}
    summary = {
        "steps": 1,
        "staleness_max": 0,
        "staleness_bound": 1,
        "ledger": ledger,
        "stopped_because": "",
        "faults": FAULTY,
    }
    print_summary(summary, tmp_path)
    assert "16 verifier time-outs" in capsys.readouterr().out
