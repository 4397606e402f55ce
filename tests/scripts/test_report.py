"""A run as a report, as samples in the terminal, and as a timeline: content, what cannot break out of it, size. Runs
side by side."""

import json
import math
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.run.samples import DROPPED, HELDOUT, TRAINED, Kept, SampleLog
from areal_like.run.spans import Span, Spans
from scripts import compare, eval, report, samples
from scripts.analysis.intervals import CURVE_POINTS, Estimate, band, bootstrap
from scripts.console.output import visible
from scripts.following.running import NotRunning, Running
from scripts.report import as_json, library, page
from scripts.reporting.contents import contents, series
from scripts.reporting.excerpts import MOST_TOKENS, excerpt, excerpts, pieces
from scripts.samples import Texts
from scripts.starting import earlier_runs
from scripts.timeline import main, shares, timeline
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


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a", steps=2)
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


def test_excerpts_keep_to_their_bytes_and_have_the_ends_of_the_run(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a")
    texts = Texts(run)
    whole, part = (excerpts(run, texts, most) for most in (1_000_000, 2_000))
    assert len(whole) == 36 and len(json.dumps(part)) < 2_500
    assert Counter(each["fate"] for each in part)[TRAINED] >= 2
    assert {each["step"] for each in part if each["fate"] == TRAINED} <= {1, 20}
    heldout = [each for each in whole if each["fate"] == HELDOUT and each["group"] == 0]
    assert [each["step"] for each in heldout] == [1, 10, 20], "a prompt can be followed"


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


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert samples.main(list(argv)) == 0
    said = capsys.readouterr()
    return said.out, said.err


@pytest.mark.parametrize("answer", [HOSTILE, "[/b][red]:smile:[0.5]", "\x1b[2J\x9b31m\x07", "猫 = кот\u00a0!"])
def test_any_text_is_shown_as_it_is_and_commands_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    run = written_run(tmp_path / "a", answer=answer)
    out, _ = shown(capsys, str(run), "--count", "1")
    assert visible(answer) in out and QUESTION in out
    assert "\x1b" not in out and "\u202e" not in out and "\x9b" not in out


def test_a_sample_that_forks_shows_its_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run(tmp_path / "a")
    path = run / "samples" / "trained.jsonl"
    record = msgspec.json.decode(path.read_bytes().splitlines()[0])
    prompt, said = record["tokens"][: record["prompt_length"]], record["tokens"][record["prompt_length"] :]
    tokens = record["tokens"] + prompt + said
    response = len(tokens) - len(prompt)
    masked = list(range(len(said), len(said) + len(prompt)))
    record |= {"tokens": tokens, "runs": [(record["runs"][0][0], response)], "masked": masked, "numbers": {}}
    path.write_bytes(msgspec.json.encode(record | {"forks": [len(said)]}) + b"\n")
    out, _ = shown(capsys, str(run))
    assert f"2 turns ({len(said)}, {len(said)}), 2 contexts" in out
    (found,) = json.loads(shown(capsys, str(run), "--json", "-")[0])
    assert found["forks"] == [len(said)] and found["turns"] == [found["text"][: len(said)]] * 2


def test_a_task_that_is_not_here_leaves_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written_run(tmp_path / "a")
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(f"{written_run.__module__}:Apples", "gone:Apples"))
    out, err = shown(capsys, str(run), "--count", "1")
    assert "52 50 55 49" in out and "wanted" not in out
    assert "shown as numbers" in err and "gone" in err and err.count("\n") == 1


def test_groups_that_left_early_are_shown_with_their_prompt_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_run(tmp_path / "a")
    log = SampleLog(run, DROPPED, steps=30, most=None, done=30)
    log.write(Kept(DROPPED, 3, 3, 7, 0, [], 0, [], None, "", why="timed out: on 3 leases", actor="actor-0"))
    log.close()
    heading, *said = shown(capsys, str(run), "--dropped", "--search", "timed")[0].splitlines()
    assert heading.endswith("group 7 · no answer · timed out: on 3 leases") and said == [QUESTION, "wanted: 12"]
    assert "no answer" not in shown(capsys, str(run), "--dropped", "--worst", "--count", "0")[0], "it has no reward"
    on_page = {each["why"].partition(":")[0]: each for each in contents(run)["samples"]}["timed out"]
    assert (on_page["prompt"], on_page["reward"], on_page["tokens"]) == (QUESTION, None, [])


def test_a_terminal_without_utf8_shows_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run(tmp_path / "a", answer="猫")
    file = (tmp_path / "out").open("w", encoding="ascii")
    monkeypatch.setattr("sys.stdout", file)
    assert samples.main([str(run), "--count", "1"]) == 0
    file.close()
    assert "\\u732b" in (tmp_path / "out").read_text()


def test_answers_of_a_model_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    eval.show_answers("a", [eval.Answers("\x1b[2J?", "1", ["\x1b]0;x\x07"], [1.0], [{}], [1], 0, 0)])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\\x1b[2J?" in out


def some_run(folder: Path) -> Path:
    spans = [("actor-10", "generate", 100, 104), ("actor-2", "generate", 101, 103), ("actor-2", "update", 102.5, 105)]
    for role, *span in [*spans, ("learner", "train", 104, 110)]:
        Spans(folder, role, since_1970=0.0).add(*span)
    return folder


def test_shares_count_what_overlaps_once_in_what_is_waited(tmp_path: Path) -> None:
    found = timeline(some_run(tmp_path))
    assert list(found) == ["actor-2", "actor-10", "learner"]
    assert found["learner"] == [Span("train", 4, 10)]
    assert shares(found)["actor-2"] == pytest.approx({"generate": 0.2, "update": 0.25, "waits": 0.6})
    assert shares(found)["learner"] == pytest.approx({"train": 0.6, "waits": 0.4})
    part = timeline(tmp_path, 3.5, 4.5)
    assert part["actor-2"] == [Span("update", 3.5, 4.5)] and part["actor-10"] == [Span("generate", 3.5, 4)]
    assert shares(timeline(tmp_path, 50, 60))["learner"] == {"waits": 1.0}


def test_the_time_between_a_run_and_its_resume_is_nobodys(tmp_path: Path) -> None:
    for begin in (100.0, 500.0):  # the first span comes 1 s after the start
        learner = Spans(some_run(tmp_path) if begin == 100 else tmp_path, "learner", since_1970=0.0)
        learner.start(begin - 1)
        learner.add("train", begin + 10, begin + 13)
    found = timeline(tmp_path)
    assert found["learner"] == [Span("train", 4, 13), Span("train", 24, 27)]
    assert shares(found)["learner"] == pytest.approx({"train": 12 / 27, "waits": 15 / 27})


def test_the_command_prints_shares_and_writes_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "timeline.png"
    monkeypatch.setattr(sys, "argv", ["timeline", str(tmp_path), "--plot", str(picture)])
    with pytest.raises(SystemExit, match="2"):
        main()  # no spans yet
    some_run(tmp_path)
    main()
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["actor-2"]]
    assert row == ["actor-2", "20%", "25%", "60%"]
    assert picture.read_bytes()[1:4] == b"PNG"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    found = [written_run(folder / f"ppo-{seed}", "loss=ppo", f"run.seed={seed}", steps=6) for seed in (0, 1)]
    found.append(written_run(folder / "dg", "loss=dg", steps=4))
    summary = json.loads((found[1] / "summary.json").read_text())
    (found[1] / "summary.json").write_text(json.dumps(summary | {"reward_after": 0.7}))
    return found


def test_seeds_are_taken_together(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([*map(str, runs), "--json", "-"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["settings"]["loss.name"] == "ppo" and first["runs"] == [str(run) for run in runs[:2]]
    measure = first["measures"]["held-out reward"]
    assert (measure["mean"], measure["low"], measure["high"], measure["count"]) == (0.6, 0.5, 0.7, 2)
    assert second["settings"]["loss.name"] == "dg" and second["measures"]["train steps"]["mean"] == 4


def test_runs_that_differ_are_never_taken_for_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many keys differ between other runs."""
    far = ["mode=sync", "groups_per_batch=4", "sizing.group_size=4", "advantage=rloo", "loss=dg", "eval.every=3"]
    folders = [written_run(tmp_path / "far", *far, steps=2)]
    folders += [written_run(tmp_path / name, f"learner.lr={name}", steps=2) for name in ("1e-3", "1e-4")]
    folders.append(written_run(tmp_path / "longer", "learner.lr=1e-4", steps=3))
    assert compare.main([str(tmp_path), str(folders[0]), "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(row["runs"] for row in rows) == sorted([str(folder)] for folder in folders), "each once"
    assert {"eval.every", "advantage.name", "run.steps"} <= rows[0]["settings"].keys()
    assert not {"run.seed", "run.name", "run.dir"} & rows[0]["settings"].keys()


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_with_five_seeds_it_holds_the_truth_nearly_as_often_as_it_says() -> None:
    """The plain percentile interval would cover it in 84 % of cases. Each point of a band is a draw of its own."""
    places = range(CURVE_POINTS)
    bands = [band([(places, draw) for draw in draws]) for draws in rng().normal(size=(20, 5, CURVE_POINTS))]
    held = np.mean([(low <= 0) & (high >= 0) for *_, low, high in bands])
    assert 0.90 <= held <= 0.97


def test_a_missing_number_is_left_out_and_counted() -> None:
    found = bootstrap([1.0, None, 3.0, math.nan])
    assert (found.mean, found.n, found.asked) == (2.0, 2, 4)
    assert str(found).endswith("(2 of 4)")
    shown = [bootstrap(values) for values in ([None], [5.0], [0.5, 0.5, 0.5], [0.0, 0.0])]
    assert [str(each) for each in shown] == ["- (0 of 1)", "5.00", "0.500 [0.500, 0.500]", "0.000 [0.000, 0.000]"]
    assert str(Estimate(950.4, -1.26, 2000.0, 3, 3)) == "950 [-1, 2,000]"


def test_a_band_is_the_mean_where_all_curves_are() -> None:
    x, mean, low, _ = band([([0, 10], [0.0, 10.0]), ([0, 5, 20], [2.0, 7.0, 22.0])])
    assert (x[0], x[-1]) == (0, 10)
    assert mean == pytest.approx(x + 1)
    assert low == pytest.approx(x, abs=1e-9)
    assert np.isnan(band([([0, 1], [0, 1])])[2]).all()


def test_tokens_within_a_letter_leave_its_text_to_the_last() -> None:
    texts = Texts.__new__(Texts)
    texts._codec = Bytes()
    tokens = [*"a€b".encode(), 0xE2]
    assert pieces(tokens, texts) == ["a", "", "", "€", "b", "\ufffd"]
