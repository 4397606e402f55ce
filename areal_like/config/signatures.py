"""The parameters of a function or class, read from its source. A module is imported only if its source is not enough.

This finds top-level definitions, also within `try` and `if`. It follows imports from other modules, aliases and
`functools.partial`. A name that the module makes in another way (a call, `import *`) is looked up by importing it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path

REQUIRED = inspect.Parameter.empty
"""The default of a knob that has none."""


class UnreadableError(ValueError):
    """No such function or class, or its parameters cannot be read."""


@dataclass(frozen=True)
class Knob:
    default: object
    annotation: ast.expr | None


@dataclass(frozen=True)
class Signature:
    knobs: dict[str, Knob]
    takes_any: bool
    """True where `**` accepts knobs that cannot be read from the source."""
    marks: frozenset[str] = frozenset()
    optional: dict[str, str] = field(default_factory=dict)
    """Parameters that have a default but are not keyword-only, so no knobs: name → `name=default`."""


_Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def signature(module: str, attribute: str) -> Signature:
    """The knobs of a function, or of a class's `__init__`, its own or the first inherited one that has source.

    A class whose `__init__` takes `**` passes on the knobs that it does not name: to the class that it calls with
    it, or else to its bases, whose knobs are added to its own. Raises UnreadableError.
    """
    definition, home = _definition(module, attribute)
    if definition is None:
        return _of_object(home, attribute)
    if isinstance(definition, ast.Call):
        return _of_partial(home, definition)
    if isinstance(definition, _Function):
        return _of_function(definition)
    init = next((node for node in definition.body if isinstance(node, _Function) and node.name == "__init__"), None)
    own = replace(_of_function(init) if init else Signature({}, takes_any=False), marks=_marks(home, definition))
    passed_on = (_called_with_rest(init) if init else []) or definition.bases
    if init and (not own.takes_any or not passed_on):
        return own
    bases = [_of_base(home, base) for base in passed_on]
    inherited: dict[str, Knob] = {}
    for base in reversed(bases):
        inherited |= base.knobs
    return Signature(inherited | own.knobs, any(base.takes_any for base in bases), own.marks, own.optional)


def docstring(module: str, attribute: str) -> str:
    """The docstring of a function or class. Raises UnreadableError."""
    definition, home = _definition(module, attribute)
    if isinstance(definition, _Function | ast.ClassDef):
        return ast.get_docstring(definition) or ""
    if isinstance(definition, ast.Call):
        return docstring(home, ast.unparse(definition.args[0]))
    return inspect.getdoc(_imported(f"{home}:{attribute}")) or ""


def _called_with_rest(init: _Function) -> list[ast.expr]:
    """The classes that `__init__` calls with its own `**`."""
    rest = init.args.kwarg.arg if init.args.kwarg else ""
    given = ast.keyword(arg=None, value=ast.Name(rest, ast.Load()))
    calls = [node for node in ast.walk(init) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [call.func for call in calls if ast.dump(given) in map(ast.dump, call.keywords)]


def _marks(module: str, definition: ast.ClassDef) -> frozenset[str]:
    """The attributes that a class or one of its bases sets to True."""
    found = [(ast.unparse(node.targets[0]), node.value) for node in definition.body if isinstance(node, ast.Assign)]
    own = frozenset(name for name, value in found if isinstance(value, ast.Constant) and value.value is True)
    inherited = frozenset[str]().union(*(_of_base(module, base).marks for base in definition.bases))
    return own | inherited - {name for name, _ in found}


def _of_base(module: str, base: ast.expr) -> Signature:
    if isinstance(base, ast.Subscript):  # Generic[T], Protocol[T]
        base = base.value
    if not isinstance(base, ast.Name):
        return Signature({}, takes_any=True)
    if base.id in ("object", "Protocol", "Generic", "ABC"):
        return Signature({}, takes_any=False)
    try:
        return signature(module, base.id)
    except UnreadableError:
        return Signature({}, takes_any=True)  # a base without Python source: its own code refuses wrong knobs


def _of_function(function: _Function) -> Signature:
    arguments = function.args
    found = {
        argument.arg: Knob(_default(default), argument.annotation)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    called = [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]
    names = frozenset(node.id for node in called if isinstance(node, ast.Name))
    usual = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) :] if arguments.defaults else []
    pairs = zip(usual, arguments.defaults, strict=True)
    optional = {each.arg: f"{each.arg}={ast.unparse(default)}" for each, default in pairs}
    return Signature(found, arguments.kwarg is not None, names, optional)


NUMBERS = {"math.inf": math.inf, "-math.inf": -math.inf}
"""Defaults that are numbers, but no literals."""


def _default(default: ast.expr | None) -> object:
    if default is None:
        return REQUIRED
    try:
        return ast.literal_eval(default)
    except ValueError:
        return NUMBERS.get(text := ast.unparse(default), text)


def _of_partial(module: str, call: ast.Call) -> Signature:
    """The signature of `functools.partial(function, knob=value)`: the function's knobs, some with another default."""
    function = signature(module, ast.unparse(call.args[0]))
    bound = {
        each.arg: replace(function.knobs[each.arg], default=_default(each.value))
        for each in call.keywords
        if each.arg in function.knobs
    }
    return replace(function, knobs=function.knobs | bound)


def _of_object(module: str, attribute: str) -> Signature:
    """The signature of something that exists only once its module is imported."""
    found = _imported(f"{module}:{attribute}")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return Signature({}, takes_any=True)
    knobs = {p.name: Knob(p.default, _annotation(p.annotation)) for p in parameters if p.kind is p.KEYWORD_ONLY}
    marks = inspect.getmembers(getattr(found, "func", found), lambda value: value is True)
    return Signature(knobs, any(p.kind is p.VAR_KEYWORD for p in parameters), frozenset(name for name, _ in marks))


def _annotation(given: object) -> ast.expr | None:
    text = given if isinstance(given, str) else inspect.formatannotation(given)
    try:
        return None if given is inspect.Parameter.empty else ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _imported(path: str) -> Callable[..., object]:
    """Import "module:name". Raises UnreadableError if it can't be called."""
    try:
        found: object = pkgutil.resolve_name(path)
    except Exception as error:
        raise UnreadableError(f"{path} is found in no source, and importing it fails: {error!r}") from error
    if not callable(found):
        raise UnreadableError(f"{path} is no function or class, but {found!r}")
    return found


def is_async(path: str) -> bool:
    """Is "module:name" an async function? Raises UnreadableError if there is no such name."""
    module, _, attribute = path.partition(":")
    try:
        definition, _ = _definition(module, attribute)
    except UnreadableError as unreadable:
        try:
            return inspect.iscoroutinefunction(_imported(path))  # "module:Class.method", or not written in Python
        except UnreadableError:
            raise unreadable from None
    if isinstance(definition, _Function) and not definition.decorator_list:
        return isinstance(definition, ast.AsyncFunctionDef)
    return not isinstance(definition, ast.ClassDef) and inspect.iscoroutinefunction(_imported(path))


def _definition(module: str, attribute: str) -> tuple[_Function | ast.ClassDef | ast.Call | None, str]:
    """The definition of `attribute` (of calls: only `functools.partial`), and the module that has it; None if only the
    imported module reveals it. Raises UnreadableError if there is no such name."""
    unclear = False
    for node in _statements(_source(module).body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if name == attribute:
                    return node, module
            case ast.ImportFrom(names=names):
                for alias in names:
                    if (alias.asname or alias.name) == attribute:
                        return _definition(_absolute(module, node), alias.name)
                    unclear |= alias.name == "*"
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == attribute:
                if isinstance(value, ast.Name) and value.id != attribute:
                    return _definition(module, value.id)
                unclear |= not isinstance(value, ast.Constant)
                if isinstance(value, ast.Call) and _is_partial(value):
                    return value, module
    if unclear:
        return None, module
    raise UnreadableError(f"{module}:{attribute}: the module defines no function or class {attribute!r}")


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a module's top level, and within its `try`, `if` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.Try | ast.ExceptHandler | ast.If | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()))


def _is_partial(call: ast.Call) -> bool:
    named = bool(call.args) and isinstance(call.args[0], ast.Name) and all(each.arg for each in call.keywords)
    return named and ast.unparse(call.func) in ("partial", "functools.partial")


def _absolute(module: str, node: ast.ImportFrom) -> str:
    return importlib.util.resolve_name("." * node.level + (node.module or ""), _find(module).parent)


def _find(module: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(module)  # imports the parent packages, which are empty here
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UnreadableError(f"module {module!r} cannot be found (as Python source) from here")
    return spec


@functools.cache
def _source(module: str) -> ast.Module:
    spec = _find(module)
    assert spec.origin is not None
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"), spec.origin)
    except SyntaxError as error:
        raise UnreadableError(f"module {module!r}: {error}") from None
