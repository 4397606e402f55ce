"""Environments of OpenEnv, behind their server: `reset` and `step` by its WebSocket protocol, a session per episode.
Code that a model writes runs in that server, which is responsible for the sandbox."""

import asyncio
import importlib.util
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

from areal_like.errors import EpisodeError, UserError
from areal_like.interfaces import Outcome
from areal_like.tasks.episodes import seed_of
from areal_like.types import Prompt

if TYPE_CHECKING:
    import aiohttp

UNCLEAR = "This is no valid action."
_PLACES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()
"""Sessions that an actor may open at each server. (Actors of an inline run have event loops of their own.)"""


class Invalid(Exception):
    """The server finds an action invalid."""


class OpenEnv:
    """server: the URL of a running OpenEnv server.
    action: the field of an action that gets the model's text. observation: the field of an observation that the
        model is shown; null: all of it, as JSON. options: more arguments of `reset`.
    sessions: episodes that one actor plays at once (at most the server's max_concurrent_envs ÷ actors); others wait.
    timeout: seconds for each of the server's answers.
    """

    limited = True

    def __init__(
        self,
        *,
        server: str,
        action: str,
        observation: str | None = None,
        options: Mapping[str, object] | None = None,
        sessions: Annotated[int, "[1, inf)"] = 1,
        timeout: Annotated[float, "(0, inf)"] = 60.0,
    ):
        if importlib.util.find_spec("aiohttp") is None:
            raise UserError("environment=openenv needs aiohttp: pip install 'areal_like[openenv]'")
        if not server.startswith(("http://", "https://")):
            raise UserError(
                f"environment.server: got {server!r}, expected the URL of a running server, http://HOST:PORT"
            )
        self._url, self._sessions, self._timeout = server.rstrip("/"), sessions, timeout
        self._action, self._observation, self._options = action, observation, dict(options or {})
        self._places: asyncio.Semaphore | None = None
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, prompt: Prompt) -> str:
        """Raises EpisodeError, as `step`."""
        import aiohttp

        of_servers = _PLACES.setdefault(asyncio.get_running_loop(), {})
        places = of_servers.setdefault(self._url, asyncio.Semaphore(self._sessions))
        await places.acquire()
        self._places, self._session = places, aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self._timeout):
                self._socket = await self._session.ws_connect(f"{self._url}/ws", max_msg_size=0)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError among them
            raise EpisodeError(f"{self._url} takes no session: {error!r}") from None
        return self._shown(await self._ask("reset", {"seed": seed_of(prompt)} | self._options))

    async def step(self, action: str) -> Outcome:
        try:
            answer = await self._ask("step", {self._action: action})
        except Invalid:
            return Outcome(UNCLEAR, 0.0, False)
        return Outcome(self._shown(answer), float(answer.get("reward") or 0.0), bool(answer.get("done")))

    async def close(self) -> None:
        """Ends the server's session, too, and frees its place: also where the caller is cancelled meanwhile."""
        session, places = self._session, self._places
        self._session = self._places = None
        if session is not None and places is not None:
            ending = asyncio.ensure_future(session.close())
            ending.add_done_callback(lambda _: places.release())
            await asyncio.shield(ending)

    def _shown(self, answer: Mapping[str, Any]) -> str:
        observation = answer.get("observation") or {}
        if self._observation is None:
            return json.dumps(observation, sort_keys=True)
        if self._observation not in observation:
            known = ", ".join(observation)
            raise UserError(f"environment.observation: there is no field {self._observation!r}; there are {known}")
        return str(observation[self._observation])

    async def _ask(self, kind: str, given: Mapping[str, object]) -> dict[str, Any]:
        """Raises Invalid, EpisodeError, and UserError where no action with this field is valid."""
        import aiohttp

        assert self._socket
        try:
            async with asyncio.timeout(self._timeout):
                await self._socket.send_str(json.dumps({"type": kind, "data": given}))
                received = await self._socket.receive()
        except TimeoutError:
            raise EpisodeError(f"the server has not answered {kind} after {self._timeout:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EpisodeError(f"the session broke in {kind}: {error!r}") from None
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise EpisodeError(f"the server closed the session in {kind}")
        answer = json.loads(received.data)
        data: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return data
        if data.get("code") != "VALIDATION_ERROR":
            raise EpisodeError(f"the server failed in {kind}: {data.get('code')}: {data.get('message')}")
        for problem in data.get("errors") or []:  # pydantic's
            if problem.get("type") in ("extra_forbidden", "missing"):
                raise UserError(f"environment.action={self._action} does not fit this server's actions: {problem}")
        raise Invalid
