"""Copy, Reverse, Arithmetic: prompts depend only on (seed, split, row), splits are disjoint, rewards are known."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.tasks.arithmetic import Arithmetic
from areal_like.tasks.copying import EOS, SEP, Copy, Reverse
from areal_like.tasks.generated import SPLITS
from areal_like.types import Prompt

BUILDERS = {
    "copy": lambda seed: Copy(seed, digits=5),
    "copy_variable": lambda seed: Copy(seed, digits=6, min_digits=2),
    "reverse": lambda seed: Reverse(seed, digits=5, length_trace={"median": 20}),
    "arithmetic": lambda seed: Arithmetic(seed, digits=2, operators="+-*"),
}


def score(task, prompt, tokens) -> float:
    return asyncio.run(task.reward(prompt, np.array(tokens, np.int32)))


def contents(task, split: str, rows: int) -> list[tuple[int, ...]]:
    return [tuple(task.prompt(split, row).tokens.tolist()) for row in range(rows)]


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**63))
def test_splits_share_no_prompt_and_rows_repeat_exactly(build, seed):
    task, again = build(seed), build(seed)
    train, heldout = (contents(task, split, 60) for split in SPLITS)
    assert not set(train) & set(heldout)
    assert train == contents(again, "train", 60)
    assert [task.prompt("heldout", row).filler for row in range(9)] == [
        again.prompt("heldout", row).filler for row in range(9)
    ]


def test_another_process_draws_the_same_prompts():
    code = (
        "from areal_like.tasks.copying import Reverse; t = Reverse(7, length_trace={'median': 50});"
        "print([(p.tokens.tolist(), p.answer.tolist(), p.filler) for p in (t.prompt(s, r) for s in ('train', 'heldout')"
        " for r in range(5))])"
    )
    task = Reverse(7, length_trace={"median": 50})
    prompts = [task.prompt(split, row) for split in SPLITS for row in range(5)]
    here = [(p.tokens.tolist(), p.answer.tolist(), p.filler) for p in prompts]
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 9), st.data())
def test_copy_prompt_holds_its_answer(row, digits, data):
    low = data.draw(st.none() | st.integers(1, digits))
    if digits == 1:
        digits = 2  # ten prompts may leave the held-out split empty
    copy, reverse = (kind(11, digits=digits, min_digits=low) for kind in (Copy, Reverse))
    prompt, backwards = copy.prompt("train", row), reverse.prompt("train", row)
    assert prompt.tokens.dtype == np.int32 and prompt.tokens[-1] == SEP
    assert prompt.tokens[:-1].tolist() == prompt.answer.tolist() == backwards.answer.tolist()[::-1]
    assert (digits if low is None else low) <= len(prompt.answer) <= digits
    assert prompt.max_tokens == digits + (low is not None)
    assert copy.stop_tokens == (() if low is None else (EOS,))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, EOS], 1.0),
        ([1, 2, 3, 4], 3 / 4),
        ([1, 2, EOS], 2 / 3),
        ([1, 9, 3, EOS], 2 / 3),
        ([1, 2, 3, 3, 3, 3], 1 / 2),
        ([EOS], 0.0),
        ([3, 2, 1, EOS], 1 / 3),
        ([SEP, SEP, SEP, EOS], 0.0),
    ],
)
def test_variable_length_reward(tokens, expected):
    task = Copy(0, digits=5, min_digits=1)
    prompt = Prompt(np.array([1, 2, 3, SEP], np.int32), np.array([1, 2, 3], np.int32), 6)
    assert score(task, prompt, tokens) == pytest.approx(expected)
    assert score(Copy(0, digits=5, min_digits=1, credit="exact"), prompt, tokens) == (expected == 1.0)


@pytest.mark.parametrize(
    ("tokens", "digits", "exact"),
    [
        ([1, 0, 5, 14], 1.0, 1.0),
        ([0, 5, 14], 2 / 3, 0.0),
        ([1, 0, 4, 14], 2 / 3, 0.0),
        ([0, 1, 0, 5], 3 / 4, 0.0),
        ([14], 0.0, 0.0),
        ([15, 15, 5, 14], 1 / 3, 0.0),
    ],
)
def test_arithmetic_credit(tokens, digits, exact):
    prompt = Prompt(np.array([9, 8, 10, 7, 13], np.int32), np.array([1, 0, 5], np.int32), 4)
    assert score(Arithmetic(0), prompt, tokens) == pytest.approx(digits)
    assert score(Arithmetic(0, credit="exact"), prompt, tokens) == exact
