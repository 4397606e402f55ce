"""`metrics.jsonl` survives its faults: half a row, a damaged row, numbers that JSON lacks, a full disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from areal_like.run.metrics import MetricsFollower, MetricsLog


def test_rows_are_seen_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.new_rows() == []
    with MetricsLog(path) as log:
        log.write({"step": 1, "staleness/histogram": {"0": 3}})
        log.write({"step": 2})
        assert follower.new_rows() == [{"step": 1, "staleness/histogram": {"0": 3}}, {"step": 2}]
        log.write({"step": 3})
        assert follower.new_rows() == [{"step": 3}]
        assert follower.new_rows() == []


def test_what_json_lacks_becomes_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write({"step": 1, "loss": math.nan, "ratio/max": math.inf, "reward/mean": 0.5})
    line = (tmp_path / "metrics.jsonl").read_text()
    refuse = pytest.fail
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": None, "ratio/max": None, "reward/mean": 0.5}


@pytest.mark.parametrize("cut", range(1, 15))
def test_an_unfinished_last_line_is_left_until_it_is_finished_and_removed_by_a_writer(tmp_path: Path, cut: int) -> None:
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 1}\n{"step": 22}\n'
    follower = MetricsFollower(path)
    path.write_bytes(whole[:-cut])
    first = follower.new_rows()
    path.write_bytes(whole)
    assert first + follower.new_rows() == [{"step": 1}, {"step": 22}]
    path.write_bytes(whole[:-cut])
    with MetricsLog(path, done=1) as log:
        log.write({"step": 2})
    assert MetricsFollower(path).new_rows() == [{"step": step} for step in ((1, 2) if cut < 14 else (2,))]


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_again_and_a_damaged_line_costs_itself_only(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "re\x00\xff\n[]\n{"step": 2, "loss": 1}\n{"step": 3, "loss": 1}\n')
    with MetricsLog(path, done=2) as log:
        log.write({"step": 3, "loss": 2})
    assert MetricsFollower(path).new_rows() == [{"step": 1}, {"step": 2, "loss": 1}, {"step": 3, "loss": 2}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"), MetricsLog(path) as log:
        log.write({"step": 1})
