"""Checks values against annotations read from source; nothing is imported.

It understands int, float, bool, str, None, Literal, unions, list, tuple, Sequence, dict and Mapping, and
`Annotated[float, "(0, 1]"]` for a number with a range: "[0, 1)" is at least 0 and below 1, "(0, inf)" above 0 and
finite. No range contains nan; one that ends with "inf]" contains infinity. Other annotations accept every value."""

import ast
import math
import re
from collections.abc import Mapping, Sequence

_SCALARS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "Sequence": (list, tuple),
    "list": (list, tuple),
    "tuple": (list, tuple),
    "Mapping": (Mapping,),
    "dict": (Mapping,),
}
_RANGES = tuple(f"expected {word}" for word in ("at", "above", "below", "finite"))
_INTERVAL = re.compile(r"([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])")
_ANNOTATED = re.compile(r"Annotated\[(.+?), '(.*?)'\]")


def misfit(value: object, annotation: ast.expr | None) -> str:
    """A fault of a value's type or range, such as "got 'x', expected float"; empty if there is none."""
    problem = _problem(value, annotation)
    return f"got {value!r}, {problem}" if problem else ""


def _problem(value: object, annotation: ast.expr | None) -> str:
    match annotation:
        case ast.Constant(value=None):
            return "" if value is None else "expected None"
        case ast.Constant(value=str(text)):
            return _problem(value, ast.parse(text, mode="eval").body)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            problems = _problem(value, left), _problem(value, right)
            if "" in problems:
                return ""
            # The range of the branch whose type the value has, rather than both types.
            return next((each for each in problems if each.startswith(_RANGES)), f"expected {_shown(annotation)}")
        case ast.Subscript(
            value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, ast.Constant(value=str(text))])
        ):
            return _problem(value, inner) or outside(value, text)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            choices = ast.literal_eval(inner)
            known = repr(value) in map(repr, choices if isinstance(choices, tuple) else (choices,))
            return "" if known else f"expected {_shown(annotation)}"
        case ast.Subscript(value=ast.Name(id="list" | "Sequence" | "tuple"), slice=inner):
            return _of_items(value, inner) if isinstance(value, list | tuple) else f"expected {_shown(annotation)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, inner])) if isinstance(value, Mapping):
            return _of_items([*value.values()], inner)
        case ast.Subscript(value=ast.Name() as container):
            return _problem(value, container)
        case ast.Name(id=name) if name in _SCALARS:
            fits = isinstance(value, _SCALARS[name]) and isinstance(value, bool) == (name == "bool") and value == value
            return "" if fits else f"expected {name}"
    return ""


def _of_items(values: Sequence[object], inner: ast.expr) -> str:
    """`inner` stands in the brackets of a list or tuple: a type for all items, or one for each."""
    kinds = inner.elts if isinstance(inner, ast.Tuple) else [inner] * len(values)
    if len(kinds) == 2 and isinstance(kinds[1], ast.Constant) and kinds[1].value is Ellipsis:
        kinds = [kinds[0]] * len(values)
    if len(kinds) != len(values):
        return f"expected {len(kinds)} values"
    problems = [_problem(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return next((f"{problem} for each" for problem in problems if problem), "")


def type_and_range(annotation: str) -> tuple[str, str]:
    """`Annotated[float, '(0, 1]'] | None` → ("float | None", "(0, 1]")."""
    limits = _ANNOTATED.search(annotation)
    return _ANNOTATED.sub(r"\1", annotation), limits[2] if limits else ""


def _shown(annotation: ast.expr) -> str:
    """As a user writes its values: `Literal['a', 'b'] | None` → "'a' | 'b' | null"."""
    text = type_and_range(ast.unparse(annotation))[0].replace("None", "null")
    return re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " | "), text)


def outside(value: object, interval: str) -> str:
    """Why a number is outside an interval, such as "expected at least 0 and below 1"; empty where it is not."""
    found = _INTERVAL.fullmatch(interval)
    if not found or not isinstance(value, int | float):
        return ""
    opening, low, high, closing = found[1], _number(found[2]), _number(found[3]), found[4]
    above = value >= low if opening == "[" else value > low
    if above and (value <= high if closing == "]" else value < high):
        return ""
    ends = [f"{'at least' if opening == '[' else 'above'} {low}"] if low > -math.inf else []
    if high < math.inf:
        ends.append(f"{'at most' if closing == ']' else 'below'} {high}")
    elif value == math.inf:
        ends.append("finite")
    return f"expected {' and '.join(ends)}"


def _number(text: str) -> float:
    """Whole numbers stay whole: 64 bits are more than a float holds."""
    return int(text) if text.lstrip("-").isdigit() else float(text)
