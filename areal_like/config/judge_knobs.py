"""Knobs of `group_reward=judge` that make no sense: refused where the config is read."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from areal_like.config.registry import ConfigError

KEY = "group_reward"


def refuse_odd_judge(compare: str, scale: Sequence[float], template: str | None) -> None:
    """Raises ConfigError. `template` None: the judge's own."""
    if len(scale) != 2 or not scale[0] < scale[1]:
        raise ConfigError(f"{KEY}.scale={list(scale)}: want two numbers, the lower one first", f"{KEY}.scale")
    if template is None:
        return
    wanted, read = {"first", "second"} if compare == "pairs" else {"answer"}, Template(template)
    if not read.is_valid() or not wanted <= set(read.get_identifiers()):
        names = " and ".join(f"${each}" for each in sorted(wanted))
        raise ConfigError(f"{KEY}.template must hold {names} (write $$ for a dollar sign)", f"{KEY}.template")
