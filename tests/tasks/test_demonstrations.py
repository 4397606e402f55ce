"""Conversations to imitate: which tokens they have, which of them are trained, and bad files."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from areal_like.tasks.arithmetic import Arithmetic
from areal_like.tasks.copying import Reverse
from areal_like.tasks.demonstrations import Demonstrations
from areal_like.tasks.jsonl import Jsonl
from areal_like.tasks.text import byte_tokenizer

BYTES = byte_tokenizer()


def task_of(folder: Path, rows: list, **knobs) -> Demonstrations:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = {"tokenizer": "bytes", "heldout_fraction": 0.5} | knobs
    return Demonstrations(0, path=str(path), **knobs)


def say(role: str, content: str, **more: object) -> dict:
    return {"role": role, "content": content, **more}


def shown(folder: Path, row: dict, **knobs) -> tuple[str, str, str]:
    """Prompt, response, and the response with `.` for each token that is not trained; `$` ends a turn."""
    task = task_of(folder, [row, {"prompt": "other", "completion": "x"}], **knobs)
    found = next(each for each in (task.demonstration(s, 0) for s in ("train", "heldout")) if len(each.tokens) > 2)

    def text(tokens: np.ndarray) -> str:
        return BYTES.decode(tokens.tolist()).replace("<eos>", "$")

    masked = np.where(found.trained, found.tokens, BYTES.encode(".")[0])
    return text(found.prompt.tokens), text(found.tokens), text(masked)


@pytest.mark.parametrize("completion", ["bc", [say("assistant", "bc")]])
def test_prompt_and_completion(tmp_path: Path, completion: object) -> None:
    row = {"prompt": "a", "completion": completion}
    assert shown(tmp_path, row, suffix="!", system="s") == ("[system]s[user]a![assistant]", "bc$", "bc$")


def test_prompts_are_those_of_reinforcement_learning_on_the_same_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(9)]
    task = task_of(tmp_path, rows, columns={"completion": "answer"})
    same = Jsonl(0, path=str(tmp_path / "d.jsonl"), tokenizer="bytes", heldout_fraction=0.5)
    for row in range(task.size("train")):
        np.testing.assert_array_equal(task.demonstration("train", row).prompt.tokens, same.prompt("train", row).tokens)


def test_as_a_task_it_asks_for_the_last_turn(tmp_path: Path) -> None:
    rest = [say("assistant", "b"), say("user", "c"), say("assistant", "right")]
    task = task_of(tmp_path, [{"messages": [say("user", each), *rest]} for each in "az"])
    prompt = task.prompt("train", 0)
    assert [message["content"] for message in prompt.messages][1:] == ["b", "c"]
    for answer, reward in ((" right", 1.0), ("wrong", 0.0)):
        assert asyncio.run(task.reward(prompt, np.array(BYTES.encode(answer), np.int32))) == reward


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [say("assistant", "b")]}, "first message"),
        ({"messages": [say("user", "b")]}, "last one"),
        ({"messages": "b"}, "messages"),
        ({"messages": [say("user", "a"), say("assistant", "b", weight=0)]}, "weight"),
        ({"messages": [say("user", "a"), say("assistant", "b"), say("assistant", "c")]}, "follow one another"),
        ({"prompt": "a", "answer": "b"}, "'completion'; the keys are prompt, answer"),
        ({"prompt": "a", "completion": [say("user", "b")]}, "begin and end"),
        ({"prompt": 4, "completion": "b"}, "'prompt'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict, words: str) -> None:
    with pytest.raises(ValueError, match=rf"d\.jsonl:2: .*{words}"):
        task_of(tmp_path, [{"prompt": "a", "completion": "b"}, row])


@pytest.mark.parametrize("task", [Reverse(0, digits=3), Arithmetic(0)])
def test_generated_tasks_demonstrate_their_answers(task) -> None:
    found = task.demonstration("train", 5)
    assert asyncio.run(task.reward(found.prompt, found.tokens)) == 1.0 and found.trained.all()
    assert found.tokens.tolist() == [*found.prompt.answer, *task.stop_tokens]
