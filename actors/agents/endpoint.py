"""The OpenAI-compatible endpoint: HTTP on this machine's loopback, one per event loop, for all samples of an actor.

A bearer token, the sample's key, identifies its agent. A client that hangs up ends its request, and its slot in the
engine is free at once. The first sample starts the server, which is a task of its event loop."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

try:
    from aiohttp import web
except ModuleNotFoundError:
    raise ValueError("workflow=agent needs more: pip install 'areal_like[openai]'") from None

from actors.agents import chat as bodies
from actors.agents.chat import RefusedRequest
from actors.agents.conversation import Conversation
from actors.measures import AGENTS
from areal_like.wire.bus import bypass_proxies

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 << 20
OWN_HOSTS = ("127.0.0.1", "localhost", "::1")
_SHUTDOWN_SECONDS = 1.0
RESPONSES = "ask for client.chat.completions.create(...); in the Agents SDK set_default_openai_api('chat_completions')"


class Endpoint:
    """Passes each request to the conversation of its key."""

    def __init__(self) -> None:
        self.base_url = ""
        self._conversations: dict[str, Conversation] = {}

    @contextmanager
    def serves(self, conversation: Conversation) -> Iterator[str]:
        """Serve a sample's agent; returns its key."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._conversations[key] = conversation
        try:
            yield key
        finally:
            del self._conversations[key]

    async def run(self, started: asyncio.Future[None]) -> None:
        """Serve until cancelled; `started` receives the start, or its failure."""
        bypass_proxies()
        handlers = {("POST", "/v1/chat/completions"): self._complete, ("GET", "/v1/models"): self._models}
        try:
            async with listening(handlers | {("*", "/{other:.*}"): self._other}) as self.base_url:
                started.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            started.set_exception(error)

    def _conversation(self, request: web.Request) -> Conversation:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = request.headers.get("X-Api-Key", bearer).strip()
        if key not in self._conversations:
            why = "this endpoint takes the key of a sample that has not ended, as a bearer token"
            raise RefusedRequest(401, why, code="invalid_api_key")
        return self._conversations[key]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        conversation = self._conversation(request)
        try:
            chat = bodies.parse(await body_of(request), conversation.terms)
            AGENTS["fields_ignored"] += chat.ignored
            return await answered(chat, conversation.ask(chat))
        except RefusedRequest as refused:
            conversation.refusal = str(refused)
            raise

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._conversation(request)
        return web.json_response(bodies.models(bodies.MODEL))

    async def _other(self, request: web.Request) -> web.StreamResponse:
        conversation = self._conversation(request)
        conversation.refusal = f"there is no {request.method} {request.path}, only /v1/chat/completions and /v1/models"
        if request.path.startswith("/v1/responses"):
            conversation.refusal += f": {RESPONSES}"
        raise RefusedRequest(404, conversation.refusal, code="unknown_url")


async def answered(chat: bodies.Chat, asked: Awaitable[bodies.ChatReply]) -> web.Response:
    """The answer in the form that the request asks for. Raises RefusedRequest."""
    reply = await asked
    if chat.stream:
        return web.Response(text=bodies.events(chat, reply), content_type="text/event-stream")
    return web.json_response(bodies.completion(chat, reply))


async def body_of(request: web.Request) -> object:
    """Raises RefusedRequest."""
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError among them
        raise RefusedRequest(400, f"the body is not JSON: {error}") from None


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(handlers: Mapping[tuple[str, str], Handler], port: int = 0) -> AsyncIterator[str]:
    """Serve (method, path) on the loopback in the block; yields the base URL. `port` 0: a free one. Raises OSError."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    for (method, path), handler in handlers.items():
        app.router.add_route(method, path, _answered(handler))
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS, handle_signals=False
    )
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def _answered(handler: Handler) -> Handler:
    """With errors as OpenAI writes them."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            if request.url.host not in OWN_HOSTS:  # a web page whose name points here
                raise RefusedRequest(403, f"Host: got {request.host}, expected one of {', '.join(OWN_HOSTS)}")
            return await handler(request)
        except RefusedRequest as error:
            refused = error
        except web.HTTPException as error:  # too large a body
            refused = RefusedRequest(error.status, error.text or error.reason)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            refused = RefusedRequest(500, f"the endpoint failed: {error!r}")
        AGENTS["refused"] += 1
        return web.json_response(refused.body, status=refused.status)

    return handle


_endpoints: dict[asyncio.AbstractEventLoop, tuple[Endpoint, asyncio.Future[None], asyncio.Task[None]]] = {}


async def endpoint() -> Endpoint:
    """The endpoint of this event loop, started if there is none. Raises OSError if it cannot listen."""
    loop = asyncio.get_running_loop()
    if loop not in _endpoints:
        made, started = Endpoint(), loop.create_future()
        task = loop.create_task(made.run(started), name="OpenAI endpoint")
        task.add_done_callback(lambda _: _endpoints.pop(loop, None))
        _endpoints[loop] = made, started, task
    found, started, _ = _endpoints[loop]
    await asyncio.shield(started)
    return found
