"""Merges config files and command-line overrides into one tree of plain containers, and records each value's source.

The order, later wins: the files that a file `extends`, the file's choices, its values; then the command line's choices,
then its values. A *choice* is a plain string for a key that has a folder of files (`mode: sync` merges
`mode/sync.yaml`) or that names a component (`engine: timed` is `engine: {name: timed}`). A component whose `name`
changes replaces the inherited one whole, at any depth: knobs of one never reach another. Lists are replaced, never
joined; interpolations of a key (`${run.seed}`) stay text until all are merged. Any other `${`, and `\\${`, is text."""

import copy
import dataclasses
import functools
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_like.config.registry import COMPONENTS, ConfigError, component_hint, nearest
from areal_like.config.schema import TEXTS, Config
from areal_like.places import CONFIGS

COMMAND_LINE = "command line"
PRESETS = ("gpu", "algorithm")
"""Choices that set several components: merged first, so that choices of these components take precedence."""

_OPENS = "\ue000{"
"""Stands for `${` while OmegaConf reads it."""
_TEXT = re.compile(rf"\\{_OPENS}|{_OPENS}(?!({'|'.join(field.name for field in dataclasses.fields(Config))})[.}}])")
"""`${` that refers to no key."""

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
"""A value of yaml, as plain containers."""
Tree = dict[str, Value]
Items = list[tuple[str, Value, str]]
"""Dotted keys, values, and where each came from."""


class Layers:
    """A tree that layers are merged into, and where each of its values came from."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self._origins: dict[str, str] = {}
        self._open: list[Path] = []
        """Files being merged, outermost first: a file that extends itself is refused."""

    def add_command_line(self, argv: Sequence[str], origins: Mapping[str, str] | None = None) -> None:
        """Merge `[file, key=value, ...]`. `origins`: key → where its override came from. Raises ConfigError."""
        if "=" in argv[0]:
            raise ConfigError(f"{argv[0]!r} is an override where the config file should be; give the file first")
        main = find(argv[0], Path.cwd(), COMMAND_LINE)
        _refuse_part(main, read(main))
        items = [(key, value, (origins or {}).get(key, COMMAND_LINE)) for key, value in map(parse_override, argv[1:])]
        self.add_file(main)
        self._add(items, main.parent)

    def add_file(self, path: Path) -> None:
        if path in self._open:
            chain = " -> ".join(shown(file) for file in [*self._open, path])
            raise ConfigError(f"configs extend one another in a circle: {chain}")
        self._open.append(path)
        content = read(path)
        for name in _names(content.pop("extends", []), path):
            self.add_file(find(name, path.parent, f"extends in {shown(path)}"))
        self._add([(str(key), value, shown(path)) for key, value in content.items()], path.parent)
        self._open.pop()

    def origin(self, key: str) -> str | None:
        while key and key not in self._origins:
            key = key.rpartition(".")[0]
        return self._origins.get(key)

    def note(self, keys: Iterable[str], origin: str) -> None:
        self._origins |= dict.fromkeys(keys, origin)

    def _add(self, items: Items, folder: Path) -> None:
        """Merge dotted keys and values of one layer: the choices first, then the values."""
        items.sort(key=lambda item: item[0] not in PRESETS)
        values: Items = []
        for key, value, origin in items:
            if key not in COMPONENTS and value is None:  # no choice
                values.append((key, value, origin))
            elif not isinstance(value, dict) and (key in COMPONENTS or _group(key, folder)):
                self._choose(key, str(value), folder, origin)
            elif key.endswith(".name") and key.partition(".")[0] in COMPONENTS:  # replacing a component is a choice
                self._merge(self.tree, _nested(key, value), origin)
            else:
                values.append((key, value, origin))
        for key, value, origin in values:
            self._merge(self.tree, _nested(key, value), origin)

    def _choose(self, key: str, name: str, folder: Path, origin: str) -> None:
        """Merge the group file of this name, or name the component."""
        files = _group(key, folder)
        known = dict.fromkeys([*COMPONENTS.get(key, {}), *files])
        if key == "model" and name not in known and (Path(name).is_dir() or ("/" in name and ":" not in name)):
            return self._merge(self.tree, {key: {"name": "folder", "path": name}}, origin)
        if name not in known and not (key in COMPONENTS and ":" in name):
            hint = f"{component_hint(key, name, known)} There are {', '.join(known)}{', FOLDER' * (key == 'model')}"
            raise ConfigError(f"{key}: there is no {key} {name!r}.{hint} [from {origin}]", key)
        if name in files and files[name] not in self._open:
            self.add_file(files[name])
        elif key in COMPONENTS:
            self._merge(self.tree, {key: {"name": name}}, origin)
        if key not in COMPONENTS:
            self._merge(self.tree, {key: name}, origin)

    def _merge(self, tree: Tree, layer: Tree, origin: str, path: str = "") -> None:
        for key, value in layer.items():
            here = f"{path}.{key}" if path else str(key)
            inherited = tree.get(key)
            if isinstance(inherited, dict) and isinstance(value, dict) and not _replaces(here, inherited, value):
                self._merge(inherited, value, origin, here)
            else:
                tree[key] = copy.deepcopy(value)
                for below in [known for known in self._origins if known.startswith(f"{here}.")]:
                    del self._origins[below]
                self._origins[here] = origin


def _replaces(path: str, inherited: Tree, spec: Tree) -> bool:
    """Whether `spec` names another component than the one inherited (a section's `name`, as in `run`, is a value)."""
    is_component = path.removeprefix("eval.").partition(".")[0] in COMPONENTS
    return is_component and "name" in inherited and spec.get("name", inherited["name"]) != inherited["name"]


def _nested(key: str, value: Value) -> Tree:
    for part in reversed(key.split(".")):
        value = {part: value}
    return cast(Tree, value)


# Reading


def read(path: Path) -> Tree:
    """The mapping in a yaml file, interpolations left as text. Raises ConfigError."""
    try:
        state = path.stat()
        return copy.deepcopy(_read(path, state.st_ino, state.st_mtime_ns, state.st_size))
    except OSError as error:
        raise ConfigError(f"{shown(path)}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{shown(path)}: not valid yaml: {' '.join(str(error).split())}") from None


@functools.lru_cache(maxsize=256)
def _read(path: Path, *state: int) -> Tree:
    """`read`, once for each state of a file: a study loads the same files hundreds of times."""
    text = path.read_text(encoding="utf-8").replace("${", _OPENS)
    content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    if not isinstance(content, dict):
        raise ConfigError(f"{shown(path)}: a config is a mapping (key: value), not a list")
    return cast(Tree, _read_values(cast(Tree, content)))


def parse_override(text: str) -> tuple[str, Value]:
    """`key=value` as dotted key and value, read as yaml (nothing after `=`: null); of a key of `TEXTS`, as text."""
    key, equals, value = text.partition("=")
    if not (equals and all(key.split(".")) and not key.startswith("-")):
        raise ConfigError(f"{text!r} is no override; write key=value, such as learner.lr=1e-3")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value.replace('${', _OPENS)}"]))
    except (yaml.YAMLError, OmegaConfBaseException):
        raise ConfigError(f"{key}: got {value!r}, expected yaml; quote it for the shell", key) from None
    found = _read_values(cast(Tree, parsed)["value"])
    if close := [each for each in found if ":" in str(each) and found[each] is None] if isinstance(found, dict) else []:
        raise ConfigError(f"{key}: got the key {close[0]!r} without a value, expected a space behind its colon", key)
    return key, value if key in TEXTS and not isinstance(found, str | None) else found


def _read_values(value: Value) -> Value:
    """Take the word `inf` for the number, as Python does (yaml itself spells it `.inf`), and `${` for text unless it
    refers to a key: escaped twice, for `OmegaConf.resolve` and for each later access."""
    if isinstance(value, dict):
        return {key: _read_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_read_values(item) for item in value]
    if isinstance(value, str) and _OPENS in value:
        return _TEXT.sub(r"\\\\\\${", value).replace(_OPENS, "${")
    return float(value) if value in ("inf", "-inf") else value


# Finding files


def find(name: str, folder: Path, origin: str) -> Path:
    """The file of a name: in `folder`, then in `configs/`; `.yaml` may be left out. Raises ConfigError."""
    for place in (folder, CONFIGS):
        for candidate in (place / name, place / f"{name}.yaml"):
            if candidate.is_file():
                return candidate.resolve()
    known = [str(file.relative_to(CONFIGS).with_suffix("")) for file in sorted(CONFIGS.rglob("*.yaml"))]
    hint = nearest(name.removeprefix("configs/").removesuffix(".yaml"), known)
    raise ConfigError(f"there is no config {name!r} in {shown(folder)} or {shown(CONFIGS)}.{hint} [from {origin}]")


def _group(key: str, folder: Path) -> dict[str, Path]:
    """Name → file of the group `key`; a file beside the config hides one of the same name in `configs/`."""
    places = (CONFIGS, folder) if key.isidentifier() else ()
    return {file.stem: file.resolve() for place in places for file in sorted((place / key).glob("*.yaml"))}


def _refuse_part(path: Path, content: Tree) -> None:
    """Raises ConfigError for a study, and for the file of a choice (`task/jsonl.yaml`): a part of a run's config."""
    if "config" in content:
        raise ConfigError(f"{shown(path)} is no run's config but a study: areal-like ablate {shown(path)}")
    key = path.parent.name
    if key in (field.name for field in dataclasses.fields(Config)) and not {"extends", "run"} & content.keys():
        section = content.get(key)
        open_knobs = [name for name, value in section.items() if value == "???"] if isinstance(section, dict) else []
        more = "".join(f" {key}.{name}=VALUE" for name in open_knobs)
        raise ConfigError(f"{shown(path)} is no run's config but a choice of one: give base {key}={path.stem}{more}")


def _names(extends: Value, path: Path) -> list[str]:
    names = [extends] if isinstance(extends, str) else extends
    found = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if found != names:
        raise ConfigError(f"{shown(path)}: extends is a name or a list of names, not {extends!r}")
    return found


def shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
