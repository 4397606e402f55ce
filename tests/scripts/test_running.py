"""Requests to the buffer of a run that was killed, and is resumed meanwhile."""

import json
import socket
import threading
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.run.run_folder import RENDEZVOUS
from scripts.following import running


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
