"""The config of a run: its keys, their types, and the checks that refuse a wrong one.

    load(["configs/quickstart.yaml", "mode=sync", "learner.lr=1e-3"])

Every key is known: `areal_like.config.schema` lists the sections with types; a component's knobs are its keyword-only
parameters (`config.registry`). `config.layers` merges files and overrides into one tree. `configs/base.yaml`
has the defaults and explains each key. The result is resolved and read-only; yaml holds all of it.

Imports no torch: a wrong config is refused before anything heavy is loaded.
Drivers: scripts call `load` and `save`; each process calls `load_resolved` on the run folder's `config.yaml`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_like.config.annotations import range_of
from areal_like.config.conflicts import (
    AGES,
    shares_of,
    validate_eval_sets,
    validate_launcher,
    validate_mismatch,
    validate_model,
    validate_placement,
    validate_replay,
    validate_supervision,
    validate_training,
    validate_transport,
    validate_words,
)
from areal_like.config.defaults import LEARNING, learning_defaults, machine_defaults
from areal_like.config.layers import Layers, Tree, Value, read, shown
from areal_like.config.registry import COMPONENTS, ConfigError, check, key_hint, knobs, marks, with_defaults
from areal_like.config.schema import RANGES, SECTIONS, Config
from areal_like.machine import cores, has_bfloat16, has_gpu
from areal_like.places import CONFIGS

__all__ = ["Config", "ConfigError", "load", "load_resolved", "replace", "save", "to_yaml"]

_CUT = (
    "is not supported: rollouts sample from the whole distribution, since a cut one would give behaviour logprobs that "
    "differ from the learner's. Leave it out; sampling.temperature is there"
)
REFUSED = {"sampling.top_p": _CUT, "sampling.top_k": _CUT}

BOUND = "scheduler.max_staleness"
IMPLIED_BY_ONE_PROCESS = {
    "rewards.workers": 0,
    "weights.overlap": False,
    "buffer.lease_timeout": 0.0,
    "run.max_untrainable": 1,
}


# What callers use


def load(argv: Sequence[str], inherited: Config | None = None, origins: Mapping[str, str] | None = None) -> Config:
    """The config of `[file, key=value, ...]`, checked and resolved. `inherited`: the config of an earlier run. Its
    values replace defaults that depend on model and machine, but not defaults of learning. `origins`: key → where its
    override came from, for errors (default: the command line). Raises ConfigError."""
    if not argv:
        raise ConfigError("no config file given; try configs/quickstart.yaml")
    layers = Layers()
    layers.add_command_line(argv, origins)
    try:
        _settle_mode(layers)
        _imply_bound(layers)
        _imply_one_process(layers)
        return _with_defaults(_checked(layers.tree), inherited, layers)
    except ConfigError as error:
        origin = layers.origin(error.key)
        raise ConfigError(f"{error} [from {origin}]" if origin else str(error), error.key) from None


def load_resolved(path: str | Path) -> Config:
    """Read what `save` wrote: a complete tree without `extends`, choices or overrides. Raises ConfigError."""
    return from_tree(read_resolved(path))


def read_resolved(path: str | Path) -> Tree:
    """`load_resolved` as plain data, untyped. Raises ConfigError if keys are missing or unknown."""
    tree, shapes = read(Path(path)), {"": Config, **SECTIONS}
    for name, shape in shapes.items():
        values = tree[name] if name else tree
        odd = set(_names(shape)) ^ set(values) if isinstance(values, dict) else {""}
        for key in sorted(odd)[:1]:
            at = f"{name}.{key}".strip(".")
            raise ConfigError(f"{shown(Path(path))}: the key {at} differs: damaged, or of another version's run", at)
    return tree


def from_tree(tree: Tree) -> Config:
    """A complete tree as a config, typed but not checked. Raises ConfigError."""
    return _read_only(_typed(tree))


def save(config: Config, path: str | Path) -> None:
    """Write the resolved config as yaml to a temporary file, then rename it: a killed process leaves the old file or
    the new one."""
    beside = Path(path).with_suffix(".tmp")
    beside.write_text(to_yaml(config), encoding="utf-8")
    beside.replace(path)


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(config)


def with_every_knob(config: Config) -> Config:
    """The config with every knob of its components, defaults included. For people: a default that is computed appears
    as its source text."""
    tree = _plain(config)
    for kind in COMPONENTS.keys() & tree.keys():
        tree[kind] = {"name": None} | with_defaults(kind, getattr(config, kind))
    return cast(Config, OmegaConf.create(tree))


def select(config: Config, key: str) -> Any:
    """The value of a dotted key, as plain data."""
    value = OmegaConf.select(cast(DictConfig, config), key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def differences(before: Config, now: Config, keys: Sequence[str]) -> list[str]:
    """What differs below some top-level keys, in words: "learner.lr=1e-06 (was 2e-05)"."""
    old, new = ({key: value for name in keys for key, value in _leaves(name, select(c, name))} for c in (before, now))
    changed = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [f"{key}={new.get(key)} (was {old.get(key)})" for key in changed]


def _leaves(path: str, value: Value) -> list[tuple[str, Value]]:
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for key, below in value.items() for leaf in _leaves(f"{path}.{key}", below)]


def leaves(config: Config) -> dict[str, Value]:
    """Dotted key → value of the whole config."""
    return _flat(_plain(config))


def _flat(tree: Tree) -> dict[str, Value]:
    return {key: value for name, below in tree.items() for key, value in _leaves(name, below)}


def changed(config: Config) -> list[str]:
    """The keys whose values are not those of `configs/base.yaml` on this machine."""
    usual, found = leaves(load([str(CONFIGS / "base.yaml")])), leaves(config)
    return [key for key, value in found.items() if value is not None and usual.get(key) != value]


def replace(config: Config, key: str, value: object) -> Config:
    """A copy with one dotted key changed, checked again. Raises ConfigError."""
    _refuse_unknown({key.partition(".")[0]: None}, Config, "", {})
    try:
        return _filled(copy.deepcopy(config), {key: value})
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}", key) from None


# Checking


def _checked(tree: Tree) -> Config:
    _refuse_unknown_keys(tree)
    _refuse_yes_and_no(tree)
    return _read_only(_consistent(_typed(tree)))


def _consistent(config: Config) -> Config:
    """The config itself, if its values go together. Raises ConfigError."""
    tree = _plain(config)  # attributes of a config take ten times as long
    for kind in sorted(COMPONENTS.keys() & tree.keys()):
        check(kind, cast(dict[str, object], tree[kind]))
    _check_mixture(config)
    _check_heldout(config)
    _refuse_outside(_flat(tree))
    count = config.actors.count or max(1, config.actors.min_alive)  # None: as many as suit
    if config.actors.min_alive > count:
        raise ConfigError(f"actors.min_alive: at most actors.count={count}", "actors.min_alive")
    if config.weights.block_bytes % 4096:
        raise ConfigError("weights.block_bytes: must be a multiple of 4096", "weights.block_bytes")
    _refuse_other_ages(config)
    validate_transport(config)
    validate_launcher(config)
    validate_placement(config)
    validate_model(config)
    validate_training(config)
    validate_replay(config)
    validate_mismatch(config)
    validate_supervision(config)
    validate_words(config)
    return config


def _with_defaults(config: Config, inherited: Config | None, layers: Layers) -> Config:
    """Fill in the defaults that depend on the model and the machine."""
    found = learning_defaults(config) | machine_defaults(config, cores(), has_bfloat16(), has_gpu())
    layers.note(found, "a default")
    if inherited:
        unset = [f"learner.{knob}" for knob in LEARNING if knob in inherited.learner]
        usual = learning_defaults(from_tree(_with(inherited, dict.fromkeys(unset))))
        known = {key: select(inherited, key) for key in found}
        kept = {key: value for key, value in known.items() if value is not None and value != usual.get(key)}
        layers.note(kept, "the earlier run")
        found |= kept
    return _filled(config, found) if found else config


def _filled(config: Config, values: Mapping[str, object]) -> Config:
    """The config itself with values filled in, checked again. Typing the whole tree again would take half of `load`."""
    tree = cast(DictConfig, config)
    OmegaConf.set_readonly(tree, False)
    OmegaConf.set_struct(tree, False)
    for key, value in values.items():
        OmegaConf.update(tree, key, value)
    return _read_only(_consistent(config))


def _with(config: Config, values: Mapping[str, object]) -> Tree:
    """The config as plain data, with other values of dotted keys."""
    changed: DictConfig = OmegaConf.create(_plain(config))
    for key, value in values.items():
        OmegaConf.update(changed, key, value, force_add=True)
    return _plain(changed)


def _refuse_outside(values: Mapping[str, Value]) -> None:
    for key, interval in RANGES.items():
        value, allowed = values.get(key), range_of(interval)
        if allowed and isinstance(value, int | float) and (problem := allowed.misfit(value)):
            raise ConfigError(f"{key}: {problem}, got {value}", key)


def _check_heldout(config: Config) -> None:
    try:
        check("workflow", heldout_workflow(config))
    except ConfigError as error:
        raise ConfigError(f"eval.{error}", f"eval.{error.key}") from None
    workflow_of = functools.partial(heldout_workflow, config)
    validate_eval_sets(select(config, "eval"), select(config, "task"), config.model.get("path"), workflow_of)


def _check_mixture(config: Config) -> None:
    if config.task["name"] == "mixture":
        from areal_like.tasks.mixture import check_members

        check_members(select(config, "task"))


def _settle_mode(layers: Layers) -> None:
    """`mode` names the scheduler that runs. If only a scheduler was chosen, `mode` follows; the two may not differ."""
    mode, scheduler = layers.tree.get("mode"), layers.tree.get("scheduler")
    name = scheduler.get("name") if isinstance(scheduler, dict) else None
    if name == mode or not {mode, name} <= {file.stem for file in (CONFIGS / "mode").glob("*.yaml")}:
        return
    if layers.origin("mode") == shown(CONFIGS / "base.yaml"):
        layers.tree["mode"] = name
    else:
        key = "scheduler.name"
        raise ConfigError(f"{key}={name} contradicts mode={mode}: say mode={name}, or leave {key} out", key)


def _imply_bound(layers: Layers) -> None:
    """The oldest age of `inject_staleness` becomes the bound, unless the user has set one."""
    scheduler, origin = layers.tree.get("scheduler"), layers.origin(BOUND)
    if layers.tree.get(AGES) is None or not isinstance(scheduler, dict) or "max_staleness" not in scheduler:
        return
    if origin in {shown(CONFIGS / file) for file in ("base.yaml", "mode/async.yaml")}:
        scheduler["max_staleness"] = shares_of(layers.tree[AGES])[-1][0]


def _imply_one_process(layers: Layers) -> None:
    """In one process a person may pause the roles for any time, and an error should show at once: so no time-outs and
    no helper processes. An override of the user's wins."""
    launcher = layers.tree.get("launcher")
    name = launcher.get("name") if isinstance(launcher, dict) else None
    if not isinstance(name, str) or "ONE_PROCESS" not in marks("launcher", name):
        return
    for path, value in IMPLIED_BY_ONE_PROCESS.items():
        section, _, key = path.partition(".")
        values = layers.tree.get(section)
        if isinstance(values, dict) and not layers.is_overridden(path):
            values[key] = value


def _refuse_other_ages(config: Config) -> None:
    spec = select(config, AGES)
    if spec is None:
        return
    oldest, bound = shares_of(spec)[-1][0], config.scheduler.get("max_staleness", 0)
    if oldest > bound:
        raise ConfigError(f"{AGES}: groups {oldest} versions old break the bound of {bound} ({BOUND}, mode)", AGES)
    if config.batch_policy["name"] != "in_order":
        raise ConfigError(f"{AGES} gives each batch its own groups: it needs batch_policy=in_order", AGES)
    if config.sizing["name"] != "fixed" or config.scheduler.get("oversample_prompts", 1) != 1:
        raise ConfigError(f"{AGES} needs sizing=fixed and no scheduler.oversample_prompts: all places are set", AGES)


def heldout_workflow(config: Config, of_set: object = None) -> dict[str, Any]:
    """The workflow for held-out prompts: the run's workflow, with some knobs replaced by `eval.workflow`, and then by
    those `of_set`."""
    usual = _with_knobs(select(config, "workflow"), select(config, "eval.workflow"))
    return _with_knobs(usual, dict(of_set)) if isinstance(of_set, Mapping) else usual


def _with_knobs(spec: dict[str, Any], knobs: dict[str, Any]) -> dict[str, Any]:
    """The spec with some knobs replaced, at any depth; if `knobs` name another component, they replace all."""
    if knobs.get("name", spec.get("name")) != spec.get("name"):
        return knobs
    both = [key for key, value in knobs.items() if isinstance(value, dict) and isinstance(spec.get(key), dict)]
    return spec | knobs | {key: _with_knobs(spec[key], knobs[key]) for key in both}


def actors_of(config: Config) -> int:
    """The number of actors, which every resolved config sets."""
    assert config.actors.count is not None
    return config.actors.count


def ranks_of(config: Config) -> int:
    """The number of processes that the learner is spread over."""
    return int(config.learner.get("ranks", 1))


def learner_threads(config: Config) -> int:
    """The number of CPU threads of each rank."""
    return int(config.learner.get("threads") or config.actors.threads or 1)


def _refuse_unknown_keys(tree: Tree) -> None:
    _refuse_unknown(tree, Config, "", tree)
    for name, section in SECTIONS.items():
        values = tree.get(name, {})
        if not isinstance(values, dict):
            keys = ", ".join(field.name for field in dataclasses.fields(section))
            raise ConfigError(f"{name}: expected a section with the keys {keys}; got {values!r}", name)
        _refuse_unknown(values, section, f"{name}.", tree)


def _refuse_unknown(values: Tree, shape: type, prefix: str, tree: Tree) -> None:
    known = _names(shape)
    for key in values:
        path = f"{prefix}{key}"
        if path in REFUSED:
            raise ConfigError(f"{path} {REFUSED[path]}", path)
        if key not in known:
            leaf = next(iter(_leaves(path, values[key])), (path,))[0]  # actor_rollout_ref.rollout.n
            hint = _elsewhere(str(key), tree) or key_hint(leaf, ()) or key_hint(str(key), known)
            raise ConfigError(f"unknown key {path!r}.{hint or ' There are ' + ', '.join(known)}", path)


def _refuse_yes_and_no(tree: Tree) -> None:
    for key, allowed in (("resume", "auto, a run folder"), ("replay", "a run folder")):
        if isinstance(tree.get(key), bool):
            raise ConfigError(f"{key}: expected {allowed}, or null for a run without it; got yes or no", key)


def _elsewhere(key: str, tree: Tree) -> str:
    """Where else a key stands: in a section, or as a knob of a component that the config names."""
    found = [f"{name}.{key}" for name, section in SECTIONS.items() if key in _names(section)]
    for kind, names in COMPONENTS.items():
        spec = tree.get(kind)
        name = spec.get("name") if isinstance(spec, dict) else None
        if name in names and key in knobs(kind, str(name)):
            found.append(f"{kind}.{key}")
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _names(shape: type) -> list[str]:
    return [field.name for field in dataclasses.fields(shape)]


@functools.cache
def _shape() -> DictConfig:
    """`Config` and its sections without values."""
    shape = cast(DictConfig, OmegaConf.structured(Config))
    for name, section in SECTIONS.items():
        shape[name] = OmegaConf.structured(section)
    return shape


def _typed(tree: Tree) -> Config:
    """The tree in the shape of `Config`, interpolations resolved, nothing missing."""
    buffer = tree.get("buffer")
    if isinstance(buffer, dict) and buffer.get("journal") is False:
        buffer["journal"] = "off"  # YAML 1.1 reads off as false
    try:
        config = _shaped(tree)
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        key = error.full_key or _culprit(tree)
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}", key) from None
    return cast(Config, config)


def _shaped(tree: Tree) -> DictConfig:
    """The tree in the shape of `Config`, nothing missing."""
    config = copy.deepcopy(_shape())
    for name, value in tree.items():
        if name in SECTIONS and isinstance(value, dict):
            for key, below in value.items():  # key by key: `merge` takes three times as long
                OmegaConf.update(config[name], key, below, merge=False)
        else:
            config[name] = value
    _refuse_missing(OmegaConf.missing_keys(config), tree)
    return config


def _refuse_missing(missing: Iterable[str], tree: Tree) -> None:
    for key in sorted(missing)[:1]:
        hint = "" if key.partition(".")[0] in tree else ", or let the file extend base"
        raise ConfigError(f"{key} has no value: set it with {key}=VALUE{hint}", key)


def _culprit(tree: Tree) -> str:
    """The key whose value has the wrong type, where OmegaConf does not name it: a list in the place of names."""
    for section, below in tree.items():
        for name, value in below.items() if isinstance(below, dict) else ():
            try:
                OmegaConf.merge(_shape(), {section: {name: value}})
            except OmegaConfBaseException:
                return f"{section}.{name}"
    return ""


def _plain(config: Config | DictConfig) -> Tree:
    return cast(Tree, OmegaConf.to_container(config))


def _read_only(config: Config) -> Config:
    tree = cast(DictConfig, config)
    OmegaConf.set_struct(tree, True)
    OmegaConf.set_readonly(tree, True)
    return config
