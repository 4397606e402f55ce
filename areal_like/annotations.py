"""Holding values against annotations that were read from source, of which nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

_SCALARS: dict[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "Sequence": lambda value: isinstance(value, list | tuple),
    "list": lambda value: isinstance(value, list | tuple),
    "tuple": lambda value: isinstance(value, list | tuple),
    "Mapping": lambda value: isinstance(value, Mapping),
    "dict": lambda value: isinstance(value, Mapping),
}


def fits(value: Any, annotation: ast.expr | None) -> bool:
    """Whether a value may have this type; True for annotations that are not understood."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            return fits(value, ast.parse(text, mode="eval").body)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return fits(value, left) or fits(value, right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return value is None or fits(value, inner)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return any(value == choice and type(value) is type(choice) for choice in _choices(inner))
        case ast.Subscript(value=ast.Name() as container):
            return fits(value, container)
        case ast.Name(id=name) if name in _SCALARS:
            return _SCALARS[name](value)
    return True


def _choices(inner: ast.expr) -> tuple[Any, ...]:
    choices = ast.literal_eval(inner)
    return choices if isinstance(choices, tuple) else (choices,)
