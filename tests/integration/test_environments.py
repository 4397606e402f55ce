"""A whole run with an environment's server."""

import json
from pathlib import Path

import pytest

from areal_like.tasks.byte_tokens import byte_tokenizer
from tests.actors.test_openenv import served
from tests.integration.runs import summary, train

pytestmark = pytest.mark.integration

TASK = "task={name: episodes, tokenizer: bytes, instructions: 'Guess: ', max_tokens: 64}"


def test_a_run_plays_on_a_server(tmp_path: Path) -> None:
    with served() as url:
        environment = {"name": "openenv", "server": url, "action": "number", "observation": "hint", "sessions": 2}
        workflow = {"name": "multi_turn", "max_turns": 3, "turn_tokens": 1, "environment": environment}
        run = train(
            tmp_path, "run", TASK, f"workflow={json.dumps(workflow)}", "model.max_position_embeddings=128",
            "run.steps=2", "groups_per_batch=2", "sizing.group_size=2", "eval.prompts=2", "eval.every=0",
            "run.target_reward=null", "actors.count=1",
        )  # fmt: skip
    found = summary(run)
    assert found["ledger"]["trained"] == 4 and not {"failed", "environment crashed"} & set(found["ledger"]["dropped"])
    lines = [*(run / "samples" / "trained.jsonl").open(), *(run / "samples" / "heldout.jsonl").open()]
    said = [byte_tokenizer().decode(json.loads(line)["tokens"]) for line in lines]
    assert len(said) >= 8 and all(text.startswith("[user]Guess: 1 to 7[assistant]") for text in said)
    assert any("[user]This is no valid action.[assistant]" in text for text in said)
