"""The report in headless Chromium: no console message, nothing loaded, complete at any width, light and dark."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.run.samples import DROPPED, SampleLog, unanswered
from scripts.report import Report
from scripts.reporting.live import Server
from scripts.reporting.page import page
from tests.chromium import PROGRAM, Chromium, chromium
from tests.scripts.test_tool_calls import MULTI_TURN, talk
from tests.scripts.written_runs import HOSTILE, QUESTION, cut, metrics, written_run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run whose reward pays for any digits."""
    folder = tmp_path_factory.mktemp("usual")
    return written(folder / "a.html", written_run(folder / "a"))


def written(file: Path, *runs: Path) -> Path:
    file.write_text(page(Report(runs).read(), "a run"))
    return file


def opened(browser: Chromium, file: Path, width: int = 1280, dark: bool = False) -> None:
    browser.said.clear()
    browser.open(file.as_uri(), width, dark=dark)


def press(browser: Chromium, where: str, words: str) -> None:
    buttons = f"[...document.querySelectorAll({where + ' .choice button'!r})]"
    browser.value(f"{buttons}.find((button) => button.textContent === {words!r}).click()")


def type_in(browser: Chromium, label: str, words: str) -> None:
    box = f"document.querySelector('[aria-label=\"{label}\"]')"
    browser.value(f"{box}.value = {words!r}; {box}.dispatchEvent(new Event('input'))")


@pytest.mark.parametrize(("width", "dark"), [(400, False), (2000, True)], ids=["narrow and light", "wide and dark"])
def test_the_page_is_whole_at_any_width_and_says_nothing(
    browser: Chromium, usual: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    opened(browser, usual, width, dark)
    assert browser.value("document.querySelectorAll('.js-plotly-plot').length") > 0
    assert browser.value("document.documentElement.scrollWidth") <= width
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 18, 23)" if dark else "rgb(246, 247, 249)")
    browser.value("scrollTo(0, document.body.scrollHeight)")
    assert browser.picture(tmp_path / "picture.png").stat().st_size > 10_000
    assert browser.said == []


def test_a_reward_that_can_be_hacked_shows_itself_on_the_first_page(browser: Chromium, usual: Path) -> None:
    opened(browser, usual)
    seen = browser.value("document.querySelector('.written').innerText")
    assert QUESTION in seen and "4271" in seen and "0.5" in seen and "wanted: 12" in seen
    assert "Exactly the wanted answer: 0 of the" in seen
    assert browser.value("document.querySelector('.written').getBoundingClientRect().top") < 400
    assert browser.value("document.querySelector('.front .js-plotly-plot').getBoundingClientRect().top") < 400


def test_held_out_sets_have_a_section_with_their_figures(browser: Chromium, tmp_path: Path) -> None:
    run = written_run(tmp_path / "a")
    summary = json.loads((run / "summary.json").read_text())
    for place, each in enumerate(summary["evaluations"]):
        figures = {"reward": 0.25 + place / 2, "reward_low": 0.125, "reward_high": 0.875, "prompts": 30, "samples": 8}
        each["sets"] = {"heldout": figures | {"samples": 1}, "<b>aime": figures | {"pass@1": 0.25, "pass@8": 0.5}}
    (run / "summary.json").write_text(json.dumps(summary))
    opened(browser, written(tmp_path / "a.html", run))
    said = browser.value("document.getElementById('heldout').innerText")
    assert "<b>aime" in said and "pass@8" in said and "0.75 [0.125, 0.875]" in said and "0.25 [" in said
    assert browser.value("document.querySelectorAll('#heldout .chart').length") == 2 and not browser.said


def test_hostile_text_is_shown_and_never_run(browser: Chromium, tmp_path: Path) -> None:
    opened(browser, written(tmp_path / "a.html", written_run(tmp_path / "<b>a", answer=HOSTILE)))
    assert browser.value("typeof window.hacked") == "undefined"
    shown = browser.value("document.querySelector('.detail .tokens').innerText")
    assert "</script><script>window.hacked = 1</script>" in shown and "\\u202e" in shown
    assert browser.value("document.querySelectorAll('#main img, #main script, #main b').length") == 0
    assert browser.said == []


def test_samples_are_filtered_searched_and_coloured(browser: Chromium, usual: Path) -> None:
    opened(browser, usual)
    rows = "document.querySelectorAll('.rows .row').length"
    assert browser.value(rows) == 36
    browser.value(
        "[...document.querySelectorAll('.tools .choice button')].find((b) => b.textContent === 'dropped').click()"
    )
    assert browser.value(rows) == 12 and "stale: too old" in browser.value(
        "document.querySelector('.detail').innerText"
    )
    type_in(browser, "least reward", "0.1")
    assert browser.value(rows) == 9
    type_in(browser, "search", "no such text")
    assert browser.value(rows) == 0
    type_in(browser, "search", "4271")
    browser.value(
        "[...document.querySelectorAll('.tools .choice button')].find((b) => b.textContent === 'trained').click()"
    )
    tint = "document.querySelector('.token').style.background"
    by_age = browser.value(tint)
    browser.value("(() => { browser.filters.colour = 'advantage'; browser.open(browser.chosen); })()")
    assert by_age and browser.value(tint) and browser.value(tint) != by_age


def test_tool_calls_and_reasons_are_shown(browser: Chromium, tmp_path: Path) -> None:
    run = written_run(tmp_path / "a", MULTI_TURN)
    talk(run)
    log = SampleLog(run, DROPPED, steps=30, most=None, done=30)
    log.write(unanswered(3, 3, 7, "timed out: on 3 leases"))
    log.write(cut(b"It is 7 or so"))
    log.close()
    opened(browser, written(tmp_path / "a.html", run))
    type_in(browser, "search", "I ask.")
    detail = "document.querySelector('.detail').innerText"
    seen = browser.value(detail)
    assert "Tool calls" in seen and 'turn 1  calculator {"expression": "6*2"}' in seen and "→ 12" in seen
    assert "(no call that can be read)" in seen and "→ not answered" in seen
    assert "− 0.5 length" in seen and "ended by length" in seen
    assert browser.value("document.querySelectorAll('.detail .call .failed').length") == 2
    type_in(browser, "search", "")
    choose = "(() => { const list = document.querySelector('[aria-label=why]'); list.value = 'timed out';"
    browser.value(f"{choose} list.dispatchEvent(new Event('change')); }})()")
    assert browser.value("document.querySelectorAll('.rows .row').length") == 1
    seen = browser.value(detail)
    assert QUESTION in seen and "no answer" in seen and "on 3 leases" in seen and "Answer" not in seen
    browser.value(f"{choose.replace('timed out', 'cut')} list.dispatchEvent(new Event('change')); }})()")
    seen = browser.value(detail)
    assert QUESTION in seen and "13 tokens, broken off" in seen and "cut: too slow" in seen
    assert browser.value("document.querySelector('.detail .tokens').innerText") == "It is 7 or so"
    type_in(browser, "least reward", "-1")
    assert browser.value("document.querySelectorAll('.rows .row').length") == 0, "it has no reward"
    assert browser.said == []


def test_several_runs_are_compared_and_one_is_chosen(browser: Chromium, tmp_path: Path) -> None:
    runs = [written_run(tmp_path / loss, f"loss={loss}", answer=loss) for loss in ("ppo", "dg", "tis")]
    opened(browser, written(tmp_path / "a.html", *runs))
    assert browser.value("document.querySelector('#runs h2').textContent") == "3 runs"
    assert browser.value("document.querySelectorAll('#runs tr.pick').length") == 3
    browser.value("document.querySelectorAll('#runs tr.pick')[1].click()")
    assert "dg" in browser.value("document.querySelector('.written').innerText")
    browser.value(
        "[...document.querySelectorAll('header .choice button')].find((b) => b.textContent === 'seconds').click()"
    )
    assert browser.said == []


def test_a_live_page_shows_new_samples_where_they_belong(
    browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's choice stays, and so do the charts."""
    monkeypatch.setattr("scripts.reporting.live.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("scripts.reporting.live.REST", 0.0)
    run = written_run(tmp_path / "a", steps=4)
    (run / "rendezvous").mkdir()
    with Server(Report([run], live=True).read, "a") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.said.clear()
        browser.open(server.address)
        browser.value("browser.open(browser.matching()[5])")
        browser.value("window.plot = document.querySelector('.front .plot'); window.row = browser.chosen.index")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(5, 5, 4)) + "\n")
        with (run / "samples" / "trained.jsonl").open("a") as file:
            line = (run / "samples" / "trained.jsonl").read_text().splitlines()[-1]
            file.write(json.dumps(json.loads(line) | {"step": 5, "reward": 0.75}) + "\n")
        until = time.monotonic() + 60
        while "0.75" not in browser.value("document.querySelector('.written').innerText"):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert browser.value("document.querySelector('.front .plot') === window.plot")
        assert browser.value("window.plot.data.find((trace) => trace.name === 'train').y.length") == 5
        assert browser.value("browser.chosen.index === window.row && browser.chosen.step === 4")
        assert browser.said == [f"asks for {server.address}"] + [
            said for said in browser.said[1:] if said.startswith(f"asks for {server.address}data?have=")
        ]
        server.shutdown()
