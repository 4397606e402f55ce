"""The config of a run: its keys, their types, and the checks that refuse a wrong one.

    load(["configs/quickstart.yaml", "mode=sync", "learner.lr=1e-3"])

`config.schema` has the sections with types, `config.registry` the components' knobs, `config.layers` merges files and
overrides, `configs/base.yaml` has the defaults and explains each key. The result is read-only. No torch."""

import ast
import copy
import dataclasses
import functools
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from areal_like.config.annotations import misfit, outside
from areal_like.config.conflicts import AGES, BOUND, refuse_conflicts
from areal_like.config.defaults import LEARNING, learning_defaults, machine_defaults
from areal_like.config.heldout import check_heldout
from areal_like.config.layers import Layers, Tree, Value, read, shown
from areal_like.config.registry import COMPONENTS, ConfigError, check, key_hint, knobs, with_defaults
from areal_like.config.schema import RANGES, SECTIONS, Config, Knobs
from areal_like.machine import cores, has_bfloat16, has_gpu
from areal_like.places import CONFIGS
from areal_like.run.run_folder import write

__all__ = ["Config", "ConfigError", "load", "load_resolved", "replace", "save", "to_yaml"]


def load(argv: Sequence[str], inherited: Config | None = None, origins: Mapping[str, str] | None = None) -> Config:
    """The config of `[file, key=value, ...]`, checked and resolved. `inherited`: the config of an earlier run, whose
    values replace defaults that depend on model and machine, but not those of learning. `origins`: key → where its
    override came from, for errors. Raises ConfigError."""
    if not argv:
        raise ConfigError("no config file given; try configs/quickstart.yaml")
    layers = Layers()
    layers.add_command_line(argv, origins)
    try:
        _settle_mode(layers)
        _imply_bound(layers)
        _refuse_unknown_keys(layers.tree)
        return _with_defaults(_consistent(_typed(layers.tree)), inherited, layers)
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


def save(config: Config, path: Path) -> None:
    write(path, to_yaml(config))


def record(path: Path, values: Mapping[str, object]) -> None:
    """Put values that a run has chosen for open keys into its saved config. Raises ConfigError, OSError."""
    save(_filled(load_resolved(path), values), path)


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(config)


def with_every_knob(config: Config) -> Config:
    """The config with every knob of its components; a default that is computed appears as its source text."""
    tree = _plain(config)
    for kind in COMPONENTS.keys() & tree.keys():
        spec: Tree = with_defaults(kind, cast(Knobs, tree[kind]))
        tree[kind] = {"name": spec.pop("name"), **spec}
    return cast(Config, OmegaConf.create(tree))


def select(config: Config, key: str) -> Any:
    value = OmegaConf.select(cast(DictConfig, config), key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def differences(before: Config, now: Config, keys: Sequence[str]) -> list[str]:
    """What differs below some top-level keys, in words: "learner.lr=1e-06 (was 2e-05)"."""
    old, new = leaves(before), leaves(now)
    changed = [key for key in {**old, **new} if key.partition(".")[0] in keys and old.get(key) != new.get(key)]
    return [f"{key}={new.get(key)} (was {old.get(key)})" for key in changed]


def leaves(config: Config) -> dict[str, Value]:
    return _leaves(_plain(config))


def _leaves(tree: Tree, prefix: str = "") -> dict[str, Value]:
    found: dict[str, Value] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def changed(config: Config) -> list[str]:
    usual, found = leaves(load([str(CONFIGS / "base.yaml")])), leaves(config)
    return [key for key, value in found.items() if value is not None and usual.get(key) != value]


def replace(config: Config, key: str, value: object) -> Config:
    """A copy with one dotted key changed, checked again. Raises ConfigError."""
    _refuse_unknown({key.partition(".")[0]: None}, Config, "", {})
    try:
        return _filled(copy.deepcopy(config), {key: value})
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}", key) from None


def _consistent(config: Config) -> Config:
    """The config itself, if its values go together. Raises ConfigError."""
    tree = _plain(config)  # attributes of a config take ten times as long
    for kind in sorted(COMPONENTS.keys() & tree.keys()):
        check(kind, cast(dict[str, object], tree[kind]))
    if config.task["name"] == "mixture":
        from areal_like.tasks.mixture import check_members

        check_members(cast(Knobs, tree["task"]))
    check_heldout(config)
    values = _leaves(tree)
    for key, interval in RANGES.items():
        if problem := outside(values.get(key), interval):
            raise ConfigError(f"{key}: got {values[key]}, {problem}", key)
    refuse_conflicts(config)
    return config


def _with_defaults(config: Config, inherited: Config | None, layers: Layers) -> Config:
    found = learning_defaults(config) | machine_defaults(config, cores(), has_bfloat16(), has_gpu())
    layers.note(found, "a default")
    if inherited:
        bare = _plain(inherited)
        bare["learner"] = {knob: value for knob, value in bare["learner"].items() if knob not in LEARNING}  # type: ignore[union-attr]
        usual = learning_defaults(from_tree(bare))
        known = {key: select(inherited, key) for key in found}
        kept = {key: value for key, value in known.items() if value is not None and value != usual.get(key)}
        layers.note(kept, "the earlier run")
        found |= kept
    return _filled(config, found)


def _filled(config: Config, values: Mapping[str, object]) -> Config:
    """The config itself with values filled in, checked again. Typing the whole tree again would take half of `load`."""
    tree = cast(DictConfig, config)
    OmegaConf.set_readonly(tree, False)
    OmegaConf.set_struct(tree, False)
    for key, value in values.items():
        OmegaConf.update(tree, key, value.replace("${", "\\${") if isinstance(value, str) else value)
    return _read_only(_consistent(config))


def _settle_mode(layers: Layers) -> None:
    """`mode` names the scheduler that runs; if only a scheduler was chosen, `mode` follows."""
    mode, name = layers.tree.get("mode"), _chosen(layers.tree, "scheduler")
    if name == mode or not {mode, name} <= {file.stem for file in (CONFIGS / "mode").glob("*.yaml")}:
        return
    if layers.origin("mode") == shown(CONFIGS / "base.yaml"):
        layers.tree["mode"] = name
    else:
        raise ConfigError(f"scheduler.name: got {name} and mode={mode}: set mode={name} alone", "scheduler.name")


def _imply_bound(layers: Layers) -> None:
    """`inject_staleness` becomes the bound, unless the user has set one."""
    scheduler, origin = layers.tree.get("scheduler"), layers.origin(BOUND)
    if layers.tree.get(AGES) is None or not isinstance(scheduler, dict) or "max_staleness" not in scheduler:
        return
    if origin in {shown(CONFIGS / file) for file in ("base.yaml", "mode/async.yaml")}:
        scheduler["max_staleness"] = layers.tree[AGES]


def _chosen(tree: Tree, kind: str) -> str | None:
    spec = tree.get(kind)
    name = spec.get("name") if isinstance(spec, dict) else None
    return name if isinstance(name, str) else None


def actors_of(config: Config) -> int:
    return cast(int, config.actors.count)


def ranks_of(config: Config) -> int:
    return int(config.learner.get("ranks", 1))


def learner_threads(config: Config) -> int:
    return int(config.learner.get("threads") or config.actors.threads or 1)


def _refuse_unknown_keys(tree: Tree) -> None:
    _refuse_unknown(tree, Config, "", tree)
    for name, section in SECTIONS.items():
        values = tree.get(name, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: got {values!r}, expected a section of {', '.join(_names(section))}", name)
        _refuse_unknown(values, section, f"{name}.", tree)


def _refuse_unknown(values: Tree, shape: type, prefix: str, tree: Tree) -> None:
    known = _names(shape)
    for key in values:
        path = f"{prefix}{key}"
        if path in ("sampling.top_p", "sampling.top_k"):
            raise ConfigError(f"{path}: rollouts sample the whole distribution, as learning needs; leave it out", path)
        if key not in known:
            leaf = next(iter(_leaves({path: values[key]})), path).rpartition(".")[2]  # actor_rollout_ref.rollout.n
            hint = _elsewhere(str(key), tree) or key_hint(leaf, ()) or _elsewhere(leaf, tree) or key_hint(path, known)
            raise ConfigError(f"{path}: there is no such key.{hint or ' There are ' + ', '.join(known)}", path)


def _elsewhere(key: str, tree: Tree) -> str:
    found = [f"{name}.{key}" for name, section in SECTIONS.items() if key in _names(section)]
    chosen = {kind: _chosen(tree, kind) for kind in COMPONENTS}
    found += [f"{kind}.{key}" for kind, name in chosen.items() if name in COMPONENTS[kind] and key in knobs(kind, name)]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _names(shape: type) -> list[str]:
    return [field.name for field in dataclasses.fields(shape)]


@functools.cache
def _shape() -> bytes:
    """An empty config, pickled: to load it takes a sixth of the time of a copy."""
    shape = cast(DictConfig, OmegaConf.structured(Config))
    for name, section in SECTIONS.items():
        shape[name] = OmegaConf.structured(section)
    return pickle.dumps(shape)


def _typed(tree: Tree) -> Config:
    """The tree in the shape of `Config`, interpolations resolved."""
    buffer = tree.get("buffer")
    if isinstance(buffer, dict) and buffer.get("journal") is False:
        buffer["journal"] = "off"  # YAML 1.1 reads off as false
    config, at = cast(DictConfig, pickle.loads(_shape())), ""
    try:
        for name, value in tree.items():
            below = value if name in SECTIONS and isinstance(value, dict) else {}
            for key in below:  # key by key: `merge` takes three times as long
                at = f"{name}.{key}"
                OmegaConf.update(config[name], key, below[key], merge=False)
            if not below:
                at, config[name] = name, value
        for key in sorted(key for key, value in _leaves(_plain(config)).items() if value == MISSING):
            hint = "" if key.partition(".")[0] in tree else ", or let the file extend base"
            raise ConfigError(f"{key} has no value: set it with {key}=VALUE{hint}", key)
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        key = error.full_key or at
        model = "model=FOLDER or " * ("'model.path'" in str(error))
        hint = f"; set {model}{key}=VALUE" * isinstance(error, InterpolationKeyError)
        section, _, name = key.partition("[")[0].rpartition(".")
        shape, values = (SECTIONS[section], cast(Tree, tree[section])) if section in SECTIONS else (Config, tree)
        problem = "" if hint else misfit(values.get(name), ast.Constant(shape.__annotations__.get(name, "Spec")))
        raise ConfigError(f"{key}: {problem or str(error).splitlines()[0]}{hint}", key) from None
    return cast(Config, config)


def _plain(config: Config | DictConfig) -> Tree:
    return cast(Tree, OmegaConf.to_container(config))


def _read_only(config: Config) -> Config:
    tree = cast(DictConfig, config)
    OmegaConf.set_struct(tree, True)
    OmegaConf.set_readonly(tree, True)
    return config
