"""The display of `train`: the facts of `metrics.jsonl`, complete at any width, and nothing twice. Requests to the
buffer of a run that was killed, and is resumed meanwhile."""

import json
import socket
import threading
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.launch.outcome import Death
from areal_like.run.run_folder import RENDEZVOUS
from scripts.following import running
from scripts.following.display import Display, faults, learning

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
