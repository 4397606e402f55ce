"""Small faults put into source: each `Mutant` is a module with one changed node. Knows nothing of tests.

Comparisons are turned round or moved by one, operators and `and`/`or` exchanged, conditions negated, whole numbers
raised by one, True and False swapped, statements left out, `min`/`max` and `any`/`all` exchanged. Docstrings, texts,
annotations, log lines and error messages stay: no test should notice them. So do assertions, `strict` of a `zip`, which
is one, and constants that only tune (`TUNING`).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
TUNING: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "buffer/checks.py": {
            "MOST_REDRAWN": "a limit of what a peer may say, far above what actors do",
            "MOST_CHARACTERS": "the same",
        },
        "buffer/controller.py": {
            "MESSAGES_PER_TURN": "one more message before the next decision",
        },
        "buffer/handlers.py": {
            "KEPT_DIGESTS": "memory: one version more is remembered",
            "LONGEST_REASON": "characters of a reason that people read",
        },
        "buffer/untrained_samples.py": {"MOST_REASONS": "memory: one reason more"},
        "buffer/round_model.py": {"LEAST_ROUNDS": "how exactly a round's seconds are estimated"},
        "buffer/injection.py": {"_STREAM": "any number that no other stream of random numbers has"},
        "buffer/journal.py": {"COPY_BYTES": "how much one rotation copies: the next one goes on"},
        "buffer/outbox.py": {"MOST_ACKNOWLEDGEMENTS": "memory: one message more"},
        "buffer/segment_file.py": {
            "_FORGET_BYTES": "how often the page cache is emptied",
            "_MAX_PIECES": "pieces per call of the system",
            "_ROOM_BYTES": "bytes per call of the system",
            "_READ_BYTES": "bytes per call of the system",
            "MAX_FIELDS_BYTES": "a limit that no test can reach: 1 GB",
            "MAX_PAYLOAD_BYTES": "a limit that no test can reach: 4 GB",
        },
        "buffer/store.py": {"SLACK": "when a heap is made anew; its order is the same"},
        "areal_like/weights/codec.py": {
            "_SAMPLES": "how many elements are looked at before a coding is tried",
            "_SAMPLE": "the same",
            "_SLACK": "spare room",
        },
        "areal_like/weights/compiled.py": {"COMPILED_FROM": "from which size on numba is loaded; both give the same"},
        "areal_like/weights/delta.py": {"OVERHEAD": "spare room of an upper limit"},
        "areal_like/weights/digest.py": {"_STRIDE": "words at once"},
        "areal_like/weights/history.py": {
            "MOST_HOPS": "how many deltas one request may need",
            "BESIDE_FROM": "from which size on a merge has a thread of its own",
            "HEADS": "how much longer than whole weights a delta may be",
        },
        "areal_like/weights/kernels.py": {"_AHEAD": "how far the processor fetches ahead", "_TILE": "elements at once"},
        "areal_like/weights/planes.py": {
            "_PARAMETERS": "how hard zstd tries",
            "_WORTH_IT": "from which size on zstd tries at all",
            "_WINDOW": "memory that a sender may make us take",
        },
        "areal_like/weights/server.py": {
            "MAX_CHUNK_BYTES": "bytes of one answer",
            "MAX_FRAME_BYTES": "bytes of one request",
            "UNSENT_CHUNKS": "answers that may wait",
            "MOST_WAITING": "memory: one subscriber more",
        },
    }
)
"""Constants that are no part of a promise: file → name → what it tunes."""
Change = Callable[[ast.AST], ast.AST | None]


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str
    line: int
    what: str
    source: str
    """The source of the whole module."""
    is_default: bool = False
    """Of a keyword-only parameter."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.what}"


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """All of a module, from top to bottom."""
    tree = ast.parse(source)
    tuning, defaults = _tuning_lines(path, tree), _default_lines(tree)
    for number, (parent, field, at) in enumerate(_places(tree)):
        if getattr(_at(parent, field, at), "lineno", 0) in tuning:
            continue
        for change in _changes(_at(parent, field, at)):
            changed = copy.deepcopy(tree)
            place = _nth(changed, number)
            before = _at(*place)
            after = change(copy.deepcopy(before))
            _put(*place, ast.Pass() if after is None else after)
            text = ast.unparse(ast.fix_missing_locations(changed))
            shown = "left out" if after is None else ast.unparse(after)
            line = getattr(before, "lineno", 0)
            yield Mutant(path, line, f"{_short(ast.unparse(before))} -> {_short(shown)}", text, line in defaults)


def _tuning_lines(path: str, tree: ast.Module) -> set[int]:
    """Where the constants of `TUNING` are set."""
    names = TUNING.get(path, {}).keys()
    sets = (node for node in tree.body if isinstance(node, ast.Assign))
    return {each.lineno for each in sets if names & {n.id for n in ast.walk(each) if isinstance(n, ast.Name)}}


def _default_lines(tree: ast.Module) -> set[int]:
    """Where keyword-only parameters have their defaults."""
    signatures = (node for node in ast.walk(tree) if isinstance(node, ast.arguments))
    return {default.lineno for each in signatures for default in each.kw_defaults if default}


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
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and not node.orelse:
        return all(isinstance(each, ast.Expr) and _tells_people(each) for each in node.body)
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
