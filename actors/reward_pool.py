"""Verifiers in processes of their own: a verifier that hangs or crashes costs its sample, not the actor.

A worker is `python -m actors.reward_pool`, started at the first call that needs it. It speaks lines of JSON over its
pipes: in comes `{verifier, arguments}`; out comes one line when the verifier is imported and one with its score. Per
worker one call is under way. A call that overruns its time, or is cancelled, kills the worker; the next call starts
a new one. Workers end with the actor however it ends: at the end of their input, and on Linux by the kernel's
parent-death signal, which also reaches a worker that is stuck in a verifier.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from pkgutil import resolve_name
from typing import Any, TextIO

START_SECONDS = 60.0
"""Time that a worker has to start and to import the verifier; not part of the verifier's own."""
_PR_SET_PDEATHSIG = 1


class RewardError(RuntimeError):
    """A verifier raised, returned no finite number, or took its worker down with it."""


class RewardTimeout(RewardError):
    """A verifier did not answer in time."""


class RewardPool:
    """Scores with up to `workers` verifiers at a time, each with `timeout` seconds once it has begun.

    `calls`, `timeouts` and `errors` (timeouts excluded) count since the start.
    """

    def __init__(self, *, workers: int = 1, timeout: float = 10.0):
        if workers < 1 or timeout <= 0:
            raise ValueError(f"reward pool: want workers >= 1 and timeout > 0, got {workers} and {timeout}")
        self._workers = [_Worker() for _ in range(workers)]
        # Last in, first out: a worker that runs is used again before another is started.
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._timeout = timeout
        self._closed = False
        self.calls = self.timeouts = self.errors = 0

    async def score(self, verifier: str, *arguments: Any) -> float:
        """The number that the function `verifier` ("module:name") returns for these arguments (JSON values).

        Waits for a free worker for as long as the calls before it may take. Raises RewardTimeout, RewardError, and
        TypeError for an argument that JSON cannot carry.
        """
        request = json.dumps({"verifier": verifier, "arguments": arguments}).encode() + b"\n"
        worker = await self._free.get()
        self.calls += 1
        try:
            if self._closed:
                raise RewardError("the reward pool is closed")
            return await worker.call(request, verifier, self._timeout)
        except RewardTimeout:
            self.timeouts += 1
            raise
        except RewardError:
            self.errors += 1
            raise
        finally:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        """Kill all workers. Calls under way, and later ones, raise RewardError."""
        self._closed = True
        for worker in self._workers:
            await worker.kill()


class _Worker:
    """One process, started when it is called and not running. Any way out of `call` but a reply kills it."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def call(self, request: bytes, verifier: str, timeout: float) -> float:
        try:
            reply = await self._reply(self._begin(request), START_SECONDS, f"import of {verifier}")
            if "error" not in reply:
                reply = await self._reply(self._read(), timeout, verifier)
        except BaseException:
            await self.kill()
            raise
        if "error" in reply:  # the verifier's own failure: its worker is well and stays
            raise RewardError(f"{verifier} raised {reply['error']}")
        return reply["score"]

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _reply(self, reading: Coroutine[Any, Any, bytes], seconds: float, what: str) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(reading, seconds)
        except TimeoutError:
            raise RewardTimeout(f"{what} took more than {seconds:g} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise RewardError(f"{what}: its worker process died")
        return json.loads(line)

    async def _begin(self, request: bytes) -> bytes:
        """Send a request, to a new process if need be; returns the line that says that the verifier is imported."""
        if self._process is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE, env={**os.environ, "PYTHONPATH": paths}
            )
        assert self._process.stdin is not None
        self._process.stdin.write(request)
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> bytes:
        if self._process is None:  # closed meanwhile
            return b""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()


def main() -> None:
    """The worker process: answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the actor decides what it means
    if sys.platform == "linux":
        # "Parent" is the thread that started this process: the one of the actor's event loop.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a verifier prints goes to the log, not among the replies
    for line in sys.stdin.buffer:
        _answer(json.loads(line), replies)


def _answer(request: dict[str, Any], replies: TextIO) -> None:
    reply: dict[str, Any]
    try:
        verifier = resolve_name(request["verifier"])
        print("{}", file=replies, flush=True)
        score = float(verifier(*request["arguments"]))
        if not math.isfinite(score):
            raise ValueError(f"{score} is not finite")
        reply = {"score": score}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"[:1000]}
    print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
