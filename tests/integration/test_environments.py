"""A whole run with an environment's server."""

import json
from pathlib import Path

import psutil
import pytest

from areal_like.tasks.byte_tokens import byte_tokenizer
from tests.actors.environments.test_openenv import STAND_IN
from tests.integration.runs import summary, train

pytestmark = pytest.mark.integration

TASK = "task={name: episodes, tokenizer: bytes, instructions: 'Guess: ', max_tokens: 64}"
ENVIRONMENT = {"name": "openenv", "server": STAND_IN, "action": "number", "observation": "hint", "sessions": 2}


def test_a_run_starts_a_server_and_ends_it(tmp_path: Path) -> None:
    workflow = {"name": "multi_turn", "max_turns": 3, "turn_tokens": 1, "environment": ENVIRONMENT}
    before = set(psutil.Process().children(recursive=True))
    run = train(
        tmp_path, "run", TASK, f"workflow={json.dumps(workflow)}", "model.max_position_embeddings=128", "run.steps=2",
        "groups_per_batch=2", "sizing.group_size=2", "eval.prompts=2", "eval.every=0", "run.target_reward=null",
        "actors.count=1",
    )  # fmt: skip
    found = summary(run)
    assert found["ledger"]["trained"] == 4 and not {"failed", "environment crashed"} & set(found["ledger"]["dropped"])
    lines = [*(run / "samples" / "trained.jsonl").open(), *(run / "samples" / "heldout.jsonl").open()]
    said = [byte_tokenizer().decode(json.loads(line)["tokens"]) for line in lines]
    assert len(said) >= 8 and all(text.startswith("[user]Guess: 1 to 7[assistant]") for text in said)
    assert any("[user]This is no valid action.[assistant]" in text for text in said)
    assert set(psutil.Process().children(recursive=True)) <= before
