"""The parameters of a function or class, read from its source: nothing is imported. It follows imports from other
modules, aliases and `functools.partial`, but no other call, and no `import *`."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
    docstring: str = ""


_Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def signature(target: str) -> Signature:
    """The knobs of "module:name": of a function, or of a class's `__init__`, its own or the first inherited one.

    A class whose `__init__` takes `**` passes on the knobs that it does not name: to the class that it calls with
    it, or else to its bases, whose knobs are added to its own. Raises UnreadableError.
    """
    definition, home = _definition(target)
    if isinstance(definition, ast.Call):
        return _of_partial(home, definition)
    if isinstance(definition, _Function):
        return _of_function(definition)
    init = next((node for node in definition.body if isinstance(node, _Function) and node.name == "__init__"), None)
    own = _of_function(init) if init else Signature({}, takes_any=False)
    own = replace(own, marks=_marks(home, definition), docstring=ast.get_docstring(definition) or "")
    passed_on = (_called_with_rest(init) if init else []) or definition.bases
    if init and (not own.takes_any or not passed_on):
        return own
    bases = [_of_base(home, base) for base in passed_on]
    inherited = {knob: known for base in reversed(bases) for knob, known in base.knobs.items()}
    text = "\n\n".join(filter(None, [own.docstring, *(base.docstring for base in bases if base.knobs)]))
    return replace(own, knobs=inherited | own.knobs, takes_any=any(base.takes_any for base in bases), docstring=text)


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
    name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
    if name in ("object", "Protocol", "Generic", "ABC"):
        return Signature({}, takes_any=False)
    try:
        return signature(f"{module}:{name}")
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
    return Signature(found, arguments.kwarg is not None, names, ast.get_docstring(function) or "")


def _default(default: ast.expr | None) -> object:
    if default is None:
        return REQUIRED
    try:
        return ast.literal_eval(default)
    except ValueError:
        text = ast.unparse(default)
        return {"math.inf": math.inf, "-math.inf": -math.inf}.get(text, text)


def _of_partial(module: str, call: ast.Call) -> Signature:
    function = signature(f"{module}:{ast.unparse(call.args[0])}")
    bound = {each.arg: _default(each.value) for each in call.keywords}
    knobs = {name: Knob(bound.get(name, known.default), known.annotation) for name, known in function.knobs.items()}
    return replace(function, knobs=knobs)


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
    """Raises UnreadableError if there is no such name."""
    with contextlib.suppress(UnreadableError):  # "module:Class.method", or not written in Python
        definition, _ = _definition(path)
        if isinstance(definition, _Function) and not definition.decorator_list:
            return isinstance(definition, ast.AsyncFunctionDef)
    return inspect.iscoroutinefunction(_imported(path))


def reads_first(path: str) -> bool:
    """Does the function "module:name" read its first parameter? True where the source does not show that."""
    with contextlib.suppress(UnreadableError):
        definition, _ = _definition(path)
        if isinstance(definition, _Function) and (named := definition.args.posonlyargs + definition.args.args):
            names = (node for node in ast.walk(definition) if isinstance(node, ast.Name))
            return any(node.id == named[0].arg and isinstance(node.ctx, ast.Load) for node in names)
    return True


def _definition(target: str) -> tuple[_Function | ast.ClassDef | ast.Call, str]:
    """The definition (or `functools.partial`) of "module:name", and the module that has it. Raises UnreadableError."""
    module, _, attribute = target.partition(":")
    for node in _statements(_source(module).body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if name == attribute:
                    return node, module
            case ast.ImportFrom(names=names):
                for alias in names:
                    if (alias.asname or alias.name) == attribute:
                        parent = _find(module).parent
                        home = importlib.util.resolve_name("." * node.level + (node.module or ""), parent)
                        return _definition(f"{home}:{alias.name}")
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == attribute:
                if isinstance(value, ast.Name) and value.id != attribute:
                    return _definition(f"{module}:{value.id}")
                if isinstance(value, ast.Call) and _is_partial(value):
                    return value, module
    what = "function or class (or functools.partial of one)"
    raise UnreadableError(f"{target}: the module's source defines no {what} {attribute!r}")


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Of a module's top level, and within its `try`, `if` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.Try | ast.ExceptHandler | ast.If | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()))


def _is_partial(call: ast.Call) -> bool:
    named = bool(call.args) and isinstance(call.args[0], ast.Name) and all(each.arg for each in call.keywords)
    return named and ast.unparse(call.func) in ("partial", "functools.partial")


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
    path = Path(str(_find(module).origin))
    try:
        return ast.parse(path.read_text(encoding="utf-8"), path)
    except SyntaxError as error:
        raise UnreadableError(f"module {module!r}: {error}") from None
