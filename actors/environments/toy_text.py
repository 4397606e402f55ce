"""How observations of gymnasium's environments become text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from areal_like.errors import UserError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TAXI_PLACES = ("red", "green", "yellow", "blue")


def written(world: Any, observation: Any) -> str:
    """Text as it stands; gymnasium's toy text as below; what an environment renders as text ("ansi"), without colours;
    a dict as lines `key: value`; numbers and tuples of them. Raises UserError for pictures and the like."""
    spec = world.unwrapped.spec
    own = WRITTEN.get(spec.name if spec else "")
    if own:
        return own(world.unwrapped, observation)
    if world.render_mode == "ansi":
        return _COLOURS.sub("", world.render()).strip("\n")
    return plain(observation)


def plain(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {plain(value)}" for key, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(plain(each) for each in observation)
    if isinstance(observation, str | int | float | np.integer | np.floating):
        return str(observation)
    raise UserError(f"an observation is {type(observation)}: name a function that writes it down (environment.shows)")


def frozen_lake(world: Any, observation: int) -> str:
    """The map, with P where the player stands."""
    rows = [b"".join(row).decode() for row in world.desc]
    row, column = divmod(int(observation), world.ncol)
    rows[row] = f"{rows[row][:column]}P{rows[row][column + 1 :]}"
    return "\n".join(rows)


def taxi(world: Any, observation: int) -> str:
    """The map, and in words what it shows by colours."""
    row, column, passenger, destination = world.decode(observation)
    grid = "\n".join(b"".join(line).decode() for line in world.desc)
    where = "in the taxi" if passenger == len(_TAXI_PLACES) else f"at {_TAXI_PLACES[passenger]}"
    corners = ", ".join(f"{name} {place}" for name, place in zip(_TAXI_PLACES, world.locs, strict=True))
    return (
        f"{grid}\nPlaces (row, column): {corners}\nThe taxi is at {(int(row), int(column))}, the passenger {where}. "
        f"Destination: {_TAXI_PLACES[destination]}."
    )


def blackjack(world: Any, observation: tuple[int, int, int]) -> str:
    own, dealer, ace = observation
    return f"Your cards: {own}{' with a usable ace' if ace else ''}. The dealer shows {dealer}."


WRITTEN: dict[str, Callable[[Any, Any], str]] = {"FrozenLake": frozen_lake, "Taxi": taxi, "Blackjack": blackjack}
