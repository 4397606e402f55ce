"""Knobs of `group_reward=judge` that make no sense: refused where the config is read, and by the judge itself."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from areal_like.config.registry import ConfigError

KEY = "group_reward"


def refuse_odd_judge(
    compare: str, scale: Sequence[float], prices: Sequence[float] | None, template: str | None
) -> None:
    """Raises ConfigError. `template` None: the judge's own."""
    for knob, values in (("scale", scale), ("prices", prices)):
        if values is not None and len(values) != 2:
            raise ConfigError(f"{KEY}.{knob}={list(values)}: want two numbers", f"{KEY}.{knob}")
    if not scale[0] < scale[1]:
        raise ConfigError(f"{KEY}.scale={list(scale)}: want two numbers, the lower one first", f"{KEY}.scale")
    if prices is not None and min(prices) < 0:
        raise ConfigError(f"{KEY}.prices={list(prices)}: a price is at least 0", f"{KEY}.prices")
    if template is None:
        return
    wanted, read = {"first", "second"} if compare == "pairs" else {"answer"}, Template(template)
    if not read.is_valid() or not wanted <= set(read.get_identifiers()):
        names = " and ".join(f"${each}" for each in sorted(wanted))
        raise ConfigError(f"{KEY}.template must hold {names} (write $$ for a dollar sign)", f"{KEY}.template")
