"""Every module of `scripts` as a command: quick help, refusals before any work, a clear end."""

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import cli, train
from scripts.console import arguments

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "scripts"
COMMANDS = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if 'if __name__ == "__main__"' in path.read_text()
)
WALK = """
import contextlib, io, json, runpy, sys
said = {}
for name in sys.argv[1:]:
    sys.argv, out = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code = runpy.run_module(f"scripts.{name}", run_name="__main__", alter_sys=True) and "no exit"
        except SystemExit as ended:
            code = ended.code
    heavy = sorted({"torch", "transformers", "sglang", "ray", "numba", "tensorboard", "matplotlib"} & set(sys.modules))
    said[name] = [code, out.getvalue(), heavy]
print(json.dumps(said))
"""


def python(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, **more)  # type: ignore[call-overload]


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Undo the settings that a command makes for its process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_verbs_are_the_modules_at_the_top() -> None:
    verbs = (
        "train ablate eval export compare samples report ledger timeline status join stop serve check config simulate"
    )
    assert set(cli.VERBS) == {*verbs.split(), "plan", "keys"}
    assert {name for name in COMMANDS if "." not in name} == {"cli", *cli.VERBS}


def test_help_says_something_and_imports_nothing_heavy() -> None:
    """Benches and claims too: they parse their arguments before they import the measured modules."""
    done = python("-c", WALK, *COMMANDS)
    assert done.returncode == 0, done.stderr
    for name, (code, text, heavy) in json.loads(done.stdout).items():
        assert code == 0 and name.rpartition(".")[2] in text and len(text) > 100, f"{name}: {code} {text}"
        assert not heavy, f"scripts.{name} --help imports {heavy}"
        assert "." in name or name == "cli" or "-m scripts" not in text, "an installed package has no `scripts`"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (arguments.picture, "a.doc"),
        (arguments.new_file, "."),
        (arguments.new_file, "read-only.json"),
        (arguments.positive, "0"),
        (arguments.bound, "nan"),
        (arguments.port, "65536"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_work(
    tmp_path: Path, kind: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("read-only.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "read-only.json")
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(text)):
        kind(text)


@pytest.mark.parametrize(("where", "code"), [("write_record", 2), ("run", 1)])
def test_a_full_disk_at_the_start_is_one_sentence_with_the_remedy(
    tmp_path: Path, where: str, code: int, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write raises it, without the name of the file

    monkeypatch.setattr(train, where, full)
    with own_signals():
        assert train.main(["configs/quickstart.yaml", f"run.dir={tmp_path}", "run.name=a"]) == code
    place = tmp_path if where == "write_record" else tmp_path / "a"
    said = rf"error: No space left on device: make room \([\d.]+ MB are free on the disk of {place}\)\n"
    assert re.fullmatch(said, capsys.readouterr().err)
    assert (tmp_path / "a").exists() == (where == "run")


PRINTS = """
import sys, time
from scripts.console.process import lasting_output
with lasting_output():
    print("one", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        print("more", flush=True)
    sys.stderr.write("went on\\n")
"""


def test_output_that_nobody_reads_any_more_ends_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == "one\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    said = process.stderr.read()
    assert process.wait(60) == 0
    assert said == "note: the output can't be written any more (Broken pipe): continuing without it\nwent on\n"
