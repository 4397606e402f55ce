"""The game behind a stand-in for openenv-core's server: what `openenv_real` says, without the package. `THIS PORT`."""

import asyncio
import json
import sys

from aiohttp import WSMsgType, web

from tests.actors.environments.openenv_game import Game

MOST_SESSIONS = 2


def observed(hint: str, guesses: int, reward: float | None, done: bool) -> dict:
    data = {"observation": {"hint": hint, "guesses": guesses}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def failed(code: str, message: str) -> dict:
    return {"type": "error", "data": {"message": message, "code": code}}


async def answer(game: Game, message: dict) -> dict:
    data = message["data"]
    if message["type"] == "reset":
        return observed(game.reset(data.get("seed"), data.get("most", 7)), 0, None, False)
    try:
        number = int(data["number"])
    except ValueError:
        return failed("VALIDATION_ERROR", "Invalid message")
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
        return socket
    request.app["sessions"] += 1
    game = Game()
    try:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_json(await answer(game, json.loads(message.data)))
    finally:
        request.app["sessions"] -= 1
    return socket


if __name__ == "__main__":
    app = web.Application()
    app["sessions"] = 0
    app.router.add_get("/ws", session)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
