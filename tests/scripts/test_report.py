"""The report as a file: its content, what cannot break out of it, its size."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from areal_like.config.eval_sets import OWN
from areal_like.config.run_config import ConfigError
from areal_like.places import REPOSITORY
from areal_like.run.samples import HELDOUT, TRAINED, Kept
from learners.main import heldout_metrics
from scripts import report, watch
from scripts.following.running import NotRunning, Running
from scripts.report import Report
from scripts.reporting.contents import Budget, Contents, sets_in
from scripts.reporting.excerpts import MOST_TOKENS, excerpt, excerpts, pieces, spread
from scripts.reporting.live import Server
from scripts.reporting.page import as_json, library, page
from scripts.reporting.series import Series
from scripts.reporting.several import members
from scripts.samples import Texts
from scripts.starting import earlier_runs
from tests.scripts.written_runs import HOSTILE, QUESTION, Apples, Bytes, written_run

MEGABYTE = 1_000_000


def data_of(text: str) -> dict[str, Any]:
    """The data that the page's script reads."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_prompt_answer_and_reward_of_a_reward_that_can_be_hacked_are_in_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_run(tmp_path / "a")
    assert report.main([str(run)]) == 0
    assert "1 run," in capsys.readouterr().out
    text = (run / "report.html").read_text()
    (found,) = data_of(text)["runs"]
    best = max(found["samples"], key=lambda sample: sample["reward"])
    assert best["prompt"] == QUESTION and best["reward"] == 0.5 and best["wanted"] == "12"
    assert "".join(best["tokens"]) == "4271" and best["tokens"] == ["4", "2", "7", "1"]
    assert QUESTION in text and '"tokens":["4","2","7","1"]' in text
    assert {sample["fate"] for sample in found["samples"]} == {"trained", "heldout", "dropped"}
    assert found["series"]["columns"]["reward/mean"]["y"][-1] == 0.5
    assert [each["step"] for each in found["evaluations"]] == [0, 20]
    assert found["series"]["heat"]["staleness"]["shares"] == [[0.1] * 20, [0.9] * 20]
    assert {each["fate"]: each["count"] for each in found["ledger"]["fates"]} == {"trained": 320, "dropped: stale": 2}
    assert found["timeline"]["shares"]["learner"]["train"] == pytest.approx(0.5, abs=0.03)
    keys = {key: (value, default) for key, value, default in found["config"]}
    assert keys["run.steps"] == ("20", "100") and keys["loss.clip"][0] == keys["loss.clip"][1]


def test_what_the_model_wrote_ends_no_script_and_loads_nothing(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a", f"task.question={json.dumps('<b>bold?')}", answer=HOSTILE)
    data = Report([run]).read()
    text = page(data, "<i>title")
    assert data_of(text)["runs"][0]["samples"] == json.loads(json.dumps(data["runs"][0]["samples"]))
    assert "".join(data["runs"][0]["samples"][0]["tokens"]) == HOSTILE
    body = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert body and not set("<>&\u2028\u2029") & set(body[1])
    assert len(re.findall(r"<script\b", text.replace(library(), ""))) == len(re.findall("</script>", text))
    assert "<title>&lt;i&gt;title</title>" in text
    assert "default-src 'none'" in text and not re.search(r'(src|href)="https?:', text.replace(library(), ""))
    assert json.loads(as_json(["\ud800<"])) == ["\ud800<"] and as_json([math.nan]) == "[null]"


def test_a_long_run_and_a_study_of_175_runs_stay_below_ten_megabytes(tmp_path: Path) -> None:
    long = Report([written_run(tmp_path / "long", steps=4_000, keys=12)])
    assert len(page(long.read(), "long").encode()) < 10 * MEGABYTE
    one = written_run(tmp_path / "study" / "runs" / "run-0", steps=12)
    lines = ["stage,loss,inject_staleness,seed,reward,run", "tune,ppo,0,100,.5,run-0"]
    for place in range(175):
        (tmp_path / "study" / "runs" / f"run-{place}").mkdir(exist_ok=True)
        for path in (each for each in one.rglob("*") if place and each.is_file()):
            copy = tmp_path / "study" / "runs" / f"run-{place}" / path.relative_to(one)
            copy.parent.mkdir(exist_ok=True)
            copy.hardlink_to(path)
        lines.append(f"main,{('ppo', 'dg')[place % 2]},{place % 7},{place % 5},{place / 175},run-{place}")
    (tmp_path / "study" / "results.csv").write_text("\n".join(lines) + "\n")
    study = Report([tmp_path / "study"])
    data = study.read()
    assert len(page(data, "study").encode()) < 10 * MEGABYTE
    assert len(data["runs"]) == 175 and all(run["samples"] for run in data["runs"])
    assert data["runs"][3]["labels"] == {"loss": "dg", "inject_staleness": "3"} and data["runs"][3]["seed"] == "3"
    assert len(data["points"]) == 14 and data["points"][0]["measures"]["reward"]["count"] == 13
    point = data["points"][0]["measures"]["reward"]
    assert point["low"] < point["mean"] < point["high"]


# ---- several runs ---------------------------------------------------------------------------------------------------


def test_runs_are_told_apart_by_the_keys_that_differ(tmp_path: Path) -> None:
    for name, more in (("a", "loss=ppo"), ("b", "loss=dg"), ("c", "run.seed=3")):
        written_run(tmp_path / name, more, steps=2)
    found = members([tmp_path])
    assert [(each.run.name, each.labels["loss.name"], each.seed) for each in found] == [
        ("a", "ppo", "0"), ("b", "dg", "0"), ("c", "decoupled_ppo", "3"),
    ]  # fmt: skip
    assert not any(key.startswith("run.") for each in found for key in each.labels)
    assert len(members([tmp_path / "a", tmp_path])) == 3, "each once"
    rows = Report([tmp_path]).read()["points"]
    same = {"mean": 0.5, "low": 0.5, "high": 0.5, "count": 1}
    assert [row["measures"]["held-out reward"] for row in rows] == [same] * 3
    written_run(tmp_path / "more" / "a", steps=2)
    data = Report([tmp_path / "a", tmp_path / "more" / "a", tmp_path / "b"]).read()
    assert [run["name"] for run in data["runs"]] == [f"{tmp_path.name}/a", "more/a", "b"]


def test_a_folder_that_takes_no_file_is_answered_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_run(tmp_path / "a")
    (run / "report.html").mkdir()
    with pytest.raises(SystemExit):
        report.main([str(run)])
    assert re.search(r"report\.html cannot be written: .*; name another file with --out", capsys.readouterr().err)


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        members([tmp_path])
    for command in (report, watch):
        with pytest.raises(SystemExit, match="2"):
            command.main([str(tmp_path)])
        assert "no run folder" in capsys.readouterr().err


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_figures_of_held_out_sets_are_read_from_a_live_runs_metrics() -> None:
    sets = {OWN: {"reward": 0.5, "prompts": 4, "samples": 1}, "aime": {"reward": 0.25, "pass@4": 0.5, "samples": 4}}
    assert sets_in({"step": 3, "eval/version": 3, "heldout/x": None} | heldout_metrics(sets)) == sets
    assert sets_in({"eval/reward": 0.5, "eval/version": 3}) == {}, "a run of before there were sets"


def test_buckets_keep_means_and_extremes_of_any_number_of_steps() -> None:
    series = Series(8)
    for step in range(1, 101):
        row = {"step": step, "seconds": step, "x": float(step == 50), "staleness/histogram": {"0": 3, "40": 1}}
        series.add(row | ({"late": 1.0} if step > 90 else {}))
    found = series.data()
    columns = found["columns"]
    assert found["width"] == 16 and len(columns["x"]["y"]) == 7
    assert columns["step"]["y"][0] == 8.5 and columns["step"]["lo"][0] == 1 and columns["step"]["hi"][-1] == 100
    assert sum(y * n for y, n in zip(columns["x"]["y"], [16] * 6 + [4], strict=True)) == pytest.approx(1)
    assert max(columns["x"]["hi"]) == 1 and max(columns["x"]["y"]) < 0.1
    assert columns["late"]["y"] == [None] * 5 + [1, 1] and "lo" not in columns["late"]
    heat = found["heat"]["staleness"]
    assert len(heat["values"]) <= 24 and heat["shares"][0] == [0.75] * 7 and heat["shares"][-1] == [0.25] * 7


# ---- samples --------------------------------------------------------------------------------------------------------


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
    texts._marks = None
    texts._codec, texts.wanted = Bytes(), lambda record: ""  # type: ignore[method-assign]
    found = excerpt(record, texts)
    assert len(found["tokens"]) == MOST_TOKENS and found["gap"] == [MOST_TOKENS // 2, 2 * MOST_TOKENS]
    assert found["numbers"]["advantage"][-1] == length - 1 and found["masked"] == [0, MOST_TOKENS - 1]
    assert found["versions"] == [[2, MOST_TOKENS - 1], [4, 1]] and found["length"] == length


def test_a_task_that_cannot_be_built_shows_numbers_and_says_so(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a", steps=2)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("written_runs:Apples", "written_runs:Pears"))
    found = Contents(run, Budget.of(MEGABYTE, 1)).data()
    assert found["samples"][0]["tokens"] == ["52 ", "50 ", "55 ", "49 "]
    assert "the task cannot be built" in found["notes"][0]


# ---- live -----------------------------------------------------------------------------------------------------------


def get(address: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize(
    ("offered", "state"),
    [
        (None, "running"),
        ({"pid": "mine"}, "running"),
        ({"pid": "dead"}, "stopped"),
        ({"pid": "zombie"}, "stopped"),
        ({"pid": "dead", "host": "elsewhere"}, "running"),
        ({"pid": "dead", "held": True}, "running"),
    ],
)
def test_a_run_that_was_killed_has_stopped(tmp_path: Path, offered: dict[str, Any] | None, state: str) -> None:
    run = written_run(tmp_path / "a b")
    (run / "summary.json").unlink()
    (run / "rendezvous").mkdir()
    ended = subprocess.Popen([sys.executable, "-c", "print()"], stdout=subprocess.PIPE)
    with ended, earlier_runs.lock(run) as lock:
        if offered is not None:
            assert ended.stdout and ended.stdout.read()
            if offered["pid"] == "dead":
                ended.wait()
            pid = os.getpid() if offered["pid"] == "mine" else ended.pid
            found = {"endpoint": "ipc:///tmp/x", "host": socket.gethostname(), **offered, "pid": pid}
            (run / "rendezvous" / "buffer.json").write_text(json.dumps(found))
            if offered["pid"] == "zombie":
                while "Z" not in Path(f"/proc/{pid}/stat").read_text():
                    time.sleep(0.01)
            if "held" not in offered:
                lock.close()
        assert Report([run]).read()["runs"][0]["state"] == state
        if state == "stopped":
            with pytest.raises(NotRunning, match=r"without a summary after train step 20.*with 'resume=.*a b'"):
                Running(run)


def test_the_live_page_needs_its_token_and_brings_new_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.reporting.live.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("scripts.reporting.live.REST", 0.0)
    run = written_run(tmp_path / "a", steps=4)
    (run / "rendezvous").mkdir()
    with Server(Report([run], live=True).read, "a") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, text = get(server.address)
        data = data_of(text.decode())
        assert status == 200 and data["live"] and data["runs"][0]["state"] == "running"
        root = f"http://127.0.0.1:{server.server_port}/"
        for wrong in (root, f"{root}data", f"{root}{'x' * len(server.token)}/", f"{server.address}other"):
            assert get(wrong)[0] == 404
        assert get(server.address, Host="evil.example:80")[0] == 404
        assert get(f"{server.address}data?have={data['number']}")[0] == 204
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "seconds": 0.5, "reward/mean": 0.75}\n')
        lines = (run / "samples" / "trained.jsonl").read_text().splitlines()
        newest = json.loads(lines[-1]) | {"step": 5, "reward": 0.75}
        (run / "samples" / "trained.jsonl").write_text("\n".join([*lines, json.dumps(newest)]) + "\n")
        status, text = get(f"{server.address}data?have={data['number']}")
        (found,) = json.loads(text)["runs"]
        assert found["series"]["columns"]["reward/mean"]["y"][-1] == 0.75
        assert max(found["samples"], key=lambda sample: sample["step"])["reward"] == 0.75
        server.shutdown()


def test_the_command_prints_the_address_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a", steps=2)
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.watch", str(run)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout
    words = process.stdout.readline().split()
    assert words[0] == "open" and get(words[1])[0] == 200
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 0 and not complaint
