"""The bench for a borrowed GPU, on the CPU: its items with tiny shapes, failures as rows, and how it resumes."""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from scripts.bench import gpu
from scripts.bench.gpu import LIMITS, Bench, attempt
from tests.forked import Command

OF = {"device": "cpu", "tiny": True}
ARGUMENTS = argparse.Namespace(device="cpu", tiny=True)
FAST = [name for name in LIMITS if name not in ("one_card", "mfu_1.5b", "mfu_7b", "decode_1.5b", "decode_7b")]
"""The others differ from these in shapes only; `one_card` starts two training runs."""


@pytest.mark.integration
def test_every_item_runs_on_a_cpu(tmp_path: Path) -> None:
    words = ["scripts.bench.gpu", "--device", "cpu", "--tiny", "--json", str(tmp_path / "g.json"), "--only", *FAST]
    bench = Command(words, tmp_path / "said")
    assert bench.wait(300) == 0, (tmp_path / "said").read_text()[-5000:]
    rows = json.loads((tmp_path / "g.json").read_text())["items"]
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(FAST, "ok")
    table = (tmp_path / "g.md").read_text()
    assert "| delta | ok |" in table and "| one_card | not run yet |" in table
    assert rows["engine"]["found"]["greedy_differs"] == 0 == rows["losses"]["found"]["ppo_error"]
    assert rows["decode_0.5b"]["found"]["2_tokens_per_second"] > 0


def broken(place):
    yield {"before": 1.0}
    raise ValueError("no such kernel\nand more")


def hanging(place):
    yield {"before": 2.0}
    child = subprocess.Popen(["sleep", "600"])
    (Path(os.environ["SAID"])).write_text(str(child.pid))
    time.sleep(600)


def dying(place):
    yield {"before": 3.0}
    os.kill(os.getpid(), 9)


def test_a_failure_is_a_row_with_what_was_found_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.items()  # imported here, not within a time limit
    monkeypatch.setenv("SAID", str(tmp_path / "pid"))
    failed = attempt("a", broken, ARGUMENTS, 60)
    assert (failed["status"], failed["error"]) == ("failed", "ValueError: no such kernel")
    assert failed["found"] == {"before": 1.0} and "Traceback" in failed["log"]
    killed = attempt("c", dying, ARGUMENTS, 60)
    assert (killed["status"], killed["error"], killed["found"]) == ("failed", "exit -9", {"before": 3.0})
    cut = attempt("b", hanging, ARGUMENTS, 5)
    assert (cut["status"], cut["found"]) == ("cut", {"before": 2.0}) and "not done in 5 s" in cut["error"]
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # what it had started ends too
            os.kill(int((tmp_path / "pid").read_text()), 0)
            time.sleep(0.05)


def test_it_continues_where_it_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    bench = Bench.continued(file, OF)
    assert bench.due(None) == list(LIMITS)
    bench.note("losses", {"status": "failed", "seconds": 1.0, "found": {}, "error": "a | b"})
    bench.note("machine", {"status": "ok", "seconds": 1.0, "found": {"torch": "2"}})
    again = Bench.continued(file, OF)
    assert again.rows == bench.rows
    assert again.due(None) == [*(name for name in LIMITS if name not in ("machine", "losses")), "losses"]
    assert again.due(["machine"]) == ["machine"]
    assert "| losses | failed | 1 | **a / b**  |" in file.with_suffix(".md").read_text()
    with pytest.raises(SystemExit):
        Bench.continued(file, {"device": "cuda", "tiny": False})


def test_every_item_has_a_limit_and_a_function() -> None:
    assert set(gpu.items()) == set(LIMITS)
