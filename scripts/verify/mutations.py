"""Small faults put into source: each `Mutant` is a module with one changed node. Knows nothing of tests.

Comparisons are turned round or moved by one, operators and `and`/`or` exchanged, conditions negated, whole numbers
raised by one, True and False swapped, statements left out, `min`/`max` and `any`/`all` exchanged. Docstrings, texts,
annotations, log lines and error messages stay: no test should notice them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitXor: ast.BitAnd,
}  # fmt: skip
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT = ("log", "_log", "logging", "warnings", "print")
"""Calls that only inform people."""
Change = Callable[[ast.AST], ast.AST | None]


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str
    line: int
    what: str
    source: str
    """The source of the whole module."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.what}"


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """All of a module, from top to bottom."""
    tree = ast.parse(source)
    places = [(node, field, at) for node, field, at in _places(tree)]
    for number, (parent, field, at) in enumerate(places):
        for change in _changes(_at(parent, field, at)):
            changed = copy.deepcopy(tree)
            place = _nth(changed, number)
            before = _at(*place)
            after = change(copy.deepcopy(before))
            _put(*place, ast.Pass() if after is None else after)
            text = ast.unparse(ast.fix_missing_locations(changed))
            shown = "left out" if after is None else ast.unparse(after)
            line = getattr(before, "lineno", 0)
            yield Mutant(path, line, f"{_short(ast.unparse(before))} -> {_short(shown)}", text)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:87]}..."


Place = tuple[ast.AST, str, int | None]


def _places(tree: ast.AST) -> Iterator[Place]:
    """Parent, field and index of every node that may change, in a fixed order."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        items = [(at, each) for at, each in enumerate(value)] if isinstance(value, list) else [(None, value)]
        for at, node in items:
            if not isinstance(node, ast.AST) or _tells_people(node):
                continue
            yield tree, field, at
            yield from _places(node)


def _tells_people(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and ast.unparse(call.func).partition(".")[0] in SILENT


def _nth(tree: ast.AST, number: int) -> Place:
    for count, place in enumerate(_places(tree)):
        if count == number:
            return place
    raise IndexError(number)


def _at(parent: ast.AST, field: str, at: int | None) -> ast.AST:
    value = getattr(parent, field)
    return value if at is None else value[at]  # type: ignore[no-any-return]


def _put(parent: ast.AST, field: str, at: int | None, node: ast.AST) -> None:
    if at is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[at] = node


def _changes(node: ast.AST) -> Iterator[Change]:
    yield from _changes_of_statement(node) if isinstance(node, ast.stmt) else _changes_of_expression(node)


def _changes_of_expression(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=[compared]) if type(compared) in COMPARED:
            yield lambda n: _with(n, ops=[COMPARED[type(compared)]()])
        case ast.BinOp(op=operator) if type(operator) in COMPUTED and not _is_text(node):
            yield lambda n: _with(n, op=COMPUTED[type(operator)]())
        case ast.BoolOp(op=joined):
            yield lambda n: _with(n, op=ast.And() if isinstance(joined, ast.Or) else ast.Or())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield lambda n: copy.deepcopy(operand)
        case ast.Constant(value=bool() as value):
            yield lambda n: ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield lambda n: ast.Constant(value + 1)
        case ast.Name(id=name) if name in OTHER_NAMES:
            yield lambda n: ast.Name(OTHER_NAMES[name], ast.Load())
        case ast.IfExp(test=test):
            yield from _negated(test)


def _changes_of_statement(node: ast.stmt) -> Iterator[Change]:
    match node:
        case ast.AugAssign(op=operator) if type(operator) in COMPUTED:
            yield lambda n: _with(n, op=COMPUTED[type(operator)]())
        case ast.If(test=test) | ast.While(test=test):
            yield from _negated(test)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete() | ast.Continue() | ast.Break():
            yield lambda n: None
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield lambda n: None
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield lambda n: _with(n, value=ast.Constant(None))


def _negated(test: ast.expr) -> Iterator[Change]:
    """A comparison and a `not` change by themselves."""
    if not isinstance(test, ast.Compare | ast.UnaryOp):
        yield lambda n: _with(n, test=ast.UnaryOp(ast.Not(), n.test))  # type: ignore[attr-defined]


def _with(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in (node.left, node.right)
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
