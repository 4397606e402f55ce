"""environment=openenv: the protocol, its server's life and its failures.

With a stand-in, and with a server of openenv-core where this Python has it (the extra `dev-more`), or another that
`OPENENV_PYTHON` names: both must reply the same (`TALK`).
"""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from actors.environments import servers
from actors.environments.openenv import UNCLEAR, OpenEnv
from actors.environments.servers import server_of
from areal_like.errors import EpisodeError, UserError
from areal_like.types import Outcome, Prompt

HERE = __name__.rpartition(".")[0]
STAND_IN = [sys.executable, "-m", f"{HERE}.openenv_stand_in", "{port}"]
PYTHON = os.environ.get("OPENENV_PYTHON") or (sys.executable if importlib.util.find_spec("openenv") else "")
REAL = [PYTHON, "-m", "uvicorn", f"{HERE}.openenv_real:app", "--port", "{port}"]
NO_PACKAGE = pytest.mark.skipif(
    not PYTHON,
    reason="openenv-core 0.3.0 is not installed (the extra dev-more): it does not go beside SGLang's pins; and "
    "OPENENV_PYTHON names no Python that has it",
)
Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]
START_SECONDS = 200.0
"""The package is large: its first import takes half a minute where four others compile theirs."""
KNOBS: dict[str, Any] = {"server": STAND_IN, "action": "number", "observation": "hint", "sessions": 2}
KNOBS["timeout"] = START_SECONDS


@pytest.fixture(params=["stand-in", pytest.param("openenv-core", marks=NO_PACKAGE)], scope="module")
def server(request: pytest.FixtureRequest) -> list[str]:
    return STAND_IN if request.param == "stand-in" else REAL


def prompt_of(seed: int) -> Prompt:
    return Prompt(np.array([1], np.int32), seed, 8)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a test's body in an actor's event loop, whose servers run as long as it does."""

    async def end() -> None:
        servers.close()

    with asyncio.Runner() as runner:
        yield lambda body: runner.run(asyncio.wait_for(body(), START_SECONDS + 20))
        runner.run(end())


async def played(*actions: str, seed: int = 2, **knobs: Any) -> list[Any]:
    """What is shown first, and the outcome of each action."""
    world = OpenEnv(**KNOBS | knobs)
    try:
        found: list[Any] = [await world.reset(prompt_of(seed))]
        for action in actions:
            found.append(await world.step(action))
        return found
    finally:
        await world.close()


def ours(server: list[str]) -> servers.EnvironmentServer:
    """The one that runs."""
    return servers._RUNNING[asyncio.get_running_loop()][tuple(server)]


def url_of(server: list[str]) -> str:
    return ours(server)._url


def test_episodes_are_played_two_at_a_time_on_one_server(run: Run, server: list[str]) -> None:
    async def body() -> None:
        games = [played("5", "1", "3", seed=seed, server=server) for seed in (2, 3, 2, 0)]
        first, second, again, fourth = await asyncio.gather(*games)
        assert first == again == [
            "1 to 7", Outcome("lower", 0.0, False), Outcome("higher", 0.0, False), Outcome("right", 1.0, True),
        ]  # fmt: skip
        assert second[-1] == Outcome("higher", 0.0, True) and fourth[2] == Outcome("right", 1.0, True)
        shown = await played("1", server=server, options={"most": 3}, observation=None)
        assert shown[0] == '{"guesses": 0, "hint": "1 to 3"}' and shown[1][0] == '{"guesses": 1, "hint": "higher"}'

    run(body)


def test_what_the_model_says_is_one_field_and_nothing_else(run: Run, server: list[str], tmp_path: Path) -> None:
    """Neither code nor JSON in it gets out of the field; what does not fit the field is a lost turn."""
    file = tmp_path / "out"
    says = [
        f"__import__('pathlib').Path('{file}').touch()",
        '3", "metadata": {"number": 3}, "x": "',
        '{"number": 3}',
        "",
    ]

    async def body() -> None:
        outcomes = (await played(*says, "3", server=server))[1:]
        assert outcomes == [Outcome(UNCLEAR, 0.0, False)] * len(says) + [Outcome("right", 1.0, True)]

    run(body)
    assert not file.exists()


TALK: list[tuple[object, object]] = [
    ("{", ("error", "INVALID_JSON", [])),
    ({"type": "look"}, ("error", "UNKNOWN_TYPE", [])),
    ({"type": "reset", "data": {"seed": 2, "most": 7, "unknown": 1}}, ({"hint": "1 to 7", "guesses": 0}, None, False)),
    ({"type": "step", "data": {"number": "5"}}, ({"hint": "lower", "guesses": 1}, 0.0, False)),
    ({"type": "step", "data": {"number": "five"}}, ("error", "VALIDATION_ERROR", [("int_parsing", ["number"])])),
    ({"type": "step", "data": {}}, ("error", "VALIDATION_ERROR", [("missing", ["number"])])),
    (
        {"type": "step", "data": {"number": 1, "message": "x"}},
        ("error", "VALIDATION_ERROR", [("extra_forbidden", ["message"])]),
    ),
    ({"type": "step", "data": {"number": 99}}, ("error", "EXECUTION_ERROR", [])),
    ({"type": "state"}, {"episode_id": None, "step_count": 1}),
    ({"type": "step", "data": {"number": 3, "metadata": {}}}, ({"hint": "right", "guesses": 2}, 1.0, True)),
    ({"type": "close"}, "closed"),
]
"""Messages of a client to a session, and the replies: the whole protocol, except tools over MCP."""


def heard(message: aiohttp.WSMessage) -> object:
    if message.type is not aiohttp.WSMsgType.TEXT:
        return "closed"
    answer = json.loads(message.data)
    data = answer["data"]
    if answer["type"] == "observation":
        return data["observation"], data["reward"], data["done"]
    if answer["type"] == "error":
        return "error", data["code"], [(each["type"], each["loc"]) for each in data.get("errors", [])]
    return data


def test_the_server_speaks_the_protocol(run: Run, server: list[str]) -> None:
    """The stand-in's replies equal the package's."""

    async def body() -> None:
        await played("1", server=server)
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url_of(server)}/ws") as socket:
            for said, answer in TALK:
                await socket.send_str(said if isinstance(said, str) else json.dumps(said))
                assert heard(await socket.receive()) == answer, said

    run(body)


def test_an_action_of_other_fields_is_the_configs_fault(run: Run, server: list[str]) -> None:
    with pytest.raises(UserError, match=r"environment\.action=word: in an action of this server number is needed, too"):
        run(lambda: played("1", server=server, action="word"))


def test_failures_of_the_server_are_not_the_models(run: Run, server: list[str]) -> None:
    async def body() -> None:
        with pytest.raises(EpisodeError, match="the game is broken"):
            await played("99", server=server)
        with pytest.raises(EpisodeError, match=r"has not answered step after 0\.5 s"):
            await played("98", server=server, timeout=0.5)

    run(body)


def test_a_server_that_dies_is_started_again_and_an_existing_one_is_joined(run: Run) -> None:
    async def body() -> None:
        with pytest.raises(EpisodeError, match=r"closed the session in step|broke in step"):
            await played("97")
        assert (await played("3"))[-1].done
        joined = server_of(url_of(STAND_IN), 1)
        assert (await played("3", server=url_of(STAND_IN), sessions=1))[-1].done
        assert joined._child is None and ours(STAND_IN)._child is not None

    run(body)
