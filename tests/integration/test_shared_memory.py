"""Payloads in shared memory and payloads on the socket: real processes train on the same data from both."""

from pathlib import Path

import pytest

from tests.integration.runs import rows, train_in_processes


@pytest.mark.integration
def test_the_way_of_a_payload_changes_nothing(tmp_path: Path) -> None:
    """A ring of 8 KB holds a few groups only: it wraps, and what finds no room goes by the socket."""
    common = ["mode=sync", "actors.count=1", "run.steps=8", "run.target_reward=null", "eval.prompts=0"]
    common += ["buffer.transport=ipc"]
    found = []
    for name, size in (("socket", 0), ("both", 8192), ("memory", 1 << 24)):
        found.append(rows(train_in_processes(tmp_path, name, f"buffer.shared_bytes={size}", *common)))
    for socket, both, memory in zip(*found, strict=True):
        assert socket["reward/mean"] == both["reward/mean"] == memory["reward/mean"], "other tokens were sampled"
        for other in (both, memory):  # up to rounding: sequences may share other decode steps
            assert other["loss"] == pytest.approx(socket["loss"], rel=1e-3, abs=1e-6)
            assert other["grad_norm"] == pytest.approx(socket["grad_norm"], rel=1e-3)
