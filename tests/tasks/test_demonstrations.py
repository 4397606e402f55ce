"""Conversations to imitate: which tokens they have, which of them are trained, and bad files."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from areal_like.tasks.byte_tokens import byte_tokenizer
from areal_like.tasks.copying import Reverse
from areal_like.tasks.demonstrations import Demonstrations
from areal_like.tasks.jsonl import Jsonl

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
    split = next(s for s in ("train", "heldout") if task.place(s, 0).endswith(":1"))
    found = task.demonstration(split, 0)

    def text(tokens: np.ndarray) -> str:
        return BYTES.decode(tokens.tolist()).replace("<eos>", "$")

    masked = np.where(found.trained, found.tokens, BYTES.encode(".")[0])
    return text(found.prompt.tokens), text(found.tokens), text(masked)


def test_only_the_assistant_and_the_ends_of_its_turns_are_trained(tmp_path: Path) -> None:
    turns = [say("user", "a?"), say("assistant", "b"), say("user", "c?"), say("assistant", "de")]
    prompt, response, trained = shown(tmp_path, {"messages": [say("system", "s"), *turns]})
    assert prompt == "[system]s[user]a?[assistant]"
    assert response == "b$[user]c?[assistant]de$"
    assert trained == "b$" + "." * len("[user]c?[assistant]") + "de$"


@pytest.mark.parametrize("completion", ["b", [say("assistant", "b")]])
def test_prompt_and_completion(tmp_path: Path, completion: object) -> None:
    row = {"prompt": "a", "completion": completion}
    assert shown(tmp_path, row, suffix="!", system="s") == ("[system]s[user]a![assistant]", "b$", "b$")


def test_prompts_are_those_of_reinforcement_learning_on_the_same_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(9)]
    task = task_of(tmp_path, rows, completion_key="answer", suffix=" Say it.")
    same = Jsonl(0, path=str(tmp_path / "d.jsonl"), tokenizer="bytes", heldout_fraction=0.5, suffix=" Say it.")
    for split in ("train", "heldout"):
        for row in range(task.size(split)):
            np.testing.assert_array_equal(task.demonstration(split, row).prompt.tokens, same.prompt(split, row).tokens)


def test_as_a_task_it_asks_for_the_last_turn(tmp_path: Path) -> None:
    row = {"messages": [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "right")]}
    task = task_of(tmp_path, [row, {**row, "messages": [say("user", "z"), *row["messages"][1:]]}])
    prompt = task.prompt("train", 0)
    assert [message["content"] for message in prompt.messages][1:] == ["b", "c"]
    for answer, reward in (("right", 1.0), (" right ", 1.0), ("wrong", 0.0)):
        assert asyncio.run(task.reward(prompt, np.array(BYTES.encode(answer), np.int32))) == reward


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [say("assistant", "b")]}, "first message must not be the assistant's"),
        ({"messages": [say("user", "b")]}, "first message must not be the assistant's, and the last one must"),
        ({"messages": "b"}, "must be a list of messages"),
        ({"messages": [say("user", "a"), say("assistant", "b", weight=0)]}, "has the weight 0"),
        ({"messages": [say("user", "a"), say("assistant", "b"), say("assistant", "c")]}, "follow one another"),
        ({"prompt": "a", "answer": "b"}, "no \"messages\" and no 'completion'; the keys are prompt, answer"),
        ({"prompt": "a", "completion": 4}, "'completion' must be a text"),
        ({"prompt": "a", "completion": [say("user", "b")]}, "must begin and end with the assistant's"),
        ({"prompt": 4, "completion": "b"}, "'prompt' must be a text or a list"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "row",
)
def test_bad_rows_are_named(tmp_path: Path, row: dict, told: str) -> None:
    with pytest.raises(ValueError, match=rf"d\.jsonl:2: .*{told}"):
        task_of(tmp_path, [{"prompt": "a", "completion": "b"}, row])


def test_generated_tasks_demonstrate_their_answers() -> None:
    fixed, ended = Reverse(0, digits=3), Reverse(0, digits=3, min_digits=1)
    shown, other = fixed.demonstration("train", 5), ended.demonstration("heldout", 2)
    np.testing.assert_array_equal(shown.tokens, shown.prompt.tokens[2::-1])
    assert other.tokens[-1] == ended.stop_tokens[0] and other.trained.all()
    for task, each in ((fixed, shown), (ended, other)):
        assert asyncio.run(task.reward(each.prompt, each.tokens)) == 1.0
