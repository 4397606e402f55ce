"""The floors of the house, read from every module's source: who may import whom, and where the mode may be named."""

import ast
import functools
import graphlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("actors", "buffer", "learners")
FORBIDDEN = {
    "areal_like": {*ROOMS, "scripts", "tests"},
    **{room: {*ROOMS, "scripts", "tests"} - {room} for room in ROOMS},
    "scripts": {"tests"},
}
HEAVY = {"torch", "transformers", "sglang", "ray", "numba"}
LIGHT = ("types", "config/run_config", "config/layers", "config/registry", "wire/frames", "wire/bus")
MAY_NAME_THE_MODE = ("areal_like/config/run_config.py", "buffer/schedulers.py", "scripts/", "tests/")
MODULES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
    cwd=ROOT, capture_output=True, text=True, check=True,
).stdout.split()  # fmt: skip
MODULES = sorted(path for path in MODULES if (ROOT / path).is_file())
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


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


def files_of(path: str, inside_functions: bool) -> set[str]:
    """The repository's files that a file imports."""
    stems = [name.replace(".", "/") for name in imports_of(path, inside_functions)]
    return {file for stem in stems for file in (f"{stem}.py", f"{stem}/__init__.py")} & set(MODULES) - {path}


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


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_import_runs_sideways_or_up(room: str) -> None:
    paths = [path for path in MODULES if path.startswith(f"{room}/")]
    found = {path: bad for path in paths if (bad := rooms_of(imports_of(path)) & FORBIDDEN[room])}
    assert paths and not found, f"{room} must not import these: {found}"


def test_commands_do_not_import_one_another_by_name() -> None:
    """`scripts` is on the path in a clone's folder only; installed, it has another name."""
    commands = [path for path in MODULES if path.startswith("scripts/")]
    by_name = re.compile(r"^ *(from|import) scripts\b", re.MULTILINE)
    assert commands and not [path for path in commands if by_name.search((ROOT / path).read_text(encoding="utf-8"))]


def test_light_modules_load_no_heavy_library() -> None:
    """Neither directly, in a function too, nor by a chain of modules."""
    for path in MODULES:
        if path not in {f"areal_like/{name}.py" for name in LIGHT} and not path.startswith("buffer/"):
            continue
        assert not rooms_of(imports_of(path)) & HEAVY, path
        chains, queue = {path: path}, [path]
        while queue:
            here = queue.pop()
            assert not rooms_of(imports_of(here, inside_functions=False)) & HEAVY, chains[here]
            new = files_of(here, inside_functions=False) - chains.keys()
            chains |= {file: f"{chains[here]} -> {file}" for file in new}
            queue += new


def test_no_imports_run_in_a_circle() -> None:
    """Across rooms too. Imports that only a type checker reads count: nobody can read such files one by one."""
    sorter = graphlib.TopologicalSorter({path: files_of(path, inside_functions=True) for path in MODULES})
    sorter.prepare()  # raises CycleError, with the circle: move what both sides need into a file of its own


MODE = re.compile(
    r"""(config|cfg)\.mode\b | \["mode"\] | \.(get|pop|select)\([^()]*"mode"\)
    | (==|!=|\bin\b|\bcase\b)[ ([{]*"a?sync" | "a?sync"\ *(==|!=)""",
    re.VERBOSE,
)
"""Reads a config's mode, or compares with the name of a mode."""


def test_the_mode_is_named_in_configs_and_schedulers_only() -> None:
    bad = ['if x in ("sync", "async"): pass', "self.config.mode", 'config["mode"]', 'config.get("mode")']
    bad += ['match x:\n    case "sync": pass', 'if config.scheduler.name != "async": pass']
    assert all(map(MODE.search, bad))
    assert not MODE.search('{"mode": 1}\nopen("x", mode="w")\nengine.mode\nCOMPONENTS = {"sync": 1}')
    asked = [path for path in MODULES if not path.startswith(MAY_NAME_THE_MODE)]
    found = [path for path in asked if MODE.search((ROOT / path).read_text(encoding="utf-8"))]
    assert not found, f"sync is a scheduler and a bound of 0; no other code asks for the mode: {found}"


def test_text_has_an_encoding_where_it_is_read_or_written() -> None:
    """A locale must not choose it."""
    nodes = [node for path in MODULES if path.partition("/")[0] != "tests" for node in ast.walk(tree_of(path))]
    for node in nodes:
        name = called(node)
        if name.endswith(("open", "_text")) and not any(each.arg == "encoding" for each in node.keywords):
            text = ast.unparse(node)
            assert name != "write_text" and (name != "read_text" or node.args), text
            assert not re.search(r"open\((.*, )?'[wra]t?\+?'[,)]|^open\(\w+\)$", text), text


def called(node: ast.AST) -> str:
    """The last name of a called function; empty for another node."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))
