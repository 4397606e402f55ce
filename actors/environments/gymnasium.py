"""Environments of gymnasium (Towers et al., arXiv 2407.17032) as worlds of text: observations become text, and the
model's text is searched for the name of an action. It is never evaluated.

Replayable: an episode follows from its seed and the actions, as gymnasium asks of its environments. A resume repeats
them. Needs `pip install gymnasium`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any

from areal_like.config.registry import check_function
from areal_like.errors import UserError
from areal_like.tasks.episodes import seed_of
from areal_like.types import Outcome, Prompt

Shows = Callable[[Any, Any], str]
"""(environment, observation) -> text."""
ACTIONS: dict[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Name of an environment, without its version → its actions, in their order."""


class Gymnasium:
    """env: an id, e.g. FrozenLake-v1; or "module:function" of your own, which makes an environment from the episode's
        seed and `options`. options: keyword arguments of `gymnasium.make`, or of that function.
    actions: names of the actions, in their order; null: those of gymnasium's toy text, else their numbers. The one
        that the model names last is taken. An environment whose actions are text gets all that the model says.
    shows: "module:function" of (environment, observation), which writes an observation down; null: see
        `actors.environments.toy_text`.
    unclear: shown where no action is named; the turn is lost. null: the names of the actions.
    """

    def __init__(
        self,
        *,
        env: str,
        options: Mapping[str, object] | None = None,
        actions: Sequence[str] | None = None,
        shows: str | None = None,
        unclear: str | None = None,
    ):
        if importlib.util.find_spec("gymnasium") is None:
            raise UserError("environment=gymnasium needs the package: pip install 'areal_like[gymnasium]'")
        from actors.environments.toy_text import written

        self._name, self._options = env, json.dumps(dict(options or {}), sort_keys=True)
        self._actions = _names_of(env, self._options, tuple(actions) if actions else None)
        self._shows = written if shows is None else _function("environment.shows", shows)
        self._unclear = f"Say one of: {', '.join(self._actions)}" if unclear is None else unclear
        self._world: Any = None

    def reset(self, prompt: Prompt) -> str:
        seed = seed_of(prompt)
        self._world = _made(self._name, self._options, seed)
        observation, _ = self._world.reset(seed=seed)
        return self._shows(self._world, observation)

    def step(self, action: str) -> Outcome:
        chosen = parsed(action, self._actions) if self._actions else action
        if chosen is None or not self._world.action_space.contains(chosen):
            return Outcome(self._unclear, 0.0, False)
        observation, reward, terminated, truncated, _ = self._world.step(chosen)
        done = bool(terminated or truncated)
        return Outcome("" if done else self._shows(self._world, observation), float(reward), done)

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


def parsed(said: str, names: Sequence[str]) -> int | None:
    """The number of the action that is named last in a text, as a whole word, in any case; None: none is."""
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", said, re.IGNORECASE)
    return [name.lower() for name in names].index(found[-1].lower()) if found else None


def _made(name: str, options: str, seed: int) -> Any:
    """An environment; gymnasium's own are rendered as text if they can be."""
    import gymnasium

    known = json.loads(options)
    if is_function(name):
        return _function("environment.env", name)(seed, **known)
    if _renders_text(name):
        known = {"render_mode": "ansi"} | known
    return gymnasium.make(name, **known)


def _function(key: str, path: str) -> Callable[..., Any]:
    """Raises ConfigError where there is none."""
    check_function(key, path)
    found: Callable[..., Any] = resolve_name(path)
    return found


def is_function(name: str) -> bool:
    """Is it "module:function"? gymnasium's "module:Id-v0" has a version."""
    return ":" in name and "-" not in name


@lru_cache(maxsize=64)
def _renders_text(name: str) -> bool:
    from gymnasium.envs.registration import load_env_creator, spec

    made = spec(name).entry_point
    kind = load_env_creator(made) if isinstance(made, str) else made
    return "ansi" in getattr(kind, "metadata", {}).get("render_modes", ())


@lru_cache(maxsize=64)
def _names_of(name: str, options: str, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the actions; none where they are text. Raises UserError for an environment that can't be made, or
    whose actions can't be named."""
    from gymnasium import error, spaces

    try:
        world = _made(name, options, 0)
    except (error.Error, TypeError, ValueError, ImportError) as problem:
        raise UserError(f"environment.env={name} can't be made: {problem}") from problem
    actions = world.action_space
    world.close()
    if isinstance(actions, spaces.Text):
        return ()
    if not isinstance(actions, spaces.Discrete) or actions.start != 0:
        raise UserError(f"environment.env={name}: its actions are {actions}; they must be Discrete from 0 on, or Text")
    base = re.sub(r"-v\d+$", "", name.rpartition(":")[2])
    names = wanted or ACTIONS.get(base) or tuple(str(number) for number in range(actions.n))
    if len(names) != actions.n or len({each.lower() for each in names}) != actions.n:
        raise UserError(f"environment.actions: {name} has {actions.n} actions, and these are {', '.join(names)}")
    return names
