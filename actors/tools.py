"""Tools that a model may call in the middle of an answer, as an environment (`areal_like.interfaces.Environment`).

A call is text between two marks, by default as Qwen's and Hermes' chat templates write it:
`<tool_call>{"name": "calculator", "arguments": {"expression": "37*48"}}</tool_call>`. A turn with calls is answered by
their results, in order (`error: ...` for a failed one); a turn without one is the answer, for the task's verifier.
"""

import ast
import asyncio
import inspect
import json
import math
import operator
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pkgutil import resolve_name
from typing import Annotated, Literal

from areal_like.errors import EpisodeError
from areal_like.interfaces import Outcome
from areal_like.tasks.sandbox import OutOfTime, SandboxError, SandboxLimits, run
from areal_like.types import Prompt

Tool = Callable[..., str | Awaitable[str]]
"""A function of keyword arguments, all of them text, numbers, or what else JSON has; its result, or the error that it
raises, is shown to the model. EpisodeError, ImportError and SandboxError are faults of the machine: the sample is drawn
again. The same arguments must give the same result."""

RESULT_MARKS = ("<tool_response>\n", "\n</tool_response>")
MAX_CHARACTERS = 256
MAX_BITS = 4096
"""Most bits of any intermediate result: a larger one is refused before it is computed."""

_BINARY: dict[type[ast.operator], Callable[..., int | float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[..., int | float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
PROGRAMS_AT_ONCE = 4
BOUNDS = SandboxLimits(seconds=5.0)
_THREADS = ThreadPoolExecutor(PROGRAMS_AT_ONCE, "python tool")
"""The event loop's own threads fetch weights, which must not wait for programs."""
_SHELL = '''
import ast, io, random, sys

def shown(source):
    """[what it says, what went wrong]"""
    said, names, problem = io.StringIO(), {"__name__": "__main__"}, ""
    sys.stdout = sys.stderr = said
    random.seed(0)
    try:
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "program", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "program", "eval"), names) if last else None
        if value is not None:
            print(repr(value), file=said)
    except SystemExit:
        pass
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
    return [said.getvalue()[:100_000].encode(errors="replace").decode(), problem[:10_000]]
'''


def calculator(expression: str) -> str:
    """The value of an expression of numbers, `+ - * / // % **` and parentheses, as Python writes it. Raises ValueError,
    with the reason, for anything else and for results that are too large."""
    text = str(expression)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("not an arithmetic expression") from None
    try:
        return str(_value(tree.body))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, TypeError):
        raise ValueError("the result is out of range") from None


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            result = number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            result = _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(a, int) and isinstance(b, int) and isinstance(op, ast.Pow | ast.Mult):
                more = abs(a).bit_length() * (abs(b) - 1) if isinstance(op, ast.Pow) else abs(b).bit_length()
                if abs(a).bit_length() + more > MAX_BITS:  # whole numbers have no limit, and huge ones take long
                    raise ValueError("the result is too large")
            result = _BINARY[type(op)](a, b)
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are understood")
    if isinstance(result, complex) or (isinstance(result, float) and not math.isfinite(result)):
        raise ValueError("the result is not a finite real number")
    return result  # type: ignore[return-value]


async def python(code: str) -> str:
    """What a program prints and, if its last line is an expression, the value of that. Each starts fresh, in the
    sandbox, with the same random numbers."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _said, str(code), "full")


async def python_weak(code: str) -> str:
    """The same where the machine forbids user namespaces: for faulty programs, not for attacks."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _said, str(code), "weak")


def _said(code: str, isolation: Literal["full", "weak"]) -> str:
    """Raises ValueError, in words for the model, and SandboxError."""
    try:
        (answer,) = run(_SHELL, "shown", [[code]], BOUNDS, isolation)
    except OutOfTime as error:
        raise ValueError(f"the program was ended: {error}") from None
    match answer:  # the program may have written one itself
        case [[str(said), ""]]:
            return said.rstrip("\n")
        case [[str(said), str(problem)]]:
            raise ValueError(said + problem)
    raise ValueError("the program has ended by itself, or needs too much memory")


TOOLS: dict[str, Tool] = {"calculator": calculator, "python": python, "python_weak": python_weak}


class Tools:
    """tools: names of tools, or "module:name" of your own. max_characters: of a result that is shown. call_marks: what
    stands before and behind a call."""

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("calculator",),
        max_characters: Annotated[int, "[1, inf)"] = 2000,
        call_marks: Sequence[str] = ("<tool_call>", "</tool_call>"),
    ):
        unknown = [tool for tool in tools if tool not in TOOLS and ":" not in tool]
        if unknown or not tools:
            raise ValueError(f'environment.tools: got {[*tools]}, expected some of {", ".join(TOOLS)} or "module:name"')
        if len(call_marks) != 2 or not all(call_marks):
            raise ValueError(f"environment.call_marks: got {[*call_marks]}, expected two texts, neither of them empty")
        self._tools: dict[str, Tool] = {
            tool.rpartition(":")[2]: TOOLS.get(tool) or resolve_name(tool) for tool in tools
        }
        self._max_characters = max_characters
        self._opens, self._closes = call_marks
        self.tool_calls = self.tool_errors = 0

    def reset(self, prompt: Prompt) -> str:
        return ""

    async def step(self, action: str) -> Outcome:
        calls = [part.partition(self._closes)[0] for part in action.split(self._opens)[1:]]
        if not calls:
            return Outcome("", None, True)
        shown = [(await self._result(call))[: self._max_characters] for call in calls]
        return Outcome("\n".join(each.join(RESULT_MARKS) for each in shown), 0.0, False)

    async def _result(self, call: str) -> str:
        """The text that is shown for a call. Raises EpisodeError."""
        self.tool_calls += 1
        try:
            tool, arguments = self._parse(call.strip())
            result = tool(**arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except EpisodeError:
            raise
        except (ImportError, SandboxError) as error:
            raise EpisodeError(f"a tool cannot run here: {error!r}") from error
        except Exception as error:  # a tool may raise anything for the model's arguments
            self.tool_errors += 1
            return f"error: {error}" if isinstance(error, ValueError) else f"error: {type(error).__name__}: {error}"

    def _parse(self, call: str) -> tuple[Tool, dict[str, object]]:
        """Raises ValueError, in words for the model."""
        try:
            fields = json.loads(call)
            name, arguments = fields.get("name"), {**fields.get("arguments", {})}
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise ValueError('a call is {"name": ..., "arguments": {...}}') from None
        if not isinstance(name, str) or name not in self._tools:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
        try:
            inspect.signature(self._tools[name]).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
        return self._tools[name], arguments
