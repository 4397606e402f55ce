"""The tools environment finds calls, answers them in order, and reports the model's mistakes to it."""

import asyncio
import json
from typing import Any

import pytest

from actors import python_tool
from actors.tools import Tools
from areal_like.tasks.sandbox import SandboxError, SandboxLimits
from areal_like.types import Outcome


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(tools: Tools, action: str) -> Outcome:
    return asyncio.run(asyncio.wait_for(tools.step(action), 30))


def shown(*results: str) -> str:
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def test_a_turn_without_a_call_is_the_answer_for_the_verifier():
    assert step(Tools(), "It is 408.") == Outcome("", None, True)


def test_calls_are_answered_in_order():
    action = f"Let me see. {call('calculator', expression='12*34')} and {call('calculator', expression='2**10')}"
    assert step(Tools(), action) == Outcome(shown("408", "1024"), 0.0, False)


@pytest.mark.parametrize(
    "action, told",
    [
        ("<tool_call>12*34</tool_call>", "a call is"),
        ("<tool_call>[1]</tool_call>", "a call is"),
        (call("calculater", expression="1"), "there is no tool 'calculater'; there are calculator"),
        (call("calculator", text="1"), "calculator: "),
        ("<tool_call>" + "[" * 100_000, "a call is"),
        (call("calculator", expression="1/0"), "division by zero"),
        (call("calculator", expression="__import__('os')"), "only numbers"),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "1"', "a call is"),
    ],
)
def test_mistakes_are_told_and_earn_nothing(action, told):
    outcome = step(Tools(), action)
    assert outcome.observation.startswith("<tool_response>\nerror: ") and told in outcome.observation
    assert (outcome.reward, outcome.done) == (0.0, False)


@pytest.fixture(params=["python", "python_weak"])
def python(request):
    """The text shown for a program."""
    tools = Tools(tools=["calculator", request.param])
    try:
        step(tools, call(request.param, code="1"))
    except SandboxError as error:
        pytest.skip(str(error))

    def run(code):
        outcome = step(tools, call(request.param, code=code))
        assert outcome.observation.startswith("<tool_response>\n") and not outcome.done
        return outcome.observation.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")

    return run


@pytest.mark.parametrize(
    "code, said",
    [
        ("2**100", "1267650600228229401496703205376"),
        ("import math\nprint('so:')\nmath.comb(5, 2)", "so:\n10"),
        ("def f(n):\n    return n < 2 or n * f(n - 1)\nfor n in (3, 4):\n    print(f(n))", "6\n24"),
        ("print(1)\nraise SystemExit", "1"),
        ("x = 1", ""),
        ("print('\\ud800')", "?"),
    ],
)
def test_a_program_is_run_and_its_words_are_shown(python, code, said):
    assert python(code) == said


@pytest.mark.parametrize(
    "code, told",
    [
        ("print('a')\n1 / 0", "error: a\nZeroDivisionError: division by zero"),
        ("def f(:", "error: SyntaxError: "),
        ("open('/etc/passwd').read()", "error: "),
        ("import socket", "error: "),
        ("import os\nos._exit(0)", "error: the program has ended by itself"),
        ("'x' * (1 << 30)", "error: "),
    ],
)
def test_a_program_that_errs_or_attacks_is_told_so(python, code, told):
    assert python(code).startswith(told)


def test_an_endless_program_is_ended_and_holds_nothing_up(python, monkeypatch):
    monkeypatch.setattr(python_tool, "BOUNDS", SandboxLimits(seconds=1.0))
    assert python("while True: pass").startswith("error: the program was ended: more than 1 s")
