"""The report as a file: its content, what cannot break out of it, its size."""

import json
import math
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_like.run.samples import HELDOUT, TRAINED, Kept
from scripts import report
from scripts.following.running import NotRunning, Running
from scripts.report import as_json, library, page
from scripts.reporting.contents import contents, series
from scripts.reporting.excerpts import MOST_TOKENS, excerpt, excerpts, pieces, spread
from scripts.samples import Texts
from scripts.starting import earlier_runs
from tests.scripts.written_runs import HOSTILE, QUESTION, Apples, Bytes, written_run


def data_of(text: str) -> dict[str, Any]:
    """The data that the page's script reads."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_prompt_answer_reward_and_all_sections_are_in_the_page(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a")
    assert report.main([str(run)]) == 0
    found = data_of((run / "report.html").read_text())
    best = max(found["samples"], key=lambda sample: sample["reward"])
    assert (best["prompt"], best["reward"], best["wanted"]) == (QUESTION, 0.5, "12")
    assert best["tokens"] == ["4", "2", "7", "1"]
    assert {sample["fate"] for sample in found["samples"]} == {"trained", "heldout", "dropped"}
    assert found["series"]["columns"]["reward/mean"]["y"][-1] == 0.5
    assert [each["step"] for each in found["evaluations"]] == [0, 20]
    assert found["series"]["ages"] == {"values": [0, 1], "shares": [[0.1] * 20, [0.9] * 20]}
    assert {each["fate"]: each["count"] for each in found["ledger"]["fates"]} == {"trained": 320, "dropped: stale": 2}
    keys = {key: (value, differs) for key, value, differs in found["config"]}
    assert keys["run.steps"] == ("20", True) and not keys["loss.clip"][1]


def test_what_the_model_wrote_ends_no_script_and_loads_nothing(tmp_path: Path) -> None:
    data = contents(written_run(tmp_path / "a", f"task.question={json.dumps('<b>bold?')}", answer=HOSTILE))
    text = page(data, "<i>title")
    assert data_of(text)["samples"] == json.loads(json.dumps(data["samples"]))
    assert "".join(data["samples"][0]["tokens"]) == HOSTILE
    body = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert body and not set("<>&\u2028\u2029") & set(body[1])
    assert len(re.findall(r"<script\b", text.replace(library(), ""))) == len(re.findall("</script>", text))
    assert "<title>&lt;i&gt;title</title>" in text
    assert "default-src 'none'" in text and not re.search(r'(src|href)="https?:', text.replace(library(), ""))
    assert json.loads(as_json(["\ud800<"])) == ["\ud800<"] and as_json([math.nan]) == "[null]"


def test_a_long_run_stays_below_ten_megabytes(tmp_path: Path) -> None:
    long = written_run(tmp_path / "long", steps=3_000, keys=12)
    assert len(page(contents(long), "long").encode()) < 10_000_000


@pytest.mark.parametrize("wrong", ["no run", "no file"])
def test_what_cannot_be_read_or_written_is_refused(tmp_path: Path, wrong: str) -> None:
    run = written_run(tmp_path / "a", steps=2) if wrong == "no file" else tmp_path
    (run / "report.html").mkdir()
    with pytest.raises(SystemExit, match="2"):
        report.main([str(run)])


def test_buckets_keep_means_and_extremes_of_any_number_of_steps() -> None:
    rows = []
    for step in range(1, 101):
        row = {"step": step, "seconds": step, "x": float(step == 50), "staleness/histogram": {"0": 3, "40": 1}}
        rows.append(row | ({"late": 1.0} if step > 90 else {}))
    found = series(rows, 100, most=8)
    columns = found["columns"]
    assert found["width"] == 16 and len(columns["x"]["y"]) == 7
    assert columns["step"]["y"][0] == 8.5 and columns["step"]["lo"][0] == 1 and columns["step"]["hi"][-1] == 100
    assert sum(y * n for y, n in zip(columns["x"]["y"], [16] * 6 + [4], strict=True)) == pytest.approx(1)
    assert max(columns["x"]["hi"]) == 1 and max(columns["x"]["y"]) < 0.1
    assert columns["late"]["y"] == [None] * 5 + [1, 1] and "lo" not in columns["late"]
    ages = found["ages"]
    assert len(ages["values"]) <= 24 and ages["shares"][0] == [0.75] * 7 and ages["shares"][-1] == [0.25] * 7


def test_any_beginning_of_a_choice_is_spread() -> None:
    assert spread(range(9)) == [8, 0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(spread(range(6))) == list(range(6)) and spread([]) == [] and spread("a") == ["a"]


def test_excerpts_keep_to_their_bytes_and_have_the_ends_of_the_run(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a")
    texts = Texts(run)
    whole, part = (excerpts(run, texts, most) for most in (1_000_000, 2_000))
    assert len(whole) == 36 and len(json.dumps(part)) < 2_500
    assert Counter(each["fate"] for each in part)[TRAINED] >= 2
    assert {each["step"] for each in part if each["fate"] == TRAINED} <= {1, 20}
    heldout = [each for each in whole if each["fate"] == HELDOUT and each["group"] == 0]
    assert [each["step"] for each in heldout] == [1, 10, 20], "a prompt can be followed"


def test_tokens_within_a_letter_leave_its_text_to_the_last() -> None:
    texts = Texts.__new__(Texts)
    texts._codec = Bytes()
    tokens = [*"a€b".encode(), 0xE2]
    assert pieces(tokens, texts) == ["a", "", "", "€", "b", "\ufffd"]


def test_a_long_answer_is_shown_without_its_middle() -> None:
    length, prompt = 3 * MOST_TOKENS, Apples(0).prompt("train", 0).tokens.tolist()
    numbers: dict[str, list[float | None]] = {"advantage": [float(place) for place in range(length)]}
    record = Kept(
        TRAINED, 1, 4, 0, 0, [*prompt, *([65] * length)], len(prompt), [(2, length - 1), (4, 1)], 0.5, "stop",
        masked=[0, 1500, length - 1], numbers=numbers,
    )  # fmt: skip
    texts = Texts.__new__(Texts)
    texts._codec, texts.wanted = Bytes(), lambda record: ""  # type: ignore[method-assign]
    found = excerpt(record, texts)
    assert len(found["tokens"]) == MOST_TOKENS and found["gap"] == [MOST_TOKENS // 2, 2 * MOST_TOKENS]
    assert found["numbers"]["advantage"][-1] == length - 1 and found["masked"] == [0, MOST_TOKENS - 1]
    assert found["versions"] == [[2, MOST_TOKENS - 1], [4, 1]] and found["length"] == length


@pytest.mark.parametrize(
    ("offered", "state"),
    [(None, "running"), ({}, "stopped"), ({"host": "elsewhere"}, "running"), ({"held": True}, "running")],
    ids=["it starts", "killed", "on another host", "its starter lives"],
)
def test_a_run_that_was_killed_has_stopped(tmp_path: Path, offered: dict[str, Any] | None, state: str) -> None:
    run = written_run(tmp_path / "a b")
    (run / "summary.json").unlink()
    (run / "rendezvous").mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with earlier_runs.lock(run) as lock:
        if offered is not None:
            found = {"endpoint": "ipc:///tmp/x", "host": socket.gethostname(), "pid": ended.pid, **offered}
            (run / "rendezvous" / "buffer.json").write_text(json.dumps(found))
            if "held" not in offered:
                lock.close()
        assert contents(run)["state"] == state
    if state == "stopped":
        with pytest.raises(NotRunning, match=r"step 20.*resume=.*a b"):
            Running(run)
