"""A verifier of programs: unit tests of a Python function, called in the sandbox and compared here.

Tests are JSON (so that a line of a file can carry them), e.g.

    {"function": "add", "cases": [[[1, 2], 3], [[0, 0], 0]], "credit": "all"}

A case is a list of arguments and the value expected. `credit`: "all" gives 1 where every case passes, else 0; "share"
gives the share of cases that pass. Optional too: `isolation`, and `SandboxLimits` for all cases together. A program
that is out of time earns 0.
"""

import json
import math
import re
from contextlib import suppress
from dataclasses import fields
from typing import Any

from areal_like.tasks.maths import behind_thoughts
from areal_like.tasks.sandbox import OutOfTime, SandboxLimits, run

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def unit_tests(tests: str, response: str) -> float:
    """The reward of a response, whose program is the last fenced block, or all of it. Raises ValueError for tests that
    can't be read, and SandboxError."""
    found, response = checked(tests), behind_thoughts(response)
    blocks = _FENCED.findall(response)
    bounds = SandboxLimits(**{each.name: found[each.name] for each in fields(SandboxLimits) if each.name in found})
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
    if isinstance(value, int | float) and isinstance(expected, int | float) and float in (type(value), type(expected)):
        with suppress(OverflowError):  # an int beyond all floats
            return value == expected or math.isclose(value, expected, rel_tol=1e-9)
        return False
    return bool(value == expected)


def checked(tests: str) -> dict[str, Any]:
    """Raises ValueError."""
    found = json.loads(tests)
    if not isinstance(found, dict) or not isinstance(found.get("function"), str) or not found.get("cases"):
        raise ValueError('want {"function": name, "cases": [[arguments, expected], ...]}')
    for case in found["cases"]:
        if not isinstance(case, list) or len(case) != 2 or not isinstance(case[0], list):
            raise ValueError(f"a case is [arguments, expected], got {str(case)[:200]}")
    for key, known in {"credit": ("all", "share"), "isolation": ("full", "weak")}.items():
        if found.get(key, known[0]) not in known:
            raise ValueError(f"{key}: got {found[key]!r}, expected one of {', '.join(known)}")
    return found
