"""Environments of OpenEnv, behind their server: `reset` and `step` by its WebSocket protocol, a session per episode.

Only the protocol is spoken here: the package brings a web interface and tool servers, and the environments bring their
own requirements, so a server may run in another Python, or in a container. Code that a model writes runs in such a
server or not at all: the server is responsible for the sandbox.

Replayable if the environment is: `reset` gets the episode's seed. If it is not (it reads a clock, or the network), an
interrupted sample is repeated as long as the answers are the same, and sampled anew from the first other one on.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from actors.environments.servers import EnvironmentServer, command_of, is_app, is_url, server_of
from areal_like.errors import EpisodeError, UserError
from areal_like.tasks.episodes import seed_of
from areal_like.types import Outcome, Prompt

if TYPE_CHECKING:
    import aiohttp

UNCLEAR = "This is no valid action."


class Invalid(Exception):
    """The server finds an action invalid, for these reasons."""

    def __init__(self, problems: list[dict[str, Any]]):
        super().__init__(problems)
        self.problems = problems


class OpenEnv:
    """server: "module:app" of an OpenEnv server, which each actor starts with uvicorn and ends; or a command that
        starts one, as a list with `{port}` for its port; or the URL of one that runs.
    action: the field of an action that gets the model's text. observation: the field of an observation that the
        model is shown; null: all of it, as JSON. state: a field of the server's state (`step_count`) that the model
        is shown below each observation; null: none. options: more arguments of `reset`.
    sessions: episodes that a server plays at once (its max_concurrent_envs); others wait.
    timeout: seconds for the start of a server, and for each of its answers.
    """

    limited = True

    def __init__(
        self,
        *,
        server: str | Sequence[str],
        action: str,
        observation: str | None = None,
        state: str | None = None,
        options: Mapping[str, object] | None = None,
        sessions: Annotated[int, "[1, inf)"] = 1,
        timeout: Annotated[float, "(0, inf)"] = 60.0,
    ):
        if importlib.util.find_spec("aiohttp") is None:
            raise UserError("environment=openenv needs aiohttp: pip install 'areal_like[openenv]'")
        program = command_of(server)[0]
        if not is_url(server) and shutil.which(program) is None:
            raise UserError(f"environment.server: there is no program {program!r} to start")
        for needed in ("uvicorn", server.partition(":")[0].partition(".")[0]) if is_app(server) else ():
            if needed and importlib.util.find_spec(needed) is None:
                raise UserError(f"environment.server={server}: there is no module {needed!r} in this Python")
        self._knobs = server, sessions
        self._action, self._observation, self._options = action, observation, dict(options or {})
        self._state = state
        self._timeout = timeout
        self._server: EnvironmentServer | None = None
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, prompt: Prompt) -> str:
        """Raises EpisodeError, as `step`."""
        import aiohttp

        server = server_of(*self._knobs)
        await server.places.acquire()
        self._server, self._session = server, aiohttp.ClientSession()
        self._socket = await self._connected(server, self._session)
        answer = await self._ask("reset", {"seed": seed_of(prompt)} | self._options)
        return self._shown(answer) + await self._stated()

    async def _connected(
        self, server: EnvironmentServer, session: aiohttp.ClientSession
    ) -> aiohttp.ClientWebSocketResponse:
        """A new session of the server, which is started again if it has died."""
        import aiohttp

        while True:
            url = await server.url(self._timeout)
            try:
                async with asyncio.timeout(self._timeout):
                    return await session.ws_connect(f"{url}/ws", max_msg_size=0)
            except (aiohttp.ClientError, OSError) as error:
                if not await server.is_ending():
                    raise EpisodeError(f"{url} takes no session: {error!r}") from None

    async def step(self, action: str) -> Outcome:
        try:
            answer = await self._ask("step", {self._action: action})
        except Invalid as error:
            self._check(error.problems)
            return Outcome(UNCLEAR, 0.0, False)
        done = bool(answer.get("done"))
        shown = self._shown(answer) + ("" if done else await self._stated())
        return Outcome(shown, float(answer.get("reward") or 0.0), done)

    def _check(self, problems: list[dict[str, Any]]) -> None:
        """Raise UserError where no action of ours would be valid: its field is not the server's, or others are missing
        (pydantic's errors, as the server passes them on)."""
        for problem in problems:
            place = ".".join(map(str, problem.get("loc", ())))
            if problem.get("type") in ("extra_forbidden", "missing"):
                wrong = "there is no such field" if problem["type"] == "extra_forbidden" else f"{place} is needed, too"
                raise UserError(f"environment.action={self._action}: in an action of this server {wrong}")

    async def close(self) -> None:
        """Ends the server's session, too, and frees its place: also where the caller is cancelled meanwhile."""
        session, server = self._session, self._server
        self._session = self._server = None
        if server is not None:
            ending = asyncio.ensure_future(_ended(session))
            ending.add_done_callback(lambda _: server.places.release())
            await asyncio.shield(ending)

    def _shown(self, answer: Mapping[str, Any]) -> str:
        observation = answer.get("observation") or {}
        if self._observation is None:
            return json.dumps(observation, sort_keys=True)
        return str(_field(observation, self._observation, "environment.observation"))

    async def _stated(self) -> str:
        """What the model is shown of the server's state."""
        if self._state is None:
            return ""
        return f"\n{self._state}: {_field(await self._ask('state'), self._state, 'environment.state')}"

    async def _ask(self, kind: str, given: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Raises Invalid where the server finds that `data` are not valid, and EpisodeError."""
        import aiohttp

        assert self._socket
        try:
            async with asyncio.timeout(self._timeout):
                message = {"type": kind} | ({} if given is None else {"data": given})
                await self._socket.send_str(json.dumps(message))
                received = await self._socket.receive()
        except TimeoutError:
            raise EpisodeError(f"the server has not answered {kind} after {self._timeout:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EpisodeError(f"the session broke in {kind}: {error!r}") from None
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise EpisodeError(f"the server closed the session in {kind}")
        answer = json.loads(received.data)
        data = answer.get("data") or {}
        if answer.get("type") != "error":
            return dict(data)
        if data.get("code") == "VALIDATION_ERROR":
            raise Invalid(data.get("errors") or [])
        hint = " (environment.sessions is more than that)" if data.get("code") == "CAPACITY_REACHED" else ""
        raise EpisodeError(f"the server failed in {kind}: {data.get('code')}: {data.get('message')}{hint}")


def _field(answer: Mapping[str, Any], name: str, knob: str) -> Any:
    """Raises UserError where there is no such field."""
    if name not in answer:
        raise UserError(f"{knob}: there is no field {name!r}; there are {', '.join(answer)}")
    return answer[name]


async def _ended(session: aiohttp.ClientSession | None) -> None:
    if session is not None:
        await session.close()
