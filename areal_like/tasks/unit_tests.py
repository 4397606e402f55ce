"""A verifier of programs: unit tests of a Python function, called in the sandbox and compared here.

Tests are JSON (so that a line of a file can carry them), e.g.

    {"function": "add", "cases": [[[1, 2], 3], [[0, 0], 0]], "credit": "all"}

A case is a list of arguments and the value expected. `credit`: "all" gives 1 where every case passes, else 0; "share"
gives the share of cases that pass. Optional too: `seconds`, `memory`, `output` (`sandbox.SandboxLimits`, for all cases
together) and `isolation`. A program that is out of time earns 0.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from typing import Any

from areal_like.tasks.sandbox import OutOfTime, SandboxLimits, run

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_BOUNDS = tuple(field.name for field in fields(SandboxLimits))


def unit_tests(tests: str, response: str) -> float:
    """The reward of a response. Its program is the last fenced block, or the whole text if there is none.

    Raises ValueError for tests that can't be read, and SandboxError.
    """
    found = _checked(tests)
    blocks = _FENCED.findall(response)
    bounds = SandboxLimits(**{name: found[name] for name in _BOUNDS if name in found})
    calls = [arguments for arguments, _ in found["cases"]]
    code = blocks[-1] if blocks else response
    try:
        results = run(code, found["function"], calls, bounds, found.get("isolation", "full"))
    except OutOfTime:
        return 0.0
    passed = [
        result is not None and same(result[0], expected)
        for result, (_, expected) in zip(results, found["cases"], strict=True)
    ]
    return sum(passed) / len(passed) if found.get("credit", "all") == "share" else float(all(passed))


def same(value: object, expected: object) -> bool:
    """Equal JSON values. Floats may differ by rounding (relative 1e-9); a truth value is no number."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in value)
    if isinstance(value, float) or isinstance(expected, float):
        if not isinstance(value, int | float) or not isinstance(expected, int | float):
            return False
        return value == expected or (_is_finite(value) and math.isclose(value, expected, rel_tol=1e-9))
    return bool(value == expected)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _checked(tests: str) -> dict[str, Any]:
    found = json.loads(tests)
    if not isinstance(found, dict) or not isinstance(found.get("function"), str) or not found.get("cases"):
        raise ValueError('unit tests: want {"function": name, "cases": [[arguments, expected], ...]}')
    for case in found["cases"]:
        if not isinstance(case, list) or len(case) != 2 or not isinstance(case[0], list):
            raise ValueError(f"unit tests: a case is [arguments, expected], got {str(case)[:200]}")
    if found.get("credit", "all") not in ("all", "share"):
        raise ValueError(f'unit tests: credit must be "all" or "share", got {found["credit"]!r}')
    return found
