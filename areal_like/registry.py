"""Every component that a config can name, and the knobs that each one takes.

A component is a function or a class; a *spec* such as `{name: ppo, clip: 0.2}` names one and sets its knobs, which are
its keyword-only parameters. What there is stands in one dict of strings, so nothing is imported until it is used:
`check` and `knobs` read a component's source with `ast`, so that a config is refused in milliseconds, before torch.
`module:Name` is accepted wherever a name is, so that a user's own component needs no entry here.

To add a component: write it, add one line to `COMPONENTS`, and a yaml under `configs/` if it deserves a short name.
Drivers: `areal_like.config` calls `check`; the processes call `build`, `bind` and `resolve`.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from areal_like.annotations import misfit
from areal_like.errors import UserError

COMPONENTS: dict[str, dict[str, str]] = {
    "task": {
        "copy": "areal_like.tasks.copying:Copy",
        "reverse": "areal_like.tasks.copying:Reverse",
        "arithmetic": "areal_like.tasks.arithmetic:Arithmetic",
        "calculator": "areal_like.tasks.calculator:Calculator",
        "jsonl": "areal_like.tasks.jsonl:Jsonl",
        "code": "areal_like.tasks.code:Code",
    },
    "model": {
        "qwen2": "areal_like.models:qwen2",
        "folder": "areal_like.models:folder",
    },
    "engine": {
        "torch": "actors.engines.torch_engine:TorchEngine",
        "timed": "actors.engines.timed_engine:TimedEngine",
        "sglang": "actors.engines.sglang_engine:SglangEngine",
    },
    "workflow": {
        "single_turn": "actors.workflows:single_turn",
        "best_of_n": "actors.workflows:best_of_n",
        "multi_turn": "actors.workflows:multi_turn",
        "agent": "actors.agents.workflow:agent",
    },
    "environment": {
        "tools": "actors.tools:Tools",
        "desk": "areal_like.tasks.calculator:Desk",
    },
    "scheduler": {
        "async": "buffer.schedulers:AsyncScheduler",
        "sync": "buffer.schedulers:SyncScheduler",
    },
    "sizing": {
        "fixed": "buffer.sizing:Fixed",
        "sagc": "buffer.sizing:Sagc",
    },
    "policy": {
        "in_order": "buffer.policies:in_order",
        "fifo": "buffer.policies:fifo",
        "windowed": "buffer.policies:windowed",
        "priority": "buffer.policies:priority",
    },
    "filter": {
        "none": "buffer.filters:none",
        "zero_variance": "buffer.filters:zero_variance",
    },
    "loss": {
        "ppo": "learners.losses.clipped:ppo",
        "decoupled_ppo": "learners.losses.clipped:decoupled_ppo",
        "icepop": "learners.losses.clipped:icepop",
        "gspo": "learners.losses.clipped:gspo",
        "reinforce": "learners.losses.weighted:reinforce",
        "is_pg": "learners.losses.weighted:is_pg",
        "tis": "learners.losses.weighted:tis",
        "cispo": "learners.losses.weighted:cispo",
        "vtrace": "learners.losses.weighted:vtrace",
        "m2po": "learners.losses.trusted:m2po",
        "dppo": "learners.losses.trusted:dppo",
        "dg": "learners.losses.delightful:dg",
        "dg_kondo": "learners.losses.delightful:dg_kondo",
        "pmpo": "learners.losses.targets:pmpo",
        "tpo": "learners.losses.targets:tpo",
    },
    "advantage": {
        "group": "learners.advantages:group",
        "rloo": "learners.advantages:rloo",
        "maxrl": "learners.advantages:maxrl",
        "batch": "learners.advantages:batch",
        "reinforce_pp": "learners.advantages:reinforce_pp",
        "turn": "learners.advantages:turn",
        "gae": "learners.advantages:gae",
    },
    "learner": {
        "torch": "learners.learner:TorchLearner",
        "timed": "learners.timed:TimedLearner",
    },
    "launcher": {
        "local": "areal_like.launch.local:LocalLauncher",
        "slurm": "areal_like.launch.slurm:SlurmLauncher",
        "ray": "areal_like.launch.ray:RayLauncher",
    },
}

PARTS = {"learner.lora": "learners.adapters:Adapters"}
"""Knobs that are knobs of something else in turn: dotted path → whose."""

REQUIRED = inspect.Parameter.empty
"""The default of a knob that has none."""


class ConfigError(UserError):
    """A config that cannot be run: what is wrong, where, and what to do. `key` is the dotted path at fault."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


# Using components


def resolve(kind: str, name: str) -> Any:
    """Import the component `name` of `kind`. Raises ConfigError where there is no such name, module or attribute."""
    module, attribute = _target(kind, name)
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the component's own import failed: that is not about its name
        raise ConfigError(f"{kind}.name: {name!r} needs the module {module!r}, which cannot be found", kind) from None
    except AttributeError:
        raise ConfigError(f"{kind}.name: module {module!r} has no {attribute!r}", kind) from None


def build(kind: str, spec: Mapping[str, Any], *args: Any) -> Any:
    """Call the component of `spec` with `args` and the spec's knobs: makes an object, or a function's result. Raises
    ConfigError, also where the component refuses the value of a knob (by ValueError)."""
    component = bind(kind, spec)
    try:
        return component(*args)
    except UserError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), kind) from error


def bind(kind: str, spec: Mapping[str, Any]) -> functools.partial[Any]:
    """The component of `spec` with its knobs bound, to be called later (losses, workflows, policies)."""
    plain = _plain(spec)
    check(kind, plain)
    name = plain.pop("name")
    return functools.partial(resolve(kind, name), **plain)


def _plain(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec as plain containers, so that components need not know OmegaConf."""
    return cast(dict[str, Any], OmegaConf.to_container(spec)) if isinstance(spec, DictConfig) else dict(spec)


# Checking specs


def check(kind: str, spec: Mapping[str, Any]) -> None:
    """Hold a spec against its component's keyword-only parameters, without importing the component's module.

    Raises ConfigError for an unknown name, an unknown knob, a missing knob that has no default, and a value that the
    knob's annotation rules out (`areal_like.annotations`).
    """
    name = spec.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{kind}.name: {name!r} is not the name of a component: {_list(COMPONENTS[kind])}", kind)
    _hold_against(_signature_of(kind, name), kind, name, {knob: v for knob, v in spec.items() if knob != "name"})


def check_part(path: str, values: Mapping[str, Any]) -> None:
    """Hold the knobs at a path of `PARTS` against their owner's. Raises ConfigError."""
    module, _, attribute = PARTS[path].partition(":")
    _hold_against(_signature(module, attribute), path, path.rpartition(".")[2], values)


def marks(kind: str, name: str) -> frozenset[str]:
    """What a component is marked with: a function by its decorators, a class by what it sets to True."""
    return _signature_of(kind, name).marks


def _hold_against(found: _Signature, prefix: str, name: str, values: Mapping[str, Any]) -> None:
    for knob, value in values.items():
        path = f"{prefix}.{knob}"
        if knob not in found.knobs:
            if not found.takes_any:
                raise ConfigError(_unknown_knob(path, knob, name, found.knobs), path)
        elif problem := misfit(value, found.knobs[knob].annotation):
            raise ConfigError(f"{path}: {problem}", path)
        elif knob in COMPONENTS:
            _check_inner(path, knob, value)
    missing = [knob for knob, known in found.knobs.items() if known.default is REQUIRED and knob not in values]
    if missing:
        path = f"{prefix}.{missing[0]}"
        raise ConfigError(f"{path}: {name!r} needs it and has no default; set it with {path}=VALUE", path)


def _check_inner(path: str, kind: str, spec: Any) -> None:
    """A knob named like a kind of component takes a spec of that kind."""
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{path}: expected {{name: ..., knobs}}, got {spec!r}", path)
    try:
        check(kind, spec)
    except ConfigError as error:
        raise ConfigError(f"{path.removesuffix(kind)}{error}", path) from None


def knobs(kind: str, name: str) -> dict[str, Any]:
    """Knob → default of a component (`REQUIRED` where there is none; source text where it is no literal)."""
    return {knob: known.default for knob, known in _signature_of(kind, name).knobs.items()}


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _unknown_knob(path: str, knob: str, name: str, known: Iterable[str]) -> str:
    return f"{path}: {name!r} has no knob {knob!r}.{nearest(knob, known)} Its knobs: {_list(known)}"


def _list(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"


def _target(kind: str, name: str) -> tuple[str, str]:
    """(module, attribute) of a component's name."""
    if kind not in COMPONENTS:
        raise ConfigError(f"{kind}: there is no such kind of component.{nearest(kind, COMPONENTS)}", kind)
    target = COMPONENTS[kind].get(name, name)
    module, colon, attribute = target.partition(":")
    if not (colon and module and attribute):
        known = COMPONENTS[kind]
        hint = f"{nearest(name, known)} There are {_list(known)}; or name your own as module:Name"
        raise ConfigError(f"{kind}.name: there is no {kind} {name!r}.{hint}", f"{kind}.name")
    return module, attribute


# Reading signatures from source


@dataclass(frozen=True)
class _Knob:
    default: Any
    annotation: ast.expr | None


@dataclass(frozen=True)
class _Signature:
    knobs: dict[str, _Knob]
    takes_any: bool
    """True where `**` accepts knobs that cannot be read from the source."""
    marks: frozenset[str] = frozenset()


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _signature_of(kind: str, name: str) -> _Signature:
    module, attribute = _target(kind, name)
    try:
        return _signature(module, attribute)
    except ConfigError as error:
        raise ConfigError(f"{kind}.name: {name!r} cannot be read: {error}", f"{kind}.name") from None


@functools.cache
def _signature(module: str, attribute: str) -> _Signature:
    """The knobs of a function, or of a class's `__init__`, its own or the first inherited one that has source.

    A class whose `__init__` takes `**` passes on what it does not name: its bases' knobs are added to its own.
    """
    definition, home = _definition(module, attribute)
    if isinstance(definition, _Function):
        return _of_function(definition)
    init = next((node for node in definition.body if isinstance(node, _Function) and node.name == "__init__"), None)
    own = replace(_of_function(init) if init else _Signature({}, takes_any=False), marks=_set_to_true(definition))
    if init and (not own.takes_any or not definition.bases):
        return own
    bases = [_of_base(home, base) for base in definition.bases]
    inherited: dict[str, _Knob] = {}
    for base in reversed(bases):
        inherited |= base.knobs
    return _Signature(inherited | own.knobs, any(base.takes_any for base in bases), own.marks)


def _set_to_true(definition: ast.ClassDef) -> frozenset[str]:
    found = [(ast.unparse(node.targets[0]), node.value) for node in definition.body if isinstance(node, ast.Assign)]
    return frozenset(name for name, value in found if isinstance(value, ast.Constant) and value.value is True)


def _of_base(module: str, base: ast.expr) -> _Signature:
    if isinstance(base, ast.Subscript):  # Generic[T], Protocol[T]
        base = base.value
    if not isinstance(base, ast.Name):
        return _Signature({}, takes_any=True)
    if base.id in ("object", "Protocol", "Generic", "ABC"):
        return _Signature({}, takes_any=False)
    try:
        return _signature(module, base.id)
    except ConfigError:
        return _Signature({}, takes_any=True)  # a base without Python source: its own code refuses wrong knobs


def _of_function(function: _Function) -> _Signature:
    arguments = function.args
    found = {
        argument.arg: _Knob(_default(default), argument.annotation)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    called = [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]
    names = frozenset(node.id for node in called if isinstance(node, ast.Name))
    return _Signature(found, takes_any=arguments.kwarg is not None, marks=names)


def _default(default: ast.expr | None) -> Any:
    if default is None:
        return REQUIRED
    try:
        return ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)


def _definition(module: str, attribute: str) -> tuple[_Function | ast.ClassDef, str]:
    """The statement that defines `attribute`, and the module where it stands; `from x import y` is followed."""
    for node in _source(module).body:
        if isinstance(node, _Function | ast.ClassDef) and node.name == attribute:
            return node, module
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == attribute:
                    return _definition(_absolute(module, node), alias.name)
    raise ConfigError(f"{module}:{attribute}: the module defines no function or class {attribute!r}")


def _absolute(module: str, node: ast.ImportFrom) -> str:
    return importlib.util.resolve_name("." * node.level + (node.module or ""), _find(module).parent)


def _find(module: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(module)  # imports the parent packages, which are empty here
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"module {module!r} cannot be found (as Python source) from here")
    return spec


@functools.cache
def _source(module: str) -> ast.Module:
    spec = _find(module)
    assert spec.origin is not None
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"), spec.origin)
    except SyntaxError as error:
        raise ConfigError(f"module {module!r}: {error}") from None
