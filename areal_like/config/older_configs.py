"""The config of a recorded run, which another version may have written.

    config = load(folder / "config.yaml")

Keys that the file lacks get today's defaults (`configs/base.yaml`); keys that nobody knows any more are left out. That
is enough for a reader of an old run. A resume or a replay continues what the file describes, so it asks `in_doubt` what
it can't know. Knobs of components are not checked: a missing knob has its default in the code.

A process of a run reads its own config strictly (`areal_like.config.run_config.load_resolved`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from areal_like.config.layers import Tree, read, shown
from areal_like.config.run_config import ConfigError, from_tree
from areal_like.config.schema import SECTIONS, Config
from areal_like.places import CONFIGS

MOST_NAMED = 5
"""Keys that a note names."""
ALWAYS_THERE = (
    *("run.seed", "run.steps", "groups_per_batch", "weight_sync_interval", "task", "model", "workflow", "scheduler"),
    *("loss", "learner", "eval.prompts", "launcher"),
)
"""Keys of all versions, in the order of a file: without one of them it is damaged."""
CHANGES_NOTHING = ("inject_staleness", "sampler", "filter", "group_reward", "sampling.max_new_tokens")
"""Keys whose default is that of a version without them: they switch something on."""


@dataclass(frozen=True)
class Gaps:
    """Dotted keys that a config lacks, and those that are no longer known, with their values."""

    path: Path
    lacking: list[str] = field(default_factory=list)
    unknown: Tree = field(default_factory=dict)

    def note(self) -> str:
        """One sentence for the user; "" if there is nothing to say."""
        parts = []
        if self.lacking:
            parts.append(f"it has no {_named(self.lacking)}: today's defaults are used")
        if self.unknown:
            parts.append(f"{_named(list(self.unknown))}: no longer known, left out")
        return f"{shown(self.path)} is of another version; {'; '.join(parts)}" if parts else ""

    def in_doubt(self, keys: Iterable[str]) -> list[str]:
        """What is unknown about these keys and those below them. A key may be missing, and its default may differ from
        what that version did; or a key is there, but its meaning is lost."""
        below = tuple(f"{key}." for key in keys)
        lacking = [key for key in self.lacking if f"{key}.".startswith(below) and key not in CHANGES_NOTHING]
        lost = [key for key in self.unknown if "." not in key or f"{key}.".startswith(below)]
        return [*lacking, *lost]


def load(path: Path, *, tell: bool = False) -> Config:
    """The config, with its gaps filled; `tell` the user of them on standard error. Raises ConfigError."""
    config, gaps = load_with_gaps(path)
    if tell and (note := gaps.note()):
        print(f"note: {note}", file=sys.stderr)
    return config


def load_with_gaps(path: Path) -> tuple[Config, Gaps]:
    """Raises ConfigError."""
    tree, gaps = fill(path)
    return from_tree(tree), gaps


def fill(path: Path) -> tuple[Tree, Gaps]:
    """The config as plain data, neither typed nor checked, with its gaps filled. Raises ConfigError."""
    tree, gaps = read(path), Gaps(path)
    _check(tree, path)
    _fill(tree, Config, "", gaps)
    for name, section in SECTIONS.items():
        values = tree[name]
        assert isinstance(values, dict)
        _fill(values, section, f"{name}.", gaps)
    return tree, gaps


def _check(tree: Tree, path: Path) -> None:
    """Raises ConfigError for what is no config of a run."""
    for name in SECTIONS.keys() & tree.keys():
        if not isinstance(tree[name], dict):
            raise ConfigError(f"{shown(path)}: {name} is a section, not {tree[name]!r}: it is no config of a run", name)
    for key in ALWAYS_THERE:
        section, _, below = key.partition(".")
        values = tree.get(section)
        if section not in tree or (below and isinstance(values, dict) and below not in values):
            raise ConfigError(
                f"{shown(path)}: {key} is missing: the file was cut off, or it is no config of a run", key
            )


def _fill(values: Tree, shape: type, prefix: str, gaps: Gaps) -> None:
    known = [each.name for each in dataclasses.fields(shape)]
    for key in [key for key in values if key not in known]:
        gaps.unknown[f"{prefix}{key}"] = values.pop(key)
    for key in [key for key in known if key not in values]:
        values[key] = copy.deepcopy(_defaults(prefix)[key])
        gaps.lacking.append(f"{prefix}{key}")


@functools.cache
def _defaults(prefix: str) -> Tree:
    tree = read(CONFIGS / "base.yaml")
    section = tree[prefix.rstrip(".")] if prefix else tree
    assert isinstance(section, dict)
    return section


def _named(keys: list[str]) -> str:
    more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
    return ", ".join(keys[:MOST_NAMED]) + more
