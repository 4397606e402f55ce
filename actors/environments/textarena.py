"""Games of TextArena (Guertler et al., arXiv 2504.11442) for one player. The model's text goes to the game as it is,
which looks for its move by a pattern: [5], [apple], [2 1 4 3]. It is never evaluated.

Replayable: the games draw from Python's global random numbers, so each episode has a state of its own, from its seed,
which stands there during its calls only. A resume repeats the moves. Needs `pip install textarena`; Hangman, Wordle
and other games with words also need data of NLTK on this machine. Nothing is downloaded here, unlike by the package.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from areal_like.config.registry import nearest
from areal_like.errors import UserError
from areal_like.tasks.episodes import seed_of
from areal_like.types import Outcome, Prompt

LARGE = 1000
"""Members of a collection, such as a list of words, from which on a game's copies share it: games do not change it."""


class TextArena:
    """game: its name, e.g. GuessTheNumber-v0. options: keyword arguments of the game, e.g. {max_number: 10}.
    rules: show the game's own rules first; false: the task's prompt says them, perhaps in fewer words.

    A move without brackets gets them, where TextArena does that by default. The reward is the game's, in the last turn.
    """

    def __init__(self, *, game: str, options: Mapping[str, object] | None = None, rules: bool = True):
        if importlib.util.find_spec("textarena") is None:
            raise UserError("environment=textarena needs the package: pip install 'areal_like[textarena]'")
        made, self._in_brackets = _made(game, json.dumps(dict(options or {}), sort_keys=True))
        self._game = copy.deepcopy(made, {id(each): each for each in _large(made)})
        self._rules, self._drawn = rules, random.Random()

    def reset(self, prompt: Prompt) -> str:
        seed = seed_of(prompt)
        self._drawn.seed(seed)
        with self._own_numbers():
            self._game.reset(num_players=1, seed=seed)
            return self._news()

    def step(self, action: str) -> Outcome:
        bare = self._in_brackets and "[" not in action and "]" not in action
        with self._own_numbers():
            done, _ = self._game.step(action=f"[{action}]" if bare else action)
            if not done:
                return Outcome(self._news(), 0.0, False)
            rewards, _ = self._game.close()
        reward = (rewards or {}).get(0)
        return Outcome("", float(reward) if isinstance(reward, int | float) else 0.0, True)  # or a reason, by mistake

    def _news(self) -> str:
        """What the game has said since the last time."""
        from textarena import ObservationType

        wanted = set(ObservationType) - {ObservationType.PLAYER_ACTION, None if self._rules else ObservationType.PROMPT}
        _, messages = self._game.get_observation()
        return "\n".join(text for _, text, kind in messages if kind in wanted)  # some mix up the fields of moves

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Python's global random numbers are this episode's."""
        others = random.getstate()
        random.setstate(self._drawn.getstate())
        try:
            yield
        finally:
            self._drawn.setstate(random.getstate())
            random.setstate(others)


@lru_cache(maxsize=16)
def _made(name: str, options: str) -> tuple[Any, bool]:
    """A game that was never played, for copies, and whether moves get brackets. Raises UserError."""
    import nltk

    with patch.object(nltk, "download", lambda *_, **__: True):
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        name = name.removesuffix("-raw").removesuffix("-train")
        if f"{name}-raw" not in ENV_REGISTRY:
            known = [each.removesuffix("-raw") for each in ENV_REGISTRY if each.endswith("-raw")]
            raise UserError(f"environment.game: TextArena has no game {name!r}.{nearest(name, known)}")
        if not _is_for_one(ENV_REGISTRY[name].entry_point):
            raise UserError(f"environment.game: {name} is not a game for one player")
        try:
            made = textarena.make(f"{name}-raw", **json.loads(options))
        except LookupError as error:
            wanted = re.search(r"nltk\.download\('(\w+)'\)", str(error))
            data = wanted[1] if wanted else "all"
            raise UserError(f"environment.game: {name} needs data of NLTK: python -m nltk.downloader {data}") from None
        except (TypeError, ValueError, SyntaxError) as error:
            raise UserError(f"environment.options: {name} can't be made with {options}: {error}") from error
    wrappers = ENV_REGISTRY[name].default_wrappers or ()
    return made, any(each.__name__ == "ActionFormattingWrapper" for each in wrappers)


def _is_for_one(entry_point: str) -> bool:
    """By the source: some games for several players never start with one, and do not say so."""
    found = importlib.util.find_spec(entry_point.partition(":")[0])
    source = found.origin if found else None
    return source is not None and "SinglePlayerState" in Path(source).read_text(encoding="utf-8")


def _large(thing: object) -> Iterator[object]:
    """Its large collections, and those of the objects that it has."""
    for value in vars(thing).values():
        if isinstance(value, list | tuple | dict | set | frozenset):
            if len(value) >= LARGE:
                yield value
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            yield from _large(value)
