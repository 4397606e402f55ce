"""Jsonl with a tokenizer made here, math-verify's verdict on known answers, and bad files."""

import asyncio
import json

import numpy as np
import pytest

from actors.reward_pool import RewardPool
from actors.rewards import reward_function
from areal_like.config.registry import ConfigError, check
from areal_like.tasks.byte_tokens import byte_tokenizer
from areal_like.tasks.jsonl import Jsonl
from areal_like.tasks.maths import math_verify
from areal_like.tasks.numbers import last_number


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """A tokenizer of single bytes: ids 0–255, <eos> 256, <pad> 257."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make(tmp_path, tokenizer):
    def make(rows, heldout=None, **knobs):
        for name, content in (("train.jsonl", rows), ("heldout.jsonl", heldout)):
            if content is not None:
                lines = [row if isinstance(row, str) else json.dumps(row) for row in content]
                (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        if heldout is not None:
            knobs["heldout_path"] = str(tmp_path / "heldout.jsonl")
        return Jsonl(knobs.pop("seed", 0), path=str(tmp_path / "train.jsonl"), tokenizer=tokenizer, **knobs)

    return make


def sums(count: int) -> list[dict]:
    return [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(count)]


def encode(task, text: str) -> np.ndarray:
    return np.array(task._tokenizer.encode(text), np.int32)


def decode(task, tokens) -> str:
    return task._tokenizer.decode(tokens)


def all_texts(task, split: str) -> list[str]:
    return [decode(task, task.prompt(split, row).tokens) for row in range(task.size(split))]


def test_every_row_is_in_one_split_in_a_seeded_order(make):
    texts = {f"What is {i} + 1?" for i in range(40)}
    task = make(sums(40), chat_template=False, heldout_fraction=0.2)
    train, heldout = all_texts(task, "train"), all_texts(task, "heldout")
    assert (len(train), len(heldout)) == (32, 8)
    assert set(train) | set(heldout) == texts
    assert all_texts(make(sums(40), chat_template=False, heldout_fraction=0.2), "train") == train
    assert all_texts(make(sums(40), chat_template=False, heldout_fraction=0.2, seed=1), "train") != train


def test_prompts_of_the_held_out_file_are_left_out_of_training(make, caplog):
    task = make(sums(10), heldout=sums(3), chat_template=False)
    assert (task.size("train"), task.size("heldout")) == (7, 3)
    assert not set(all_texts(task, "train")) & set(all_texts(task, "heldout"))
    assert "3 training rows are left out" in caplog.text


def test_the_prompt_is_wrapped_as_the_template_says(make):
    row = {"question": "How many?", "answer": "2"}
    knobs = {"heldout": [row], "prompt_key": "question", "suffix": " Box it."}
    other = {**row, "question": "Why?"}
    assert all_texts(make([other], **knobs), "heldout") == ["[user]How many? Box it.[assistant]"]
    assert all_texts(make([other], **knobs, chat_template=False), "heldout") == ["How many? Box it."]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hm?"}]
    task = make([{"question": messages, "answer": 1}], **knobs)
    assert all_texts(task, "train") == ["[system]Be brief.[user]Hm? Box it.[assistant]"]
    prompt = task.prompt("train", 0)
    assert prompt.tokens.dtype == np.int32 and prompt.answer == "1" and prompt.max_tokens == 1024


def test_a_response_is_scored_as_text_without_special_tokens(make):
    task = make(sums(2), heldout=[{"prompt": "2 + 2?", "answer": "4"}])
    prompt = task.prompt("heldout", 0)
    response = encode(task, r"It is \boxed{4}.<eos>")
    assert response[-1] == 256
    assert task.verification(prompt, response) == ("areal_like.tasks.maths:math_verify", ("4", r"It is \boxed{4}."), {})
    assert asyncio.run(task.reward(prompt, response)) == 1.0
    assert asyncio.run(task.reward(prompt, encode(task, "It is 5."))) == 0.0


def near(answer: str, response: str, *, within: float = 0.0) -> float:
    return float(abs(float(answer) - float(response)) <= within)


@pytest.mark.slow
def test_a_reward_has_knobs_which_reach_it_and_are_checked_before(make):
    task = make(sums(3), reward={"name": f"{__name__}:near", "within": 2})
    prompt = task.prompt("train", 0)
    almost = encode(task, str(float(prompt.answer) + 1.5))
    assert asyncio.run(task.reward(prompt, almost)) == 1.0
    assert asyncio.run(make(sums(3), reward=f"{__name__}:near").reward(prompt, almost)) == 0.0

    async def in_the_pool() -> float:
        pool = RewardPool(workers=1)
        try:
            return await reward_function(task, pool)(prompt, almost)
        finally:
            await pool.close()

    assert asyncio.run(in_the_pool()) == 1.0
    spec = {"name": "jsonl", "path": "x", "tokenizer": "y"}
    check("task", spec | {"reward": "exact"})
    check("task", spec | {"reward": {"name": f"{__name__}:near", "within": 1.0}})
    for reward, told in (
        ({"name": f"{__name__}:near", "within": "far"}, "task.reward.within: expected float"),
        ("exactly", "task.reward.name: there is no reward 'exactly'. Did you mean 'exact'?"),
        ({"name": "exact", "wthin": 1}, "task.reward.wthin: 'exact' has no knob"),
        (3, "task.reward: expected str"),
    ):
        with pytest.raises(ConfigError, match=told):
            check("task", spec | {"reward": reward})


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("42", "so the answer is 42.", 1.0),
        ("42", "so the answer is 43.", 0.0),
        ("42", "I do not know", 0.0),
        ("42", "", 0.0),
        ("Six times 9 is 42.\n#### 42", r"\boxed{42}", 1.0),
        ("He has 9.\n#### 1,234", "#### 1234", 1.0),
        ("He has 9.\n#### 1,234", "#### 9", 0.0),
        (r"\frac{1}{2}", "It is $0.5$", 1.0),
        (r"$\frac{1}{2}$", r"It is $\frac{2}{4}$", 1.0),
        (r"Hence \boxed{x^2+1}", "We get $1+x^2$", 1.0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
        ("-3", r"\boxed{3}", 0.0),
    ],
)
def test_math_verify_on_known_answers(answer, response, expected):
    assert math_verify(answer, response) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", ', "not JSON: [^:]*, at column 17$"),
        pytest.param("[" * 100_000, "not JSON", id="too deep"),
        ('["a", "b"]', "want a JSON object, got list"),
        ('{"prompt": "a", "solution": "b"}', "no 'answer'; the keys are prompt, solution"),
        ('{"prompt": 3, "answer": "b"}', "'prompt' must be a text"),
        ('{"prompt": [], "answer": "b"}', "'prompt' must be a text or a list of messages"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "list of messages"),
        ('{"prompt": "a", "answer": null}', "'answer' must be a text, a number or an object"),
    ],
)
def test_a_bad_line_is_named(make, line, message):
    with pytest.raises(ValueError, match=rf"train\.jsonl:4: .*{message}"):
        make([*sums(2), "", line])


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("15", "15", 1.0),
        ("15", "9 + 6 = 15.", 1.0),
        ("15", "15 = 9 + 6", 0.0),
        ("15", "9 + 6 = 1", 0.0),
        ("15", "fifteen", 0.0),
        ("15", "", 0.0),
        ("15", "It is 15.0", 1.0),
        ("1200", "1,200", 1.0),
        ("-3", "3 - 6 = -3", 1.0),
        ("3", "It is 9-3", 1.0),
        ("3", "-3", 0.0),
    ],
)
def test_the_last_number_counts(answer, response, reward):
    assert last_number(answer, response) == reward
