"""A server that speaks as SGLang's does, as far as the engine asks, with a scheduler in a process of its own: each can
be stopped. `python -m tests.actors.sglang_stand_in ... --host HOST --port PORT`.

The scheduler makes one token for each request per forward pass of `STAND_IN_STEP` seconds, and answers a probe after
the next pass. While it stands still, only the calls that need it get no answer. `STAND_IN_HANG` names a path that is
answered twice, as at a start, and never again.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from typing import Any

from aiohttp import web

STEP = float(os.environ.get("STAND_IN_STEP", "0.01"))
HANG = os.environ.get("STAND_IN_HANG", "")
LOADERS = sys.argv[sys.argv.index("--custom-weight-loader") + 1 :][:1]
SCHEDULER = """
import sys, threading, time
left, come = {}, []
threading.Thread(target=lambda: come.extend(map(str.split, sys.stdin)), daemon=True).start()
while True:
    time.sleep(float(sys.argv[1]))
    for number in list(left):
        left[number] -= 1
        if not left[number]:
            del left[number]
            print(number, flush=True)
    while come:
        number, count = come.pop(0)
        left[number] = int(count)
"""
"""Lines in: id, tokens to make. Lines out: id. One process, one loop, as SGLang's."""


class StandIn:
    def __init__(self) -> None:
        self.label, self.asked = "default", 0
        self.answers: dict[int, asyncio.Future[None]] = {}
        self.seen = Counter[str]()
        self.scheduler: Any = None

    async def begin(self, app: web.Application) -> None:
        command = [sys.executable, "-c", SCHEDULER, str(STEP)]
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        self.scheduler = await asyncio.create_subprocess_exec(*command, **pipes)
        self.listening = asyncio.create_task(self.listen())

    async def listen(self) -> None:
        while line := await self.scheduler.stdout.readline():
            self.answers.pop(int(line)).set_result(None)

    async def passes(self, count: int) -> None:
        """Wait until the scheduler has made this many forward passes."""
        self.asked += 1
        answer = self.answers[self.asked] = asyncio.get_running_loop().create_future()
        self.scheduler.stdin.write(f"{self.asked} {count}\n".encode())
        await answer

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        body = await request.json() if request.method == "POST" else {}
        self.seen[path] += 1
        if path == HANG and self.seen[path] > 2:
            await asyncio.Event().wait()
        if path in ("/health", "/health_generate", "/begin_weight_update"):
            await self.passes(1)
        if path == "/update_weights_from_tensor":
            return web.json_response({"success": True, "message": body["serialized_named_tensors"][0]})
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/generate":
            return web.json_response(await self.generate(body["sampling_params"]["max_new_tokens"]))
        if path == "/metrics":
            return web.Response(text="")
        return web.json_response({"custom_weight_loader": LOADERS, "scheduler": self.scheduler.pid})

    async def generate(self, count: int) -> dict[str, Any]:
        await self.passes(count)
        spans = [{"version": self.label, "start": 0, "end": count}]
        rows = [[-0.5, 7, None]] * count
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": rows, "weight_versions": spans}
        return {"output_ids": [7] * count, "meta_info": meta}


def main() -> None:
    stand_in, app = StandIn(), web.Application()
    app.on_startup.append(stand_in.begin)
    app.router.add_route("*", "/{path:.*}", stand_in.handle)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), print=None)


if __name__ == "__main__":
    main()
