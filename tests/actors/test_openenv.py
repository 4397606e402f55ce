"""environment=openenv against a server of openenv-core: episodes, invalid actions, failures."""

import asyncio
import contextlib
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from actors.child import Child, free_port
from actors.openenv import UNCLEAR, OpenEnv
from areal_like.errors import EpisodeError, UserError
from areal_like.interfaces import Outcome
from areal_like.types import Prompt

pytest.importorskip("openenv", reason="openenv-core is not installed (the extra dev-more)")
START_SECONDS = 200.0
"""The package is large: its first import takes half a minute where four others compile theirs."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server."""
    port, deadline = free_port(), time.monotonic() + START_SECONDS
    child = Child([sys.executable, "-m", "uvicorn", "tests.actors.openenv_server:app", "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health")
                break
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield url
    finally:
        child.kill()


async def episode(url: str, *actions: str, seed: int = 2, **knobs: Any) -> list[Any]:
    """What is shown first, and the outcome of each action."""
    world = OpenEnv(**{"server": url, "action": "number", "observation": "hint", "sessions": 2} | knobs)
    try:
        shown = await world.reset(Prompt(np.array([1], np.int32), seed, 8))
        return [shown, *[await world.step(action) for action in actions]]
    finally:
        await world.close()


def played(url: str, *actions: str, **knobs: Any) -> list[Any]:
    return asyncio.run(episode(url, *actions, **knobs))


def test_episodes_wait_for_a_place_on_the_server(server: str) -> None:
    async def games() -> list[list[Any]]:
        return await asyncio.gather(*(episode(server, "5", "1", "3", seed=seed) for seed in (2, 3, 2, 0)))

    first, second, again, fourth = asyncio.run(games())
    assert first == again == [
        "1 to 7", Outcome("lower", 0.0, False), Outcome("higher", 0.0, False), Outcome("right", 1.0, True),
    ]  # fmt: skip
    assert second[-1] == Outcome("higher", 0.0, True) and fourth[2] == Outcome("right", 1.0, True)


def test_options_reach_the_environment_and_a_whole_observation_is_json(server: str) -> None:
    shown, (after, *_) = played(server, "1", options={"most": 3}, observation=None)
    assert (shown, after) == ('{"guesses": 0, "hint": "1 to 3"}', '{"guesses": 1, "hint": "higher"}')


@pytest.mark.parametrize("text", ["__import__('os')._exit(1)", '3", "metadata": {"number": 3}, "x": "', ""])
def test_text_that_fits_no_field_is_a_lost_turn(server: str, text: str) -> None:
    """Neither code nor JSON in it gets out of the field."""
    assert played(server, text, "3")[1:] == [Outcome(UNCLEAR, 0.0, False), Outcome("right", 1.0, True)]


@pytest.mark.parametrize(("key", "knobs"), [("action", {"action": "word"}), ("observation", {"observation": "word"})])
def test_other_fields_are_errors_of_the_config(server: str, key: str, knobs: dict[str, str]) -> None:
    with pytest.raises(UserError, match=rf"environment\.{key}"):
        played(server, "1", **knobs)


@pytest.mark.parametrize(("action", "timeout"), [("99", 60.0), ("98", 0.5)])
def test_failures_of_the_server_are_not_the_models(server: str, action: str, timeout: float) -> None:
    with pytest.raises(EpisodeError):
        played(server, action, timeout=timeout)


def test_a_server_that_ends_is_not_the_models_fault(server: str) -> None:
    """The last test of this server."""
    for _ in range(2):
        with pytest.raises(EpisodeError):
            played(server, "97")
