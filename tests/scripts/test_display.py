"""The display of `train`: the facts of `metrics.jsonl`, complete at any width, and nothing twice. Requests to the
buffer of a run that was killed, and is resumed meanwhile."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from areal_like.config import run_config as configs
from areal_like.interfaces import Tracked
from areal_like.launch.outcome import Death
from areal_like.run.run_folder import RENDEZVOUS, note
from areal_like.trackers.board import Board
from scripts.following import running, tracking
from scripts.following.display import Display, faults, learning
from scripts.following.tracking import Tracking

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
FAULTY = {"train/nonfinite_steps": 2, "rewards/timeouts": 16.0, "rewards/errors": 0.0, "rollout/refused": 3}


def display(tmp_path: Path) -> Display:
    """The display of a run that has made 30 of its 300 train steps."""
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 29, "reward/mean": 0.2}}\n{json.dumps(ROW)}\n')
    config = configs.load(["configs/quickstart.yaml", "run.steps=300", "run.max_seconds=10"])
    return Display(config, tmp_path, plain=True)


def test_each_note_of_a_process_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = display(tmp_path)
    for text in ("compiling", "12.0 GiB free"):
        note(tmp_path, f"learner: {text}")
        seen.update()
        seen.update()
    assert capsys.readouterr().out.splitlines() == ["learner: compiling", "learner: 12.0 GiB free"]


def test_a_line_has_the_facts_of_the_last_step_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = display(tmp_path)
    for _ in range(3):
        seen.update(last=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert [fact for fact in FACTS if fact not in line] == [] and "\x1b" not in line
    seen.status = {"started": True, "waits": ["all processes wait for the journal's disk"]}
    for _ in range(3):
        seen.update(last=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "step 30/300 | waits all processes wait for the journal's disk", "no step came meanwhile"


def test_each_death_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = display(tmp_path)
    first = Death("actor-1", 5, "was killed by SIGKILL", 1)
    for _ in range(2):
        seen.update([first])
    seen.update([first, Death("actor-1", 7, "was killed by SIGSEGV", 3, again_in=None)])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "actor-1 was killed by SIGKILL", "actor-1 was killed by SIGSEGV",
    ]  # fmt: skip
    assert "left out actor-1" in seen._line()


@pytest.mark.parametrize(("shares", "learned"), [([1.0, 1.0], False), ([1.0, 0.9], True)])
def test_a_run_in_which_no_rewards_differed_has_learned_nothing(tmp_path: Path, shares: list, learned: bool) -> None:
    rows = [json.dumps({"step": step, "zero_variance_share": share}) for step, share in enumerate(shares)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, ""]))
    assert (learning(tmp_path) == "") == learned


def test_faults_are_counted_and_expected_drops_are_none() -> None:
    dropped = {"ledger/dropped/untrainable": 4, "ledger/dropped/stale": 9, "ledger/dropped/end of run": 9}
    assert [each.split()[0] for each in faults(FAULTY | dropped).split(", ")] == ["2", "16", "3", "4"]
    assert not faults(ROW)
    actors = {"actor-0": {"stats": {}}, "actor-1": {"stats": {"verifier_note": "mine.py:12"}}}
    assert faults(FAULTY | {"actors": actors}).split(", ")[-1] == "mine.py:12"


@pytest.fixture
def left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run whose buffer was killed: its rendezvous is still there, and a resume has begun."""
    configs.save(configs.load(["configs/quickstart.yaml"]), tmp_path / "config.yaml")
    (tmp_path / RENDEZVOUS).mkdir()
    offer(tmp_path, pid=1)
    monkeypatch.setattr(running, "is_going_on", lambda folder: True)
    return tmp_path


def offer(run: Path, pid: int) -> None:
    place = {"endpoint": f"ipc://{run}/{pid}", "host": socket.gethostname(), "pid": pid}
    (run / RENDEZVOUS / "new").write_text(json.dumps(place))
    (run / RENDEZVOUS / "new").rename(run / RENDEZVOUS / "buffer.json")


def test_another_buffer_in_its_place_ends_the_wait(left_over: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PATIENCE", 120.0)
    asked = running.Running(left_over)
    replaced = threading.Timer(0.1, offer, (left_over, 2))
    replaced.start()
    with pytest.raises(running.NotRunning, match="its buffer has ended meanwhile; ask again"):
        asked.report()
    asked.close()


HERE = "tests.scripts.test_display"


class Recorder:
    """Records its calls."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, run: Tracked):
        self.run, self.rows, self.ended = run, list[Any](), list[Any]()
        self.where = "look here"
        Recorder.made.append(self)

    def add(self, row: Mapping[str, object]) -> None:
        self.rows.append(row)

    def end(self, summary: Mapping[str, object] | None) -> None:
        self.ended.append(summary)


class Broken(Recorder):
    def add(self, row: Mapping[str, object]) -> None:
        raise RuntimeError("the server is gone")


class Hanging(Recorder):
    let_go = threading.Event()

    def add(self, row: Mapping[str, object]) -> None:
        self.let_go.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Tracking]:
    """Starts trackers of a run."""

    def started(*names: str) -> Tracking:
        trackers = ",".join(f"{HERE}:{name}" for name in names)
        config = configs.load(
            ["configs/quickstart.yaml", f"run.trackers=[{trackers}]", "run.steps=100", "learner.lr=3e-3"]
        )
        Recorder.made.clear()
        return Tracking(config, tmp_path)

    return started


def test_rows_reach_a_tracker_and_one_that_fails_is_left(start: Callable[..., Tracking]) -> None:
    started = start("Broken", "Recorder")
    for step in (1, 2, 3):
        started.row({"step": step})
    assert started.end({"steps": 2}) == [
        f"tracker {HERE}:Broken: the rest of the run is not shown there: the server is gone",
        f"{HERE}:Recorder: look here",
    ]
    _, recorder = Recorder.made
    assert [row["step"] for row in recorder.rows] == [1, 2, 3] and recorder.ended == [{"steps": 2}]
    assert recorder.run.settings["learner.lr"] == 3e-3


def test_a_tracker_that_hangs_does_not_hold_the_end_up(
    start: Callable[..., Tracking], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "END_SECONDS", 0.2)
    started = start("Hanging")
    started.row({"step": 1})
    (note, *_) = started.end(None)
    Hanging.let_go.set()
    assert "have not taken everything within 0 s" in note and "Hanging" in note


ROWS: list[dict[str, Any]] = [
    {"step": 1, "reward/mean": 0.5, "loss": None, "staleness/histogram": {"10": 1, "0": 3, "2": 4}},
    {"step": 2, "reward/mean": 0.25, "loss": 1.5, "staleness/histogram": {"0": 7}},
]
SUMMARY = {"steps": 2, "reward_after": 0.75}


def a_run(folder: Path) -> Tracked:
    settings = {"loss.name": "dg", "learner.lr": 0.002, "learner.compile": True, "run.name": "r", "replay": None}
    return Tracked(folder, "ours", "dg-lr=0.002", settings)


def fed(tracker: Any, rows: list[dict[str, Any]] = ROWS) -> Any:
    for row in rows:
        tracker.add(row)
    tracker.end(SUMMARY)
    return tracker


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "a b"
    board = Board(a_run(folder))
    assert board.where == f"tensorboard --logdir '{folder}/tb'", "to be pasted into a shell"
    fed(board)
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.25)]
    assert set(events.Tags()["scalars"]) == {"step", "reward/mean", "loss"}
    resumed = [{"step": 2, "reward/mean": 0.75}, {"step": 3, "reward/mean": 1.0}]
    fed(Board(a_run(folder)), resumed)
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75), (3, 1.0)]


@pytest.mark.slow
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("WANDB_MODE", "offline"), ("WANDB_CACHE_DIR", "cache"), ("WANDB_DATA_DIR", "data")):
        monkeypatch.setenv(key, value if key == "WANDB_MODE" else str(tmp_path / value))
    from areal_like.trackers.wandb import WeightsAndBiases

    fed(WeightsAndBiases(a_run(tmp_path)))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    for text in (b"ours", b"dg-lr=0.002", b"loss.name", b"reward/mean", b"0.25"):
        assert text in written, text
