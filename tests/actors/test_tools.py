"""The tools environment finds calls, answers them in order, and reports the model's mistakes to it; the calculator has
Python's values, and accepts nothing but arithmetic."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import tools as module
from actors.tools import Tools, calculator
from areal_like.errors import EpisodeError
from areal_like.interfaces import Outcome
from areal_like.tasks.sandbox import SandboxError, SandboxLimits


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(tools: Tools, action: str) -> Outcome:
    return asyncio.run(asyncio.wait_for(tools.step(action), 30))


def shown(*results: str) -> str:
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def test_calls_are_answered_in_order_and_a_turn_without_one_is_the_answer_for_the_verifier():
    assert step(Tools(), "It is 408.") == Outcome("", None, True)
    action = f"Let me see. {call('calculator', expression='12*34')} and {call('calculator', expression='2**10')}"
    assert step(Tools(), action) == Outcome(shown("408", "1024"), 0.0, False)


@pytest.mark.parametrize(
    "action, words",
    [
        ("<tool_call>12*34</tool_call>", "a call is"),
        ("<tool_call>[1]</tool_call>", "a call is"),
        ('<tool_call>{"name": ["calculator"], "arguments": {}}</tool_call>', "there is no tool ['calculator']"),
        ('<tool_call>{"name": "calculator", "arguments": "1"}</tool_call>', "a call is"),
        (call("calculater", expression="1"), "there is no tool 'calculater'; there are calculator"),
        (call("calculator", text="1"), "calculator: "),
        ("<tool_call>" + "[" * 100_000, "a call is"),
        (call("calculator", expression="1/0"), "division by zero"),
    ],
)
def test_mistakes_are_shown(action, words):
    tools = Tools()
    outcome = step(tools, action)
    assert outcome.observation.startswith("<tool_response>\nerror: ") and words in outcome.observation
    assert not outcome.done and (tools.tool_calls, tools.tool_errors) == (1, 1)


def broken(error: str, a: int = 0) -> str:
    raise {"import": ImportError, "sandbox": SandboxError, "episode": EpisodeError}[error]


async def added(a: int, b: int) -> int:
    return a + b


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [("added", {"a": "x", "b": 1}, "TypeError: "), ("broken", {"error": [1]}, "TypeError: "),
     ("broken", {"error": "?"}, "KeyError: '?'"), ("broken", {"error": "import"}, None),
     ("broken", {"error": "sandbox"}, None), ("broken", {"error": "episode"}, None)],
)  # fmt: skip
def test_an_error_of_a_tool_is_shown_and_one_of_the_machine_ends_the_episode(name, arguments, words):
    tools = Tools(tools=[f"{__name__}:{name}"])
    if words is None:
        with pytest.raises(EpisodeError):
            step(tools, call(name, **arguments))
    else:
        assert step(tools, call(name, **arguments)).observation.startswith(f"<tool_response>\nerror: {words}")


@pytest.fixture(scope="module", params=["python", "python_weak"])
def kind(request):
    try:
        step(Tools(tools=[request.param]), call(request.param, code="1"))
    except EpisodeError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def python(kind, monkeypatch):
    """The text shown for a program."""
    monkeypatch.setattr(module, "BOUNDS", SandboxLimits(seconds=1.0))
    tools = Tools(tools=["calculator", kind])

    def run(code):
        outcome = step(tools, call(kind, code=code))
        return outcome.observation.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")

    return run


@pytest.mark.parametrize(
    "code, shown",
    [
        ("2**100", "1267650600228229401496703205376"),
        ("import math\nprint('so:')\nmath.comb(5, 2)", "so:\n10"),
        ("print(1)\nraise SystemExit", "1"),
        ("x = 1", ""),
        ("print('\\ud800')", "?"),
        ("print('a')\n1 / 0", "error: a\nZeroDivisionError: division by zero"),
        ("import os\nos._exit(0)", "error: the program has ended by itself, or needs too much memory"),
    ],
)
def test_a_program_is_run_and_its_output_is_shown(python, code, shown):
    assert python(code) == shown


@pytest.mark.parametrize("kind", ["python"], indirect=True)
def test_a_program_without_an_end_is_ended(python):
    assert python("while True: pass") == "error: the program was ended: more than 1 s of processor time, or 10 s"


@given(st.integers(-999, 999), st.sampled_from(["+", "-", "*", "//", "%", "/"]), st.integers(1, 999), st.integers(0, 9))
def test_values_are_pythons(a, operator, b, c):
    text = f"({a}) {operator} {b} + {c}"
    assert calculator(text) == str(eval(text))


@pytest.mark.parametrize(
    "text",
    [
        "", "1+", "a", "f(1)", "(1).real", "[1]", "'a'*9", "True+1", "1j", "1 if 1 else 2", "1;2", "__import__('os')",
        "1/0", "10**10**10", "2**99999", "(-8)**0.5", "9" * 300, "(" * 200 + "1" + ")" * 200, "1e308*10**308", "\x00",
        "1e999", "-1e999", "1/1e999", "*".join(["(9**99)"] * 30),
    ],
)  # fmt: skip
def test_everything_else_is_refused_with_a_reason(text):
    with pytest.raises(ValueError, match=r"\w"):
        calculator(text)
