"""Checks values against annotations read from source; nothing is imported.

It understands int, float, bool, str, None, Literal, unions, list, tuple, Sequence, dict and Mapping, and
`Annotated[float, "(0, 1]"]` for a number with a range: "[0, 1)" is at least 0 and below 1, "(0, inf)" above 0 and
finite. No range contains nan; one that ends with "inf]" contains infinity. Other annotations accept every value."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_SCALARS: dict[str, Callable[[object], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == value,
    "str": lambda value: isinstance(value, str),
    "Sequence": lambda value: isinstance(value, list | tuple),
    "list": lambda value: isinstance(value, list | tuple),
    "tuple": lambda value: isinstance(value, list | tuple),
    "Mapping": lambda value: isinstance(value, Mapping),
    "dict": lambda value: isinstance(value, Mapping),
}
_MUST = "must be "
_INTERVAL = re.compile(r"([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])")
_ANNOTATED = re.compile(r"Annotated\[(.+?), '(.*?)'\]")


def misfit(value: object, annotation: ast.expr | None) -> str:
    """What is wrong with a value's type or range, such as "expected float, got 'x'" or "must be above 0, got -1"; empty
    if it fits, and for annotations that are not understood."""
    problem = _problem(value, annotation)
    return f"{problem}, got {value!r}" if problem else ""


def _problem(value: object, annotation: ast.expr | None) -> str:
    match annotation:
        case ast.Constant(value=None):
            return "" if value is None else "expected None"
        case ast.Constant(value=str(text)):
            return _problem(value, ast.parse(text, mode="eval").body)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _of_union(annotation, _problem(value, left), _problem(value, right))
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return "" if value is None else _of_union(annotation, _problem(value, inner))
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *notes])):
            return _problem(value, inner) or _outside(value, notes)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            known = any(value == choice and type(value) is type(choice) for choice in _choices(inner))
            return "" if known else f"expected {ast.unparse(annotation)}"
        case ast.Subscript(value=ast.Name(id="list" | "Sequence" | "tuple"), slice=inner):
            return _of_items(value, inner) if isinstance(value, list | tuple) else f"expected {_shown(annotation)}"
        case ast.Subscript(value=ast.Name() as container):
            return _problem(value, container)
        case ast.Name(id=name) if name in _SCALARS:
            return "" if _SCALARS[name](value) else f"expected {name}"
    return ""


def _of_union(annotation: ast.expr, *problems: str) -> str:
    """If the value has the type of one branch but lies outside its range, report the range."""
    if "" in problems:
        return ""
    outside = [problem for problem in problems if _MUST in problem]
    return outside[0] if outside else f"expected {_shown(annotation)}"


def _of_items(values: Sequence[object], inner: ast.expr) -> str:
    """`inner` stands in the brackets of a list or tuple: a type for all items, or one for each."""
    kinds = inner.elts if isinstance(inner, ast.Tuple) else [inner] * len(values)
    if len(kinds) == 2 and isinstance(kinds[1], ast.Constant) and kinds[1].value is Ellipsis:
        kinds = [kinds[0]] * len(values)
    if len(kinds) != len(values):
        return f"expected {len(kinds)} values"
    problems = [_problem(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return next((f"each {problem}" for problem in problems if problem), "")


def _outside(value: object, notes: list[ast.expr]) -> str:
    if not isinstance(value, int | float):
        return ""
    texts = [note.value for note in notes if isinstance(note, ast.Constant) and isinstance(note.value, str)]
    ranges = [found for text in texts if (found := range_of(text))]
    return next((problem for found in ranges if (problem := found.misfit(value))), "")


def _choices(inner: ast.expr) -> tuple[object, ...]:
    choices = ast.literal_eval(inner)
    return choices if isinstance(choices, tuple) else (choices,)


def type_and_range(annotation: ast.expr) -> tuple[str, str]:
    """`Annotated[float, "(0, 1]"] | None` → ("float | None", "(0, 1]")."""
    text = ast.unparse(annotation)
    limits = _ANNOTATED.search(text)
    return _ANNOTATED.sub(r"\1", text), limits[2] if limits else ""


def _shown(annotation: ast.expr) -> str:
    return type_and_range(annotation)[0]


class Range(NamedTuple):
    low: float
    high: float
    with_low: bool
    with_high: bool

    def contains(self, value: float) -> bool:
        above = value >= self.low if self.with_low else value > self.low
        return above and (value <= self.high if self.with_high else value < self.high)

    def misfit(self, value: float) -> str:
        """Why the value is outside, such as "must be at least 0 and below 1"; empty where it is inside."""
        if self.contains(value):
            return ""
        if value != value:
            return "must be a number"
        ends = [f"{'at least' if self.with_low else 'above'} {self.low}"] if self.low > -math.inf else []
        if self.high < math.inf:
            ends.append(f"{'at most' if self.with_high else 'below'} {self.high}")
        elif value == math.inf:
            ends.append("finite")
        return f"must be {' and '.join(ends)}"


@functools.cache
def range_of(text: str) -> Range | None:
    """The range that an interval writes; None for a text that is no interval."""
    found = _INTERVAL.fullmatch(text)
    if not found:
        return None
    opening, low, high, closing = found.groups()
    return Range(_number(low), _number(high), opening == "[", closing == "]")


def _number(text: str) -> float:
    """Whole numbers stay whole: 64 bits are more than a float holds."""
    try:
        return int(text)
    except ValueError:
        return float(text)
