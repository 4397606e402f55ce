"""Unit tests as a verifier, and the task that needs one."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from areal_like.tasks.code import OPERATORS, PAD, Code
from areal_like.tasks.sandbox import SandboxError
from areal_like.tasks.unit_tests import same, unit_tests
from tests.integration.runs import rows, train

CASES = {"function": "f", "cases": [[[1, 2], 3], [[2, 2], 4]]}


def score(program: str, **more) -> float:
    try:
        return unit_tests(json.dumps(CASES | more), program)
    except SandboxError as error:
        pytest.skip(str(error))


def test_a_program_is_scored_by_its_cases():
    assert score("def f(a, b): return a + b") == 1.0
    assert score("def f(a, b): return a * b") == 0.0
    assert score("def f(a, b): return a * b", credit="share") == 0.5
    assert score("So:\n```python\nnonsense\n```\nor\n```python\ndef f(a, b): return a + b\n```\nDone.") == 1.0
    assert score("def f(a, b):\n  while True: pass", seconds=1.0) == 0.0


def test_a_program_cannot_reach_the_comparison():
    everywhere = "class Same(int):\n    def __eq__(self, other): return True\ndef f(a, b): return Same(9)"
    assert score(everywhere) == 0.0
    assert score("import json\njson.dumps = lambda *a, **k: '[true]'\ndef f(a, b): return 0") == 0.0
    assert score("import os\nos._exit(0)") == score("raise SystemExit(0)") == 0.0


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [(1, 1.0, True), (0.1 + 0.2, 0.3, True), (True, 1, False), (1, True, False), ([1, [2]], [1, [2]], True),
     ([1], [1, 2], False), ({"a": 1}, {"a": 1.0}, True), ({"a": 1}, {"b": 1}, False), (10**400, 0.5, False),
     ("1", 1, False), (None, 0.0, False)],
)  # fmt: skip
def test_values_are_compared_as_json(value, expected, equal):
    assert same(value, expected) is equal


@pytest.mark.parametrize("operator", range(len(OPERATORS)))
def test_the_right_operator_of_each_word_earns_all_and_others_less(operator):
    task = Code(0, isolation="weak")
    prompt = next(p for p in (task.prompt("train", row) for row in range(1000)) if p.tokens[0] == operator)
    right = np.array([len(OPERATORS) + operator], np.int32)
    wrong = np.array([len(OPERATORS) + (operator + 1) % len(OPERATORS)], np.int32)
    rewards = [asyncio.run(task.reward(prompt, tokens)) for tokens in (right, wrong, np.array([PAD], np.int32))]
    assert rewards[0] == 1.0 and rewards[1] < 1.0 and rewards[2] == 0.0


@pytest.mark.integration
def test_a_run_trains_on_programs_that_were_run_in_the_pool(tmp_path: Path) -> None:
    score("def f(a, b): return a + b")  # skips where there are no namespaces
    small = ["groups_per_batch=2", "sizing.group_size=4", "run.steps=3", "run.target_reward=null", "eval.every=0"]
    run = train(tmp_path, "run", "task=code", "eval.prompts=4", "actors.count=1", *small)
    last = rows(run)[-1]
    assert last["rewards/calls"] >= 16 and last["rewards/seconds_p50"] > 0
    assert last["rewards/errors"] == last["rewards/crashes"] == last["rewards/timeouts"] == 0
