"""Runs whose config another version wrote: readers fill in missing keys; a resume asks for what it cannot know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from areal_like import Run
from areal_like.config import run_config as configs
from areal_like.config.older_configs import ALWAYS_THERE, fill, load
from areal_like.config.run_config import ConfigError
from areal_like.config.schema import SECTIONS
from areal_like.places import CONFIGS
from scripts import compare, eval, report, samples, status
from scripts.eval import run_of
from scripts.starting.earlier_runs import reopen_run_folder
from tests.scripts.written_runs import QUESTION, written_run

LACKING = ("run.project", "run.trackers", "run.samples_bytes", "security", "inject_staleness", "eval.workflow")
SAME = ["quickstart", "run.steps=20"]


def age(folder: Path, *lacking: str, **more: object) -> Path:
    """Make the run's config one of a version that lacks some keys and has others."""
    path = folder / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    for key in lacking:
        section, _, below = key.partition(".")
        del (tree[section] if below else tree)[below or section]
    path.write_text(yaml.safe_dump(tree | more))
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = age(written_run(tmp_path / "old"), *LACKING)
    buffer = yaml.safe_load((folder / "config.yaml").read_text())["buffer"]
    return age(folder, buffer=buffer | {"shared_bytes": 1}, parking=True)


def test_samples_report_comparison_and_status_of_an_old_run(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = written_run(old.parent / "new")
    for command, argv in (
        (samples.main, [str(old)]),
        (report.main, [str(old)]),
        (report.main, [str(old), str(new), "--out", str(old / "both.html")]),
        (compare.main, [str(old), str(new)]),
        (status.main, [str(old)]),
    ):
        assert command(argv) == 0, capsys.readouterr().err
    assert QUESTION in capsys.readouterr().out and QUESTION in (old / "report.html").read_text()


def test_what_the_config_did_not_say_is_no_setting_of_the_run(old: Path) -> None:
    assert report.main([str(old)]) == 0
    page = (old / "report.html").read_text()
    assert '["run.steps"' in page and '["run.project"' not in page and "shared_bytes" not in page


def test_gaps_have_todays_defaults_and_are_told(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Run(old).config
    assert (config.run.project, config.run.trackers, config.security.key_folder) == (
        "areal_like",
        ["tensorboard"],
        None,
    )
    assert (config.run.steps, config.buffer.journal) == (20, "memory")
    assert capsys.readouterr().err == ""
    assert run_of(old) == config
    told = capsys.readouterr().err
    assert told.startswith("note: ") and told.count("\n") == 1
    assert (
        "it has no" in told
        and "and 1 more: today's defaults" in told
        and "parking, buffer.shared_bytes: no longer" in told
    )


def test_each_key_can_be_absent(tmp_path: Path) -> None:
    config = configs.load(SAME)
    whole = yaml.safe_load(configs.to_yaml(config))
    defaults, path = yaml.safe_load((CONFIGS / "base.yaml").read_text()), tmp_path / "config.yaml"
    keys = [*whole, *(f"{section}.{key}" for section in SECTIONS for key in whole[section])]
    for key in keys:
        if any(f"{each}.".startswith(f"{key}.") for each in ALWAYS_THERE):
            continue
        path.write_text(yaml.safe_dump(whole))
        age(tmp_path, key)
        tree, gaps = fill(path)
        section, _, below = key.partition(".")
        assert (tree[section][below] if below else tree[section]) == (  # type: ignore[index, call-overload]
            defaults[section][below] if below else defaults[section]
        ), key
        assert gaps.lacking == [key] and not gaps.unknown
    configs.save(config, path)
    assert load(path) == config == configs.load_resolved(path) and not fill(path)[1].note()


def test_a_resume_fills_what_changes_nothing_and_refuses_what_it_cannot_know(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = configs.load([*SAME, f"task={{name: '{written_run.__module__}:Apples'}}"])
    with pytest.raises(ConfigError, match=r"resume: .* is of another version, .* what parking would be"):
        reopen_run_folder(now, old)
    tree = yaml.safe_load((old / "config.yaml").read_text())
    del tree["parking"]
    (old / "config.yaml").write_text(yaml.safe_dump(tree))
    assert reopen_run_folder(now, old).run.name == "old"
    assert "note: " in capsys.readouterr().err
    for key in ("policy", "sampling.temperature"):
        (old / "config.yaml").write_text(yaml.safe_dump(tree))
        with pytest.raises(ConfigError, match=f"what {key} would be in this one; start a new run"):
            reopen_run_folder(now, age(old, key))


def test_a_knob_that_is_said_now_and_has_its_default_is_no_change(tmp_path: Path) -> None:
    folder = age(written_run(tmp_path / "a"), advantage={"name": "group"})
    now = configs.load([*SAME, f"task={{name: '{written_run.__module__}:Apples'}}"])
    assert configs.select(now, "advantage") == {"name": "group", "std": False}
    assert reopen_run_folder(now, folder).run.steps == 20
    with pytest.raises(ConfigError, match="advantage was"):
        reopen_run_folder(configs.replace(now, "advantage.std", True), folder)


@pytest.mark.parametrize("command", [samples.main, report.main, compare.main, eval.main])
def test_a_config_that_was_cut_off_is_not_filled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], int]
) -> None:
    """Otherwise the run's answers would be shown beside those of another task."""
    run = written_run(tmp_path / "a")
    other = written_run(tmp_path / "b")
    (run / "checkpoints" / "final").mkdir(parents=True)
    (run / "checkpoints" / "final" / "config.json").write_text("{}")
    whole = (run / "config.yaml").read_text()
    for text, told in ((whole[: whole.index("task:")], "task is missing"), ("run: 5", "run is a section")):
        (run / "config.yaml").write_text(text)
        with pytest.raises(SystemExit):
            command([str(run), str(other)] if command is compare.main else [str(run)])
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", [report.main, compare.main, status.main])
def test_a_damaged_summary_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], int]
) -> None:
    run = written_run(tmp_path / "a")
    (run / "summary.json").write_text('{"steps": 2')
    with pytest.raises(SystemExit):
        command([str(run)])
    assert "summary.json is damaged" in capsys.readouterr().err
