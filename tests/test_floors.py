"""The floors of the house, read from every module's source: who may import whom, where the mode may be named, sizes.

Each rule is a function from source to findings; each is shown to find what it looks for before the repository is held
against it.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("actors", "buffer", "learners")
ALL = ("areal_like", *ROOMS, "scripts", "tests")
FORBIDDEN = {
    "areal_like": {*ROOMS, "scripts", "tests"},
    **{room: {*ROOMS, "scripts", "tests"} - {room} for room in ROOMS},
    "scripts": {"tests"},
}
HEAVY = {"torch", "transformers", "sglang", "ray", "numba"}
LIGHT = ("types", "config/run_config", "config/layers", "config/registry", "wire/frames", "wire/bus")
BAD_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

MAY_NAME_THE_MODE = ("areal_like/config/run_config.py", "buffer/schedulers.py", "scripts/", "tests/")

TYPED = ("areal_like/", "buffer/")
MOST_ANY = 47
"""How often `Any` may stand in the code of the typed rooms, imports included."""

LONGEST_FUNCTION = 60
LONG_FUNCTIONS: dict[str, str] = {}
"""`path:function` → why it stays long."""


def modules() -> list[str]:
    """Paths of the repository's Python files; in a checkout, those that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        return sorted(path for path in listed.stdout.split() if (ROOT / path).is_file())
    return sorted(path.relative_to(ROOT).as_posix() for room in ALL for path in (ROOT / room).rglob("*.py"))


MODULES = modules()


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


# Imports

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def imports(tree: ast.AST, package: str, inside_functions: bool = True) -> Iterator[str]:
    """Imported dotted names: `a.b` and, for `from a import b`, both `a` and `a.b`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.expr) or (not inside_functions and isinstance(node, _FUNCTIONS)):
            continue
        else:
            yield from imports(node, package, inside_functions)


@functools.cache
def imports_of(path: str, inside_functions: bool = True) -> set[str]:
    return set(imports(tree_of(path), ".".join(Path(path).parts[:-1]), inside_functions))


def rooms_of(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of two or more nodes that lead to each other, each sorted (Tarjan's strongly connected components)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(here: str) -> None:
        numbers[here] = lowest[here] = len(numbers)
        path.append(here)
        for there in sorted(arrows[here]):
            if there not in numbers:
                visit(there)
            if there in path:
                lowest[here] = min(lowest[here], lowest[there])
        if lowest[here] == numbers[here]:
            at = path.index(here)
            if len(path) - at > 1:
                found.append(sorted(path[at:]))
            del path[at:]

    for start in arrows:
        if start not in numbers:
            visit(start)
    return found


def arrows() -> dict[str, set[str]]:
    """Each file → the files that it imports anywhere, in functions and under TYPE_CHECKING too."""
    files = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in MODULES}
    return {path: {files[name] for name in imports_of(path) if name in files} - {path} for path in MODULES}


def loaded_with(path: str) -> dict[str, list[str]]:
    """Files of the repository that are loaded when `path` is imported → the chain of imports that leads there."""
    chains = {path: [path]}
    queue = [path]
    while queue:
        here = queue.pop()
        for name in imports_of(here, inside_functions=False):
            stem = name.replace(".", "/")
            for target in (f"{stem}.py", f"{stem}/__init__.py"):
                if target in MODULES and target not in chains:
                    chains[target] = [*chains[here], target]
                    queue.append(target)
    return chains


def test_the_reader_of_imports_sees_them_all() -> None:
    source = """
import a.b
from c import d as e
from . import f
from ..g import h
def function():
    import torch
class Class:
    import i
"""
    tree = ast.parse(source)
    everywhere = {"a.b", "c", "c.d", "room.inner", "room.inner.f", "room.g", "room.g.h", "torch", "i"}
    assert set(imports(tree, "room.inner")) == everywhere
    assert set(imports(tree, "room.inner", inside_functions=False)) == everywhere - {"torch"}


def test_every_room_is_read() -> None:
    assert {path.partition("/")[0] for path in MODULES} >= set(ALL)


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_import_runs_sideways_or_up(room: str) -> None:
    paths = [path for path in MODULES if path.startswith(f"{room}/")]
    found = {path: bad for path in paths if (bad := rooms_of(imports_of(path)) & FORBIDDEN[room])}
    assert not found, f"{room} must not import these: {found}"


def by_name(tree: ast.Module, room: str) -> list[int]:
    """Lines that import `room` by its name, wherever they stand."""
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        found += [node.lineno for name in names if name.partition(".")[0] == room]
    return found


def test_commands_do_not_import_one_another_by_name() -> None:
    """`scripts` is on the path in a clone's folder only; installed, it has another name."""
    source = "import scripts.a\ndef f():\n    from scripts import b\nfrom . import c\nfrom .scripts import d\n"
    assert by_name(ast.parse(source), "scripts") == [1, 3]
    found = {path: by_name(tree_of(path), "scripts") for path in MODULES if path.startswith("scripts/")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def light_modules() -> list[str]:
    named = {f"areal_like/{name}.py" for name in LIGHT}
    return [path for path in MODULES if path in named or path.startswith("buffer/")]


def test_light_modules_never_import_heavy_libraries() -> None:
    found = {path: bad for path in light_modules() if (bad := rooms_of(imports_of(path)) & HEAVY)}
    assert not found, f"these must answer without {', '.join(sorted(HEAVY))}: {found}"


def test_light_modules_load_no_module_that_imports_heavy_libraries() -> None:
    found = [
        " -> ".join(chain)
        for path in light_modules()
        for target, chain in loaded_with(path).items()
        if rooms_of(imports_of(target, inside_functions=False)) & HEAVY
    ]
    assert not found, f"heavy imports by a chain: {found}"


def test_a_circle_is_found_however_it_is_closed() -> None:
    straight = {"a": {"b", "c"}, "b": {"c"}, "c": set[str](), "d": {"a"}}
    assert circles(straight) == []
    assert circles({**straight, "c": {"d"}}) == [["a", "b", "c", "d"]]
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}) == [["a", "b"], ["c", "d"]]
    hidden = ast.parse("if TYPE_CHECKING:\n    from room.x import y\ndef f():\n    import room.z")
    assert {"room.x", "room.z"} <= set(imports(hidden, "room"))


def test_no_imports_run_in_a_circle() -> None:
    """Across rooms too. Imports that only a type checker reads count: nobody can read such files one by one."""
    found = circles(arrows())
    assert not found, f"move what both sides need into a file of its own: {found}"


# Names


def test_no_file_is_named_for_nothing() -> None:
    assert not [path for path in MODULES if Path(path).stem in BAD_NAMES], "put it beside its user, or name it"


# The mode


def mode_findings(tree: ast.AST) -> list[int]:
    """Lines that read a config's mode, or compare with the name of a mode."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="mode", value=owner) if ast.unparse(owner).lower().endswith(("config", "cfg")):
                lines.append(node.lineno)
            case ast.Subscript(slice=ast.Constant(value="mode")):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr="get" | "pop" | "select"), args=[*_, ast.Constant(value="mode")]):
                lines.append(node.lineno)
            case ast.Compare(left=left, comparators=right) if any(map(_names_a_mode, [left, *right])):
                lines.append(node.lineno)
            case ast.MatchValue(value=value) if _names_a_mode(value):
                lines.append(node.lineno)
    return sorted(set(lines))


def _names_a_mode(node: ast.expr) -> bool:
    inner = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return any(isinstance(item, ast.Constant) and item.value in ("sync", "async") for item in inner)


@pytest.mark.parametrize(
    "line",
    [
        'if mode == "sync": pass',
        'if x in ("sync", "async"): pass',
        'if config.scheduler.name != "async": pass',
        "self.config.mode",
        'config["mode"]',
        'config.get("mode")',
        'OmegaConf.select(config, "mode")',
        'match x:\n    case "sync": pass',
    ],
)
def test_naming_the_mode_is_found(line: str) -> None:
    assert mode_findings(ast.parse(line))


@pytest.mark.parametrize("line", ['{"mode": 1}', 'open("x", mode="w")', "engine.mode", 'COMPONENTS = {"sync": 1}'])
def test_other_uses_of_the_word_are_not(line: str) -> None:
    assert not mode_findings(ast.parse(line))


def test_the_mode_is_named_in_configs_and_schedulers_only() -> None:
    asked = [path for path in MODULES if not path.startswith(MAY_NAME_THE_MODE)]
    found = {path: lines for path in asked if (lines := mode_findings(tree_of(path)))}
    assert not found, f"sync is a scheduler and a bound of 0; no other code asks for the mode: {found}"


# Types


def anys(tree: ast.AST) -> int:
    """How often the type `Any` is imported or named."""
    return sum(
        isinstance(node, ast.alias | ast.Name | ast.Attribute)
        and "Any" in (getattr(node, "name", ""), getattr(node, "id", ""), getattr(node, "attr", ""))
        for node in ast.walk(tree)
    )


def test_any_is_counted_wherever_it_is_said() -> None:
    assert anys(ast.parse("from typing import Any, cast\ndef f(x: Any, *y: typing.Any) -> dict[str, Any]: ...")) == 4
    assert not anys(ast.parse('"""Any thread."""\nanything = AnyStr'))


def test_types_are_said() -> None:
    found = {path: n for path in MODULES if path.startswith(TYPED) and (n := anys(tree_of(path)))}
    assert sum(found.values()) <= MOST_ANY, f"name the type, or object where any will do: {found}"


# Sizes


def long_functions(tree: ast.AST) -> dict[str, int]:
    """Name → lines. A signature does not count: that of a component is its list of knobs."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.body[0].lineno + 1 for node in functions}
    return {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}


def test_a_long_function_is_found() -> None:
    body = "    x = 1\n"
    assert long_functions(ast.parse("def f():\n" + body * (LONGEST_FUNCTION + 1))) == {"f": LONGEST_FUNCTION + 1}
    assert not long_functions(ast.parse("def f(\n    x,\n    y,\n):\n" + body * LONGEST_FUNCTION))


def test_functions_are_short_or_excused() -> None:
    long = {f"{path}:{name}": lines for path in MODULES for name, lines in long_functions(tree_of(path)).items()}
    assert not {name: lines for name, lines in long.items() if name not in LONG_FUNCTIONS}
    assert set(LONG_FUNCTIONS) <= set(long), "an excuse that is no longer needed"
