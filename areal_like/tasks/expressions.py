"""Arithmetic from text, for calculators that a model may use: nothing but numbers is ever evaluated."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

MAX_CHARACTERS = 256
MAX_BITS = 4096
"""Most bits of any intermediate result: a larger one is refused before it is computed."""

_BINARY: dict[type[ast.operator], Callable[..., int | float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[..., int | float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(text: str) -> str:
    """The value of an expression of numbers, `+ - * / // % **` and parentheses, as Python writes it. Raises ValueError,
    with the reason, for anything else and for results that are too large."""
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
