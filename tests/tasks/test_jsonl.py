"""Jsonl with a tokenizer made here, math-verify's verdict on known answers, and bad files."""

import asyncio
import csv
import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from tqdm import tqdm

from actors.rewards import reward_function
from areal_like.config.registry import ConfigError, check
from areal_like.tasks.jsonl import Jsonl
from areal_like.tasks.maths import exact, last_number, math_verify
from areal_like.tasks.text import TEMPLATE
from tests.actors.test_reward_pool import in_pool
from tests.folders import write_repository
from tests.scripts import graders


@pytest.fixture
def make(tmp_path):
    def make(rows, heldout=None, seed=0, **knobs):
        for name, content in (("train.jsonl", rows), ("heldout.jsonl", heldout or [])):
            lines = [row if isinstance(row, str) else json.dumps(row) for row in content]
            (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        if heldout is not None:
            knobs["heldout_path"] = str(tmp_path / "heldout.jsonl")
        return Jsonl(seed, path=str(tmp_path / "train.jsonl"), tokenizer="bytes", **knobs)

    return make


def sums(count: int) -> list[dict]:
    return [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(count)]


def encode(task, text: str) -> np.ndarray:
    return np.array(task._tokenizer.encode(text), np.int32)


def all_texts(task, split: str) -> list[str]:
    return [task._tokenizer.decode(task.prompt(split, row).tokens) for row in range(task.size(split))]


def test_every_row_is_in_one_split_in_a_seeded_order(make):
    knobs = {"chat_template": False, "heldout_fraction": 0.2}
    train, heldout = (all_texts(make(sums(40), **knobs), split) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (30, 10)
    assert {*train, *heldout} == {f"What is {i} + 1?" for i in range(40)}
    assert all_texts(make(sums(40), **knobs), "train") == train
    assert all_texts(make(sums(40), **knobs, seed=1), "train") != train


def test_rows_that_are_added_leave_all_others_in_their_split(make):
    knobs = {"chat_template": False, "heldout_fraction": 0.2}
    trained = {*all_texts(make(sums(40), **knobs), "train")}
    assert trained < {*all_texts(make(sums(80), **knobs), "train")}


def test_digests_tell_rows_apart(make):
    rows = sums(9)
    changed = [{**rows[0], "answer": 7}, *rows[1:]], rows[::-1], sums(10), [{**rows[0], "prompt": "?"}, *rows[1:]]
    assert make(rows).digests() == make(rows).digests()
    for other in changed:
        assert make(other).digests() != make(rows).digests()
    assert set(make(rows, heldout=sums(1)).digests()) == {"train", "heldout_path"}


def test_prompts_of_the_held_out_file_are_left_out_of_training(make):
    task = make(sums(10), heldout=sums(3), chat_template=False)
    assert (task.size("train"), task.size("heldout")) == (7, 3)
    assert not set(all_texts(task, "train")) & set(all_texts(task, "heldout"))


def test_the_prompt_is_wrapped_as_the_template_says(make):
    row = {"question": "How many?", "answer": "2"}
    knobs = {"heldout": [row], "columns": {"prompt": "question"}, "suffix": " Box it."}
    assert all_texts(make([{**row, "question": "?"}], **knobs), "heldout") == ["[user]How many? Box it.[assistant]"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hm?"}]
    task = make([{"question": messages, "answer": 1}], **knobs)
    assert all_texts(task, "train") == ["[system]Be brief.[user]Hm? Box it.[assistant]"]
    assert task.prompt("train", 0).tokens.dtype == np.int32 and task.prompt("train", 0).answer == "1"


def test_a_response_is_scored_as_text_without_special_tokens(make):
    task = make(sums(2), heldout=[{"prompt": "2 + 2?", "answer": "4"}])
    prompt = task.prompt("heldout", 0)
    response = encode(task, r"It is \boxed{4}.<eos>")
    assert response[-1] == 256 and task.verification(prompt, response)[1] == ("4", r"It is \boxed{4}.")
    assert asyncio.run(task.reward(prompt, response)) == 1.0
    assert asyncio.run(task.reward(prompt, encode(task, "It is 5."))) == 0.0


NEAR = f"{graders.__name__}:near"


def test_a_reward_has_knobs_which_reach_it_and_are_checked_before(make):
    task = make(sums(3), reward={"name": NEAR, "within": 2})
    prompt = task.prompt("train", 0)
    almost = encode(task, str(float(prompt.answer) + 1.5))
    assert asyncio.run(make(sums(3), reward=NEAR).reward(prompt, almost)) == 0.0
    assert in_pool(lambda pool: reward_function(task, pool)(prompt, almost)) == 1.0
    for reward, key in (
        ({"name": NEAR, "within": "far"}, "task.reward.within: "),
        ("exactly", "task.reward.name: .*'exact'"),
        ({"name": "exact", "wthin": 1}, "task.reward.wthin: "),
        (3, "task.reward: "),
    ):
        with pytest.raises(ConfigError, match=key):
            check("task", {"name": "jsonl", "path": "x", "tokenizer": "y", "reward": reward})


@pytest.mark.parametrize(
    ("verifier", "answer", "response", "expected"),
    [
        (math_verify, "42", "so the answer is 42.", 1.0),
        (math_verify, "42", "so the answer is 43.", 0.0),
        (math_verify, "Six times 9 is 42.\n#### 42", r"\boxed{42}", 1.0),
        (math_verify, "#### 1,042", "6 + 9 = 15\n#### 1042", 1.0),
        (math_verify, r"$\frac{1}{2}$", r"It is $\frac{2}{4}$", 1.0),
        (math_verify, r"Hence \boxed{x^2+1}", "We get $1+x^2$", 1.0),
        (last_number, "15", "9 + 6 = 15.", 1.0),
        (last_number, "15", "15 = 9 + 6", 0.0),
        (last_number, "1200", "1,200", 1.0),
        (last_number, "-3", "3 - 6 = -3", 1.0),
        (last_number, "3", "It is 9-3", 1.0),
        (exact, "a b", " a b\n", 1.0),
        *((verifier, "0.00001", "It is 1e-05.", 1.0) for verifier in (math_verify, last_number)),
        *((verifier, "1e16", r"\boxed{10000000000000000}", 1.0) for verifier in (math_verify, last_number)),
        *((math_verify, each, rf"\boxed{{{each}}}", 1.0) for each in (r"\{1,2\}", r"\pi", "(1,2]", r"\text{yes}")),
        (math_verify, "57", r"<think>maybe \boxed{57}</think> The answer is 58", 0.0),
        *((verifier, "57", "<think>8</think> 57", 1.0) for verifier in (math_verify, last_number, exact)),
        *((verifier, "57", "<think>57", 0.0) for verifier in (math_verify, last_number, exact)),
    ],
)
def test_verifiers_on_known_answers(verifier, answer, response, expected):
    assert verifier(answer, response) == expected


NO_EXPRESSIONS = [r"\boxed{", r"\boxed{}", r"\text{ }", r"\frac{1}{", "５", "x^２"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", ', "not JSON: [^:]*, at column 17$"),
        pytest.param("[" * 100_000, "not JSON", id="too deep"),
        ('{"prompt": "a", "solution": "b"}', "'answer'; the keys are prompt, solution"),
        ('{"prompt": 3, "answer": "b"}', "'prompt'"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "'prompt'"),
        ('{"prompt": "a", "answer": null}', "'answer': got None"),
        ('{"prompt": "a", "answer": NaN}', "'answer': got nan"),
        *(('{"prompt": "a", "answer": "?"}', f"'answer': there is no {each}") for each in ("expression", "number")),
        *((json.dumps({"prompt": "a", "answer": each}), "no expression") for each in NO_EXPRESSIONS),
        ('{"prompt": [{"role": "<eos>", "content": ""}], "answer": "b"}', "role"),
        ('{"prompt": "a", "answer": "{}"}', "'answer': want"),
    ],
)
def test_a_bad_line_is_named(make, line, words):
    reward = {"number": "last_number", "want": "unit_tests"}.get(words.split()[-1], "math_verify")
    good = {"prompt": "b", "answer": {"function": "f", "cases": [[[1], 1]]}}
    with pytest.raises(ValueError, match=rf"train\.jsonl:4: .*{words}"):
        make([*[good] * 2, "", line], reward=reward)


@pytest.mark.parametrize(
    ("answer", "text"), [(1e-05, "0.00001"), (1e16, "1" + "0" * 16), (72.0, "72"), (7, "7"), (-0.5, "-0.5")]
)
def test_a_number_is_written_as_models_write_it(make, answer, text):
    assert make([{"prompt": each, "answer": answer} for each in "ab"], reward="exact").prompt("train", 0).answer == text


def brief(answer: str, response: str) -> float:
    return -float(len(response))


def test_a_reward_that_does_not_read_the_answer_needs_none(make):
    rows = [{"prompt": each} for each in "ab"]
    assert make(rows, reward=f"{__name__}:brief").prompt("train", 0).answer == ""
    for reward in (NEAR, "exact"):
        with pytest.raises(ValueError, match="no 'answer'"):
            make(rows, reward=reward)


def write_csv(path: Path, rows: list[dict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_splits(path: Path, rows: list[dict]) -> None:
    DatasetDict({"mine": Dataset.from_list(rows)}).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "write", "knobs", "place"),
    [
        ("rows.csv", write_csv, {}, "rows.csv:{}"),
        ("rows.parquet", lambda path, rows: Dataset.from_list(rows).to_parquet(path), {}, "rows.parquet:{}"),
        ("saved", lambda path, rows: Dataset.from_list(rows).save_to_disk(path), {}, "saved train:{}"),
        ("both", write_splits, {"split": "mine"}, "both mine:{}"),
        ("clone", lambda path, rows: write_repository(path, "main", train=rows), {"subset": "main"}, "clone train:{}"),
    ],
)
def test_data_of_other_forms_has_the_same_rows(make, tmp_path, monkeypatch, name, write, knobs, place):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "arrow")
    rows = [{"question": f'What is "{i}", + 1?\n', "solution": str(i + 1)} for i in range(9)]
    write(tmp_path / name, rows)
    monkeypatch.delattr(tqdm, "_lock", raising=False)
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", None)
    knobs |= {"columns": {"prompt": "question", "answer": "solution"}, "tokenizer": "bytes", "seed": 0}
    task = Jsonl(path=str(tmp_path / name), **knobs)
    plain = make(rows, columns=knobs["columns"])
    for split in ("train", "heldout"):
        assert all_texts(task, split) == all_texts(plain, split)
    assert task.digests() == plain.digests()
    first = 1 + [row["question"] for row in rows].index(task.prompt("train", 0).messages[-1]["content"])
    assert task.place("train", 0).endswith(place.format(first if name != "rows.csv" else 1 + 2 * first))


@pytest.mark.parametrize(
    ("name", "content", "knobs", "words"),
    [
        ("rows.csv", "prompt,answer\n1+1?,2\n1,1?,2\n", {}, "rows.csv:3: .*cells"),
        ("rows.csv", 'prompt,answer\n"1+1?,2\n', {}, "rows.csv:1: not CSV"),
        ("rows.parquet", "PAR1", {}, "^task.path: .*rows.parquet"),
        ("rows.csv", "prompt,answer\n", {"split": "train"}, "^task.path: .*leave out the split"),
        ("folder/rows.jsonl", '{"prompt": "?", "answer": 1}', {"split": "test"}, r"^task.path: .*task\.split"),
        ("rows.jsonl", '{"prompt": "?", "answer": 1}', {"columns": {"promt": "prompt"}}, "^task.columns: got 'promt'"),
        ("rows.jsonl", '{"prompt": "?", "answer": 1, "tools": "add"}', {}, "rows.jsonl:1: 'tools'"),
    ],
)
def test_data_that_cannot_be_read(tmp_path, monkeypatch, name, content, knobs, words):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "arrow")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content, encoding="utf-8")
    path = tmp_path / name.partition("/")[0]
    with pytest.raises(ValueError, match=words):
        Jsonl(0, path=str(path), tokenizer="bytes", **knobs)


@pytest.mark.parametrize("knobs", [{"split": "test"}, {"subset": "main"}, {"heldout_split": "test"}])
def test_a_saved_data_set_has_no_other_splits(tmp_path, knobs):
    Dataset.from_list(sums(9)).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"^task\.(path|heldout_split): .*expected a split of train alone"):
        Jsonl(0, path=str(tmp_path / "saved"), tokenizer="bytes", **knobs)


def graded(answer: str, response: str, *, level: int, scale: float = 1.0, **others: object) -> float:
    return level * scale + len(others)


def by_level(answer: str, response: str, *, level: int = 0) -> float:
    return float(level)


def test_other_columns_are_arguments_of_the_reward(make):
    rows = [{**row, "level": 3, "scale": 5, "source": [1]} for row in sums(3)]
    own = {"name": f"{__name__}:graded", "scale": 2.0}
    check("task", {"name": "jsonl", "path": "x", "tokenizer": "y", "reward": own})
    for reward, knobs, score in (
        (own, {"level": 3, "scale": 2.0, "source": [1]}, 7.0),
        (f"{__name__}:by_level", {"level": 3}, 3.0),
        ("exact", {}, 0.0),
    ):
        task = make(rows, reward=reward)
        prompt = task.prompt("train", 0)
        assert task.verification(prompt, encode(task, "?"))[2] == knobs
        assert asyncio.run(task.reward(prompt, encode(task, "?"))) == score
    other = [{**row, "level": 4} for row in rows]
    assert make(rows, reward=own).digests() != make(other, reward=own).digests()
    assert make(rows, reward="exact").digests() == make(other, reward="exact").digests()
    with pytest.raises(ValueError, match="no 'level'; the keys are prompt, answer"):
        make(sums(3), reward=own)


def test_the_template_shows_a_rows_tools(make, monkeypatch):
    monkeypatch.setattr("areal_like.tasks.text.TEMPLATE", "{{ tools | tojson }}" + TEMPLATE)
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [{**row, "tools": tools if n else json.dumps(tools)} for n, row in enumerate(sums(2))]
    for text in [*all_texts(make(rows), "train"), *all_texts(make(rows), "heldout")]:
        assert text.startswith(json.dumps(tools))
    assert make(rows).rows_beyond("train", 1000) == [0] and make(rows).digests() != make(sums(2)).digests()


def test_the_graded_text_begins_as_the_row_does(make):
    """Whether the template has opened the thoughts is seen before that."""
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}, ANSWER], "answer": "4"} for i in range(2)]
    task = make(rows, reward="exact", suffix=" Box it.")
    prompt = task.prompt("train", 0)
    assert all_texts(task, "train")[0] == f"[user]{prompt.messages[0]['content']}[assistant]It is "
    assert prompt.messages[0]["content"].endswith("? Box it.")
    assert task.verification(prompt, encode(task, "4."))[1] == ("4", "It is 4.")


ANSWER = {"role": "assistant", "content": "It is "}


OPENED, MENTIONED = {"suffix": " <think>"}, {"mentions": True}


@pytest.mark.parametrize(
    ("knobs", "said", "graded"),
    [
        *((OPENED, *each) for each in [("7", ""), ("9</think>7", "7"), ("a</think>b</think>7", "7")]),
        *((MENTIONED, *each) for each in [("7", "7"), ("<think>9</think>7", "7"), ("<think>7", "")]),
        ({}, "<think>9</think>7", "<think>9</think>7"),
        (MENTIONED | {"answer_after": ""}, "<think>9</think>7", "<think>9</think>7"),
        ({"answer_after": "####"}, "8 #### 9 #### 7", " 7"),
        ({"answer_after": "####"}, "7", ""),
        (MENTIONED | {"answer_after": "####"}, "</think>7", ""),
    ],
)
def test_a_reward_gets_the_text_behind_thoughts_or_a_mark(make, knobs: dict, said: str, graded: str):
    mentions = knobs.get("mentions", False)
    others = {key: value for key, value in knobs.items() if key != "mentions"}
    task = make(sums(2), reward=f"{__name__}:brief", chat_template=mentions, **others)
    if mentions:
        task._tokenizer.chat_template += "{% if false %}</think>{% endif %}"
    assert task.verification(task.prompt("train", 0), encode(task, said))[1][1] == graded


def test_weights_are_of_parts_and_finite(make):
    with pytest.raises(ValueError, match="reward=math_verify has no parts"):
        make(sums(2), reward_weights={"form": 1.0})
    for weight in ("a", float("inf"), True):
        with pytest.raises(ConfigError, match=r"reward_weights: .*got"):
            check("task", {"name": "jsonl", "path": "x", "tokenizer": "y", "reward_weights": {"form": weight}})
