"""Shell scripts with stand-ins for their commands, without network and training. The quickstart of the pretrained
model: which run it continues; its prompts. `install.sh`: torch is pip's, uv receives pip's configuration, and pip
installs the rest."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from examples.smollm2 import make_sums

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
"""Records its requests, and makes run folders; those that the file `stop` names don't come to their end."""


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


@pytest.mark.parametrize(("argument", "code"), [("3", 2), ("--help", 0), ("--fresh", 2)])
def test_arguments_come_first(clone: Path, argument: str, code: int) -> None:
    found, said, _ = start(clone, argument)
    assert found == code and said
    assert not (clone / "set_up").exists() and not (clone / "calls").read_text()


def numbers(row: dict[str, str]) -> tuple[int, ...]:
    """The two numbers of a prompt, in its order."""
    return tuple(int(n) for n in re.findall(r"\d+", row["prompt"]))


@pytest.mark.parametrize(("chapter", "both_orders"), [("one-digit", False), ("two-digit", True)])
def test_answers_are_right_and_no_held_out_sum_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chapter: str, both_orders: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    make_sums.write(Path("data/sums"))
    config, sums = configs.load([f"smollm2/{chapter}"]), []
    for key in ("path", "heldout_path"):
        rows = [json.loads(line) for line in Path(configs.select(config, f"task.{key}")).read_text().splitlines()]
        assert all(int(row["answer"]) == sum(numbers(row)) for row in rows)
        sums.append({tuple(sorted(numbers(row))) if both_orders else numbers(row) for row in rows})
    assert sums[1] and not sums[0] & sums[1]
    if not both_orders:
        assert len(sums[1]) == 20 and {(b, a) for a, b in sums[1]} <= sums[0], "the swap of each is trained"


PIP = r"""#!/bin/sh
case "$*" in
    *"config list") printf "%s\n" ":env:.find-links='/w /x'" "global.find-links='/y'" "global.index-url='http://i'" ;;
    *) echo "pip: $*" ;;
esac
"""
UV = """#!/bin/sh
echo "uv: $* links=$UV_FIND_LINKS index=$UV_DEFAULT_INDEX"
exit %d
"""


@pytest.mark.parametrize("code", [0, 2])
def test_pip_installs_what_uv_can_not(tmp_path: Path, code: int) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("python", PIP), ("uv", UV % code)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    unset = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    command = ["bash", str(ROOT / "scripts" / "install.sh"), str(tmp_path), "-c", "bounds.txt", "some package"]
    done = subprocess.run(command, env=unset, capture_output=True, text=True, timeout=60, check=True)
    torch, *said = done.stdout.splitlines()
    assert torch.startswith("pip: ") and "install --quiet torch==" in torch
    assert said[0].startswith("uv: pip install ") and "bounds.txt some package links=/w,/x index=http://i" in said[0]
    assert [line.startswith("pip: ") and line.endswith(" -c bounds.txt some package") for line in said[1:]] == [
        True
    ] * bool(code)
