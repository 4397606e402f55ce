"""The game behind a stand-in for the server of openenv-core 0.3.0 (`websocket_endpoint` in its
core/env_server/http_server.py): the answers of `openenv_real`, without the package. `THIS PORT`."""

import asyncio
import json
import sys

from aiohttp import WSMsgType, web

from tests.actors.environments.openenv_game import Game

MOST_SESSIONS = 2


def observed(hint: str, guesses: int, reward: float | None, done: bool) -> dict:
    data = {"observation": {"hint": hint, "guesses": guesses}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def failed(code: str, message: str, **more: object) -> dict:
    return {"type": "error", "data": {"message": message, "code": code} | more}


def problems_of(action: dict) -> list[dict]:
    """As pydantic reports them, of an action {number: int, metadata: dict} that may have no other fields."""
    found = [] if "number" in action else [("missing", "number")]
    try:
        int(action.get("number", 0))
    except ValueError:
        found.append(("int_parsing", "number"))
    found += [("extra_forbidden", name) for name in action if name not in ("number", "metadata")]
    return [{"type": kind, "loc": [name]} for kind, name in found]


async def answer(game: Game, text: str) -> dict:
    try:
        message = json.loads(text)
    except ValueError as error:
        return failed("INVALID_JSON", f"Invalid JSON: {error}")
    kind, data = message.get("type", ""), message.get("data", {})
    if kind == "reset":
        return observed(game.reset(data.get("seed"), data.get("most", 7)), 0, None, False)
    if kind == "state" and "data" in message:
        return failed("VALIDATION_ERROR", "Invalid message", errors=[{"type": "extra_forbidden", "loc": ["data"]}])
    if kind == "state":
        return {"type": "state", "data": {"episode_id": None, "step_count": game.guesses}}
    if kind != "step":
        return failed("UNKNOWN_TYPE", f"Unknown message type: {kind}")
    if problems := problems_of(data):
        return failed("VALIDATION_ERROR", "Invalid message", errors=problems)
    number = int(data["number"])
    try:
        hint, reward, done = await asyncio.to_thread(game.step, number)
    except RuntimeError as error:
        return failed("EXECUTION_ERROR", str(error))
    return observed(hint, game.guesses, reward, done)


async def session(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    if request.app["sessions"] == MOST_SESSIONS:
        await socket.send_json(failed("CAPACITY_REACHED", "Server at capacity"))
        await socket.close()
        return socket
    request.app["sessions"] += 1
    game = Game()
    try:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                if message.data == '{"type": "close"}':
                    break
                await socket.send_json(await answer(game, message.data))
    finally:
        request.app["sessions"] -= 1
    return socket


if __name__ == "__main__":
    app = web.Application()
    app["sessions"] = 0
    app.router.add_get("/ws", session)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
