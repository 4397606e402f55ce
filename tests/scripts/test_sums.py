"""The prompts of configs/smollm2: answers are right, and no held-out prompt is trained."""

import json
import re

import pytest

from areal_like.config import run_config as configs
from scripts import sums


def numbers(row: dict[str, str]) -> tuple[int, ...]:
    """The two numbers of a prompt, in its order."""
    return tuple(int(n) for n in re.findall(r"\d+", row["prompt"]))


def sorted_numbers(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(sorted(numbers(row)))


@pytest.mark.parametrize(("made", "known"), [(sums.one_digit, numbers), (sums.two_digit, sorted_numbers)])
def test_answers_are_right_and_no_held_out_sum_is_trained_on(made, known):
    split = made()
    for row in (*split["train"], *split["heldout"]):
        assert int(row["answer"]) == sum(numbers(row)) and row["prompt"].endswith("Answer with the number only.")
    assert not {known(row) for row in split["train"]} & {known(row) for row in split["heldout"]}
    assert made() == split


def test_the_swap_of_each_held_out_one_digit_sum_is_trained_on():
    split = sums.one_digit()
    trained, heldout = ({numbers(row) for row in split[name]} for name in ("train", "heldout"))
    assert len(heldout) == 20 and {(b, a) for a, b in heldout} <= trained


def test_the_first_chapter_has_every_sum_in_every_wording():
    rows = [row["prompt"] for part in sums.one_digit().values() for row in part]
    assert len(rows) == len(set(rows)) == 9 * 9 * len(sums.WORDINGS)


def test_the_second_chapter_holds_out_two_digit_sums_alone():
    split = sums.two_digit()
    assert all(min(numbers(row)) >= 10 for row in split["heldout"])
    easy = sum(min(numbers(row)) < 10 for row in split["train"])
    assert easy == len(split["train"]) / 2


@pytest.mark.parametrize("chapter", ["one-digit", "two-digit"])
def test_the_recipes_read_the_files_that_are_written(tmp_path, monkeypatch, chapter):
    monkeypatch.chdir(tmp_path)
    assert sums.main([]) == 0
    config = configs.load([f"smollm2/{chapter}"])
    for key, count in (("path", "train"), ("heldout_path", "heldout")):
        rows = [
            json.loads(line) for line in (tmp_path / configs.select(config, f"task.{key}")).read_text().splitlines()
        ]
        assert rows == getattr(sums, chapter.replace("-", "_"))()[count]
