"""Python as a tool: runs a program in the sandbox and shows its output. Each starts fresh, with the same random
numbers; threads of their own wait for them: weights, which come by the event loop's threads, must not wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from areal_like.tasks.sandbox import OutOfTime, SandboxLimits, run

PROCESSES = 4
BOUNDS = SandboxLimits(seconds=5.0)
_THREADS = ThreadPoolExecutor(PROCESSES, "python tool")
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


async def python(code: str) -> str:
    """What a program prints and, if its last line is an expression, the value of that."""
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
