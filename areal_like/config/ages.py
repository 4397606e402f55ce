"""`inject_staleness`: the age that the data of each train batch shall have, on purpose. Pure.

    inject_staleness: 4                    every group is 4 versions old
    inject_staleness: {0: 0.5, 4: 0.5}     half of each batch is fresh, half 4 versions old
    inject_staleness: {uniform: [0, 8]}    ages from 0 to 8, equally often

`buffer.injection` gives each place of a batch its age.
"""

from __future__ import annotations

from typing import TypeGuard

from areal_like.config.registry import ConfigError

KEY = "inject_staleness"


def shares_of(spec: object) -> list[tuple[int, float]]:
    """(age, share) in the order of ages; shares are above 0, of any sum. Raises ConfigError for no distribution."""
    if _is_age(spec):
        return [(spec, 1.0)]
    if isinstance(spec, dict) and list(spec) == ["uniform"]:
        limits = spec["uniform"]
        if not isinstance(limits, list) or len(limits) != 2 or not all(map(_is_age, limits)) or limits[0] > limits[1]:
            raise ConfigError(f"{KEY}: uniform takes [youngest, oldest], not {limits!r}", KEY)
        return [(age, 1.0) for age in range(limits[0], limits[1] + 1)]
    if not isinstance(spec, dict) or not spec:
        raise ConfigError(f"{KEY}: an age in versions, {{age: share, ...}} or {{uniform: [0, 8]}}, not {spec!r}", KEY)
    try:
        shares = sorted((int(age), float(share)) for age, share in spec.items())
    except (TypeError, ValueError):
        raise ConfigError(f"{KEY}: ages are whole numbers and shares numbers, not {spec!r}", KEY) from None
    if shares[0][0] < 0 or min(share for _, share in shares) <= 0 or abs(sum(s for _, s in shares) - 1.0) > 1e-6:
        raise ConfigError(f"{KEY}: ages are at least 0, shares above 0 and 1 in sum, not {spec!r}", KEY)
    return shares


def _is_age(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
