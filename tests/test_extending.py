"""`docs/extending.md`: its snippets form one module in a user's folder, and its commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.config import signatures
from scripts import check
from scripts import config as explained
from tests.forked import Command

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [
    shlex.split(line) for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()
]
CHECKS = [words[2:] for words in COMMANDS if words[1] == "check"]
TRAINS = [words[2:] for words in COMMANDS if words[1] == "train"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder outside of the clone, with the page's module."""
    (tmp_path / "mine.py").write_text("\n".join(SNIPPETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    signatures.signature.cache_clear()
    signatures._source.cache_clear()
    yield tmp_path
    sys.modules.pop("mine", None)


def test_each_command_of_the_page_is_known() -> None:
    assert len(CHECKS) == 4 and len(TRAINS) >= 9 and len(SNIPPETS) >= 11
    assert {words[1] for words in COMMANDS} == {"check", "train", "config"}


@pytest.mark.parametrize("arguments", CHECKS, ids=lambda words: words[0])
def test_each_snippet_keeps_its_contract(arguments: list[str], mine: Path, capsys: pytest.CaptureFixture) -> None:
    assert check.main(arguments) == 0, capsys.readouterr().out


def test_each_config_of_the_page_loads(mine: Path, capsys: pytest.CaptureFixture) -> None:
    for arguments in TRAINS:
        assert "mine:" in configs.to_yaml(configs.load(arguments))
    reward = "task.reward={name: mine:near, within: 0.5}"
    configs.load(["quickstart", "task=jsonl", "task.path=x", "task.tokenizer=y", reward])
    assert explained.main(["task.jsonl", "loss.mine:careful"]) == 0
    assert "whose importance weights are cut" in " ".join(capsys.readouterr().out.split())


@pytest.mark.integration
def test_every_process_of_a_run_finds_the_users_module(mine: Path) -> None:
    """Buffer (scheduler, sizing, filter), actors (task, workflow, engine), learner (loss, advantage)."""
    options = ["run.name=a", "eval.prompts=4", "actors.count=1", "run.target_reward=null"]
    options += ["model.initializer_range=0.1", "--plain"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    code = "import sys; from scripts.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "train", *TRAINS[-1], *options, "--print-config"]
    done = subprocess.run(command, cwd=mine, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "mine:" in done.stdout, done.stdout + done.stderr
    train = Command(["scripts.cli", "train", *TRAINS[-1], *options], mine / "output")
    assert train.wait(240) == 0, train.text()
    assert json.loads((mine / "runs" / "a" / "summary.json").read_text())["steps"] == 2
    rows = [json.loads(line) for line in (mine / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["sizing/group_size"] for row in rows] == [4, 4] and "loss/weight" in rows[0]
