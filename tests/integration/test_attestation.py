"""A run with an actor that lies about its weights, past a buffer that believes it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.lying import LIE
from tests.integration.runs import REPOSITORY

pytestmark = pytest.mark.integration


def test_the_learner_refuses_what_a_lying_actor_has_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.train", "configs/quickstart.yaml", f"run.dir={tmp_path}", "run.name=lies"]
    command += ["engine=timed", "learner=timed", "engine.median=8", "groups_per_batch=4", "learner.base=0.02"]
    command += ["run.target_reward=null", "eval.prompts=4", "eval.every=0", "run.steps=60"]
    command += ["filter=tests.integration.lying:blind", "workflow=tests.integration.lying:lying"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    # A batch has one word for each version: where actors disagree, the first group of the version is named.
    said = re.search(
        r"batch (\d+), group \d+ of actor-\d: its tokens of version 2 .* digest (\w+),", done.stdout + done.stderr
    )
    assert said and said[2] == LIE, done.stdout + done.stderr
    assert int(said[1]) >= 2
    metrics = (tmp_path / "lies" / "metrics.jsonl").read_text()
    assert f'"step": {said[1]},' in metrics and f'"step": {int(said[1]) + 1},' not in metrics
