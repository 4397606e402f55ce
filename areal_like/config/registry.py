"""Every component that a config can name, and the knobs that each one takes.

A component is a function or a class; a *spec* such as `{name: ppo, clip: 0.2}` names one and sets its knobs, which are
its keyword-only parameters. All components are listed in one dict of strings, so nothing is imported until it is used:
`check` and `knobs` read a component's source (`config.signatures`), so that a config is refused in milliseconds.
`module:Name` is accepted wherever a name is, so that a user's own component needs no entry here.

To add a component: write it, and add one line to `COMPONENTS`. A yaml in `configs/KIND/` is for a choice that sets more
than one component's defaults.
Drivers: `areal_like.config.run_config` calls `check`; the processes call `build`, `bind` and `resolve`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from areal_like.config.annotations import misfit
from areal_like.config.other_names import OTHER_NAMES
from areal_like.config.schema import Config
from areal_like.config.signatures import REQUIRED, Knob, Signature, UnreadableError, docstring, is_async, signature
from areal_like.errors import UserError
from areal_like.places import CONFIGS

T = TypeVar("T")
COMPONENTS: dict[str, dict[str, str]] = {
    "task": {
        "copy": "areal_like.tasks.copying:Copy",
        "reverse": "areal_like.tasks.copying:Reverse",
        "arithmetic": "areal_like.tasks.arithmetic:Arithmetic",
        "jsonl": "areal_like.tasks.jsonl:Jsonl",
        "demonstrations": "areal_like.tasks.demonstrations:Demonstrations",
        "mixture": "areal_like.tasks.mixture:Mixture",
        "reasoning_gym": "areal_like.tasks.reasoning_gym:ReasoningGym",
        "episodes": "areal_like.tasks.episodes:Episodes",
        "verifiers": "areal_like.tasks.verifiers:Verifiers",
    },
    "reward": {
        "math_verify": "areal_like.tasks.maths:math_verify",
        "exact": "areal_like.tasks.maths:exact",
        "last_number": "areal_like.tasks.numbers:last_number",
        "unit_tests": "areal_like.tasks.unit_tests:unit_tests",
    },
    "group_reward": {
        "none": "areal_like.tasks.comparing:none",
        "length_rank": "areal_like.tasks.comparing:length_rank",
        "judge": "actors.judge:Judge",
    },
    "model": {
        "qwen2": "areal_like.models.causal_lm:qwen2",
        "folder": "areal_like.models.causal_lm:folder",
    },
    "engine": {
        "torch": "actors.engines.torch_engine:TorchEngine",
        "timed": "actors.engines.timed_engine:TimedEngine",
        "sglang": "actors.engines.sglang_engine:SglangEngine",
    },
    "workflow": {
        "single_turn": "actors.workflows:single_turn",
        "multi_turn": "actors.workflows:multi_turn",
        "agent": "actors.agents.workflow:agent",
    },
    "environment": {
        "tools": "actors.tools:Tools",
        "openenv": "actors.openenv:OpenEnv",
    },
    "scheduler": {
        "async": "buffer.schedulers:AsyncScheduler",
        "sync": "buffer.schedulers:SyncScheduler",
    },
    "sizing": {
        "fixed": "buffer.sizing:Fixed",
        "sagc": "buffer.sizing:Sagc",
    },
    "batch_policy": {
        "in_order": "buffer.policies:in_order",
        "fifo": "buffer.policies:fifo",
        "windowed": "buffer.policies:windowed",
        "priority": "buffer.policies:priority",
    },
    "sampler": {
        "in_order": "buffer.samplers:in_order",
        "pass_rate_pools": "buffer.samplers:pass_rate_pools",
    },
    "filter": {
        "none": "buffer.policies:none",
        "zero_variance": "buffer.policies:zero_variance",
    },
    "loss": {
        "ppo": "learners.losses.clipped:ppo",
        "decoupled_ppo": "learners.losses.clipped:decoupled_ppo",
        "icepop": "learners.losses.clipped:decoupled_ppo",
        "gspo": "learners.losses.clipped:gspo",
        "sapo": "learners.losses.clipped:sapo",
        "reinforce": "learners.losses.weighted:reinforce",
        "is_pg": "learners.losses.weighted:reinforce",
        "tis": "learners.losses.weighted:reinforce",
        "cispo": "learners.losses.weighted:reinforce",
        "topr": "learners.losses.weighted:reinforce",
        "mis_po": "learners.losses.weighted:reinforce",
        "vespo": "learners.losses.weighted:vespo",
        "vtrace": "learners.losses.weighted:vtrace",
        "m2po": "learners.losses.trusted:m2po",
        "dppo": "learners.losses.trusted:dppo",
        "dg": "learners.losses.delightful:dg",
        "dg_kondo": "learners.losses.delightful:dg_kondo",
        "pmpo": "learners.losses.targets:pmpo",
        "tpo": "learners.losses.targets:tpo",
        "sft": "learners.losses.weighted:sft",
    },
    "correction": {
        "none": "learners.losses.corrections:none",
        "ratio": "learners.losses.corrections:ratio",
        "exact": "learners.losses.corrections:exact",
        "tis": "learners.losses.corrections:tis",
        "cispo": "learners.losses.corrections:cispo",
        "capped": "learners.losses.corrections:capped",
        "icepop": "learners.losses.corrections:icepop",
        "kpop": "learners.losses.corrections:kpop",
        "seq_tis": "learners.losses.corrections:seq_tis",
        "seq_mis": "learners.losses.corrections:seq_mis",
        "geo_mask": "learners.losses.corrections:geo_mask",
        "sequence_mask": "learners.losses.corrections:sequence_mask",
        "mis_po": "learners.losses.corrections:mis_po",
        "topr": "learners.losses.corrections:topr",
    },
    "advantage": {
        "group": "learners.advantages:group",
        "rloo": "learners.advantages:rloo",
        "maxrl": "learners.advantages:maxrl",
        "batch": "learners.advantages:batch",
        "reinforce_pp": "learners.advantages:reinforce_pp",
        "turn": "learners.advantages:turn",
        "gae": "learners.advantages:gae",
        "distill": "learners.advantages:distill",
    },
    "learner": {
        "torch": "learners.learner:TorchLearner",
        "timed": "learners.timed:TimedLearner",
    },
    "tracker": {
        "tensorboard": "areal_like.trackers.board:Board",
        "wandb": "areal_like.trackers.wandb:WeightsAndBiases",
    },
    "launcher": {
        "local": "areal_like.launch.local:LocalLauncher",
        "inline": "areal_like.launch.inline:InlineLauncher",
        "slurm": "areal_like.launch.slurm:SlurmLauncher",
        "ray": "areal_like.launch.ray:RayLauncher",
    },
}

PARTS = {"learner.lora": "learners.adapters:Adapters", "learner.teacher": "learners.distillation:Teacher"}
"""Knobs whose value is itself a set of knobs: dotted path → the class that defines them."""


USUAL_CORRECTIONS = {
    "decoupled_ppo": "capped",
    "icepop": "icepop",
    "tis": "tis",
    "cispo": "cispo",
    "is_pg": "exact",
    "mis_po": "mis_po",
    "topr": "topr",
}
"""A loss's name → its correction where the config sets none."""

NO_CORRECTION: dict[str, object] = {"name": "none"}


class ConfigError(UserError):
    """A config that cannot be run: the fault, its place, and the remedy. `key` is the dotted path at fault."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


# Using components


def resolve(kind: str, name: str) -> Any:
    """Import the component `name` of `kind`. Raises ConfigError where there is no such name, module or attribute."""
    module, attribute = _target(kind, name)
    try:
        return _with_marks(getattr(importlib.import_module(module), attribute))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the component's own import failed: that is not about its name
        raise ConfigError(f"{kind}.name: {name!r} needs the module {module!r}, which cannot be found", kind) from None
    except AttributeError:
        raise ConfigError(f"{kind}.name: module {module!r} has no {attribute!r}", kind) from None


def _with_marks(component: T) -> T:
    """Give a `functools.partial` the marks of its function or class (`needs_model`, ...)."""
    if isinstance(component, functools.partial):
        for mark, value in inspect.getmembers(component.func, lambda value: isinstance(value, bool)):
            setattr(component, mark, value)
    return component


def build(kind: str, spec: Mapping[str, object], *args: object) -> Any:
    """Call the component of `spec` with `args` and the spec's knobs: makes an object, or a function's result. Raises
    ConfigError, also where the component refuses the value of a knob (by ValueError)."""
    component = bind(kind, spec)
    try:
        return component(*args)
    except UserError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), kind) from error
    except TypeError as error:
        if error.__traceback__ and error.__traceback__.tb_next:  # not of the call, but in the component
            raise
        raise ConfigError(f"{kind}={spec['name']} is no {kind} ({error}): see docs/extending.md", kind) from error


def bind(kind: str, spec: Mapping[str, object]) -> functools.partial[Any]:
    """The component of `spec` with its knobs bound, for later calls (losses, workflows, policies). A loss comes with
    its correction, as another callable."""
    check(kind, spec)
    plain = _plain(spec)
    correction = NO_CORRECTION
    if kind == "loss":
        correction = correction_of(plain)
        plain.pop("correction", None)
    bound = functools.partial(resolve(kind, plain.pop("name")), **plain)
    if correction == NO_CORRECTION:
        return bound
    return cast(functools.partial[Any], build("correction", correction, bound))


def correction_of(spec: Mapping[str, object]) -> dict[str, object]:
    """The spec of a loss's correction: that of the loss's spec (a name, knobs, or both), or the usual one of losses of
    its name. Knobs without a name are the usual one's, or those of `ratio`, which has all knobs. Raises ConfigError."""
    usual, given = USUAL_CORRECTIONS.get(str(spec["name"]), "none"), _plain(spec).get("correction")
    if given is not None and not isinstance(given, str | Mapping):
        key = "loss.correction"
        raise ConfigError(f"{key}: got {given!r}, expected a name or {{name: ..., knobs}}", key)
    knobs = as_spec(given) if given else {}
    return {"name": "ratio" if knobs and usual == "none" else usual} | knobs


def _plain(spec: Mapping[str, object]) -> dict[str, Any]:
    """A spec as plain containers, so that components need no OmegaConf."""
    return cast(dict[str, Any], OmegaConf.to_container(spec)) if isinstance(spec, DictConfig) else dict(spec)


# Checking specs


def check(kind: str, spec: Mapping[str, object]) -> None:
    """Check a spec against its component's keyword-only parameters, without importing the component's module.

    Raises ConfigError for an unknown name, an unknown knob, a missing knob that has no default, and a value that the
    knob's annotation rules out (`areal_like.config.annotations`).
    """
    plain = _plain(spec)
    name = plain.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{kind}.name: {name!r} is not the name of a component: {_list(COMPONENTS[kind])}", kind)
    if kind == "loss" and "correction" in plain:
        plain["correction"] = correction_of({"name": name, **plain})
    _validate_knobs(_signature_of(kind, name), kind, name, plain)


def check_part(path: str, values: Mapping[str, object]) -> None:
    """Check the knobs at a path of `PARTS` against those of their class. Raises ConfigError."""
    check_knobs(PARTS[path], path, values)


def check_knobs(target: str, path: str, values: Mapping[str, object]) -> None:
    """Check the values at a path against the keyword-only parameters of "module:name". Raises ConfigError."""
    module, _, attribute = target.partition(":")
    _validate_knobs(signature(module, attribute), path, path.rpartition(".")[2], values)


def marks(kind: str, name: str) -> frozenset[str]:
    """The marks of a component: a function's decorators, the attributes that a class or a base of it sets to True."""
    return _signature_of(kind, name).marks


def is_supervised(config: Config) -> bool:
    """Whether only the learner runs and trains on a task's demonstrations (`loss=sft`), without a buffer or actors."""
    return "supervised" in marks("loss", config.loss["name"])


def check_function(key: str, path: str) -> bool:
    """Find the function "module:name" that the knob `key` names, if possible without importing it; returns whether it
    is async. Raises ConfigError."""
    try:
        return is_async(path)
    except UnreadableError as error:
        raise ConfigError(f"{key}={path}: {error}; name a function as module:name", key) from None


def _validate_knobs(found: Signature, prefix: str, name: str, values: Mapping[str, object]) -> None:
    for knob, value in values.items():
        path = f"{prefix}.{knob}"
        if knob not in found.knobs:
            if not found.takes_any:
                raise ConfigError(f"{path}: {_no_knob(found, path, name)}", path)
        elif problem := misfit(value, found.knobs[knob].annotation):
            raise ConfigError(f"{path}: {problem}", path)
        elif knob in COMPONENTS:
            _check_inner(path, knob, value)
    missing = [knob for knob, known in found.knobs.items() if known.default is REQUIRED and knob not in values]
    if missing:
        path = f"{prefix}.{missing[0]}"
        raise ConfigError(f"{path}: {name!r} needs it and has no default; set it with {path}=VALUE", path)


def _no_knob(found: Signature, path: str, name: str) -> str:
    """What is wrong with a knob that the component hasn't, and what to do."""
    knob, is_own = path.rpartition(".")[2], ":" in name
    if is_own and knob in found.optional:
        return f"{knob!r} of {name} is not keyword-only: write `*, {found.optional[knob]}`"
    hint = nearest(knob, found.knobs) if is_own else key_hint(path, found.knobs)
    return f"{name!r} has no knob {knob!r}.{hint} Its knobs: {_list(found.knobs)}"


def _check_inner(path: str, kind: str, spec: object) -> None:
    """A knob that is named like a kind of component takes a spec of that kind, or just a name."""
    if not isinstance(spec, Mapping | str):
        raise ConfigError(f"{path}: expected a name or {{name: ..., knobs}}, got {spec!r}", path)
    try:
        check(kind, as_spec(spec))
    except ConfigError as error:
        raise ConfigError(f"{path.removesuffix(kind)}{error}", path) from None


def knobs(kind: str, name: str) -> dict[str, Any]:
    """Knob → default of a component (`REQUIRED` where there is none; source text where it is no literal)."""
    return {knob: known.default for knob, known in _signature_of(kind, name).knobs.items()}


def described(kind: str, name: str) -> tuple[Signature, str]:
    """The knobs of a component with their types, and its docstring. Raises ConfigError."""
    return _signature_of(kind, name), docstring(*_target(kind, name))


def as_spec(spec: str | Mapping[str, object]) -> dict[str, object]:
    """A spec; a bare name becomes `{name: ...}`."""
    return {"name": spec} if isinstance(spec, str) else _plain(spec)


def target(kind: str, name: str) -> str:
    """Where a component of this name is defined, as "module:name". Raises ConfigError."""
    return ":".join(_target(kind, name))


def with_defaults(kind: str, spec: Mapping[str, object]) -> dict[str, Any]:
    """A spec, completed by its component's defaults."""
    plain = _plain(spec)
    return knobs(kind, plain["name"]) | plain


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def key_hint(path: str, known: Iterable[str]) -> str:
    """What to write for an unknown key: our name for a key of TRL or verl, or else the nearest known one."""
    key = path.rpartition(".")[2]
    return f" Here that is {OTHER_NAMES[key]}." if key in OTHER_NAMES else nearest(key, known)


def component_hint(kind: str, name: str, known: Iterable[str]) -> str:
    """What to write for an unknown component or choice: the algorithm of this name, or the nearest known name."""
    if kind == "loss" and (CONFIGS / "algorithm" / f"{name}.yaml").is_file():
        return f" Did you mean algorithm={name}?"
    return nearest(name, known)


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
        hint = component_hint(kind, name, known)
        others = f"There are {_list(known)}; or name your own as module:Name"
        raise ConfigError(f"{kind}.name: there is no {kind} {name!r}.{hint} {others}", f"{kind}.name")
    return module, attribute


def _signature_of(kind: str, name: str) -> Signature:
    module, attribute = _target(kind, name)
    try:
        found = signature(module, attribute)
        if kind != "loss":
            return found
        correction = Knob(USUAL_CORRECTIONS.get(name, "none"), None)
        return dataclasses.replace(found, knobs={**found.knobs, "correction": correction})
    except UnreadableError as error:
        raise ConfigError(f"{kind}.name: {name!r} cannot be read: {error}", f"{kind}.name") from None
