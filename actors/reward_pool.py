"""Verifiers in processes of their own: a verifier that hangs or crashes costs its sample, not the actor.

A worker is `python -m actors.reward_pool`, started at the first call that needs it. It reads and writes lines of JSON:
in comes `{verifier, arguments, knobs, limit}`; out comes one line when the verifier is imported and one with its score
and the seconds that it took. Its processor time is limited, by a signal that ends the worker: a busy machine changes no
reward. Wall time is limited tenfold. A call that overruns its time, or is cancelled, kills the worker's process group;
the next call starts a new worker. Workers end with the actor: at the end of their input, by the parent-death signal
(Linux), which reaches one that hangs, too, and by a guard (`actors.child`), which kills all that a verifier has
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pkgutil import resolve_name
from typing import Any, TextIO

from actors.child import GUARD, die_with_parent
from areal_like.rewards import LARGEST_REWARD, MOST_PARTS, PART
from areal_like.tasks.sandbox import WALL

START_SECONDS = 60.0
"""Seconds that a worker has to start and import the verifier. Overrunning is an error, not a timeout (reward 0)."""
_LAST_LOOK_SECONDS = 0.05
"""Seconds to read an answer that may have come while this process was busy."""
LATEST = 1024
"""Number of calls for the quantiles."""


Verdict = float | dict[str, float] | None
"""A reward, its parts by name, or none."""
MACHINE = (ImportError, OSError)
"""Errors of the machine that a verifier runs on; the answer is not the cause."""


class PartedReward(float):
    """A reward, and its `parts` by name, before their weights."""

    parts: Mapping[str, float]


class RewardError(RuntimeError):
    """A verifier raised, returned no finite number, or crashed its worker."""

    redraw = True
    """Whether the sample is drawn again."""


class MachineError(RewardError):
    """The machine's fault, and not the answer's: no worker process, or an error of `MACHINE`."""


class NoReward(RewardError):
    """The verifier returned None: the sample is left out of its group."""

    redraw = False


class RewardTimeout(RewardError):
    """A verifier used up its processor time or, tenfold, the wall time."""


class RewardPool:
    """Scores with up to `workers` verifiers at a time. With 0 workers they run in this process without any limits, so
    that a person can debug a verifier.

    timeout: seconds of processor time of a call once it has begun; `wall` times as many of wall time. memory_limit:
    bytes of data a worker may have (RLIMIT_DATA).
    """

    def __init__(self, *, workers: int = 1, timeout: float = 10.0, memory_limit: int | None = None, wall: int = WALL):
        self._timeout, self._seconds = timeout, deque[float](maxlen=LATEST)
        self._workers: list[_Worker | _Here] = [_Worker(memory_limit, wall) for _ in range(workers)] or [_Here()]
        # Last in, first out: a worker that runs is used again before another is started.
        self._free: asyncio.LifoQueue[_Worker | _Here] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._closed = False
        self.answered = 0  # calls of any verifier that have ended, also of one that runs in this process
        self.calls = self.timeouts = self.errors = self.unverified = self.unscored = 0
        self.note = ""  # the newest error of any verifier

    async def score(
        self, verifier: str, *arguments: Any, knobs: Mapping[str, Any] | None = None, several: bool = False
    ) -> Any:
        """The reward (`Verdict`) that the function `verifier` ("module:name") gives for these arguments and knobs (JSON
        values), or numbers of `several`, one per answer of a group. Raises RewardTimeout, RewardError, and TypeError
        for an argument that JSON cannot carry."""
        request = {"verifier": verifier, "arguments": arguments, "knobs": knobs or {}, "several": several}
        line = json.dumps(request | {"limit": self._timeout}).encode() + b"\n"
        worker = await self._free.get()
        self.calls += 1
        try:
            if self._closed:
                raise MachineError("the reward pool is closed")
            score, seconds = await worker.call(line, verifier, self._timeout)
            self._seconds.append(seconds)
            return score
        except RewardTimeout:
            if several:  # it earns nobody 0: its group is dropped
                self.errors += 1
            else:
                self.timeouts += 1
            raise
        except RewardError:
            self.errors += 1
            raise
        finally:
            self._free.put_nowait(worker)

    def stats(self) -> dict[str, float]:
        """As in `actors.measures`: `timeouts` of single answers, `errors` (all other failures), quantiles of the latest
        answered calls. Without calls of the pool only numbers above 0."""
        import numpy as np  # here: a worker has no use for it, and starts in half the time

        names = ("answered", "calls", "timeouts", "errors", "unverified", "unscored")
        found = {f"sum:rewards/{name}": float(getattr(self, name)) for name in names}
        p50, p99 = np.quantile(self._seconds, [0.5, 0.99]) if self._seconds else (0.0, 0.0)
        found |= {"max:rewards/seconds_p50": float(p50), "max:rewards/seconds_p99": float(p99)}
        return found if self.calls else {key: value for key, value in found.items() if value}

    async def close(self) -> None:
        """Kill all workers. Calls under way, and later ones, raise RewardError."""
        self._closed = True
        for worker in self._workers:
            await worker.kill()


class _Worker:
    """One process, started when it is called and not running. Every failure of `call` kills it."""

    def __init__(self, memory_limit: int | None, wall: int) -> None:
        self._guard: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None
        self._memory_limit, self._wall = memory_limit, wall

    async def call(self, request: bytes, verifier: str, timeout: float) -> tuple[Any, float]:
        """Returns the score, or the scores, and the seconds that they took."""
        try:
            reply = await self._reply(self._begin(request), START_SECONDS, f"import of {verifier}", MachineError)
            if "error" not in reply:
                reply = await self._reply(self._read(), self._wall * timeout, verifier, RewardTimeout)
        except BaseException as error:
            ended = await self.kill()
            if isinstance(error, RewardError) and ended == -signal.SIGPROF:
                raise RewardTimeout(f"{verifier} took more than {timeout:g} s of processor time") from None
            raise
        if "error" in reply:  # the verifier's own failure: its worker is well and stays
            raise (MachineError if reply["machine"] else RewardError)(f"{verifier} raised {reply['error']}")
        return reply["score"], reply["seconds"]

    async def kill(self) -> int | None:
        """Returns how its process has ended, where one ran."""
        guard, process, self._guard, self._process = self._guard, self._process, None, None
        if guard is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)  # the number is its own until it is waited for
        if process is not None:
            await process.wait()
        if guard is not None:
            guard.communicate()
        return process.returncode if process else None

    async def _reply(
        self, reading: Coroutine[Any, Any, bytes], seconds: float, what: str, late: type[RewardError]
    ) -> dict[str, Any]:
        task = asyncio.ensure_future(reading)
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
            if not (done or (await asyncio.wait([task], timeout=_LAST_LOOK_SECONDS))[0]):
                raise late(f"{what} took more than {seconds:g} s")
            line = task.result()
        except ConnectionError:
            line = b""
        finally:
            task.cancel()
        if not line:
            raise (late if late is MachineError else RewardError)(f"{what}: its worker process died")
        return json.loads(line)

    async def _begin(self, request: bytes) -> bytes:
        """Send a request, starting a process if needed; returns the line that reports the import of the verifier."""
        if self._process is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-m", __name__, *([str(self._memory_limit)] if self._memory_limit else [])]
            self._guard = subprocess.Popen(GUARD, stdin=PIPE, process_group=0)
            environment, group = {**os.environ, "PYTHONPATH": paths}, self._guard.pid
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, env=environment, process_group=group
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


class _Here:
    """In place of a worker: this process."""

    async def call(self, request: bytes, verifier: str, timeout: float) -> tuple[Any, float]:
        begin, function = time.monotonic(), None
        try:
            function = resolve_name(verifier)
            return _score(function, json.loads(request)), time.monotonic() - begin
        except (Exception, SystemExit) as error:
            kind = MachineError if isinstance(error, MACHINE) else RewardError
            raise kind(f"{verifier} raised {worded(error, function)}") from error

    async def kill(self) -> None:
        """There is nothing to kill."""


def main() -> None:
    """The worker process: answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the actor decides what it means
    die_with_parent()  # the thread that started this process: the one of the actor's event loop
    if len(sys.argv) > 1:
        resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a verifier prints goes to the log, not among the replies
    for line in sys.stdin.buffer:
        _answer(json.loads(line), replies)


def _answer(request: dict[str, Any], replies: TextIO) -> None:
    reply: dict[str, Any]
    verifier = None
    try:
        verifier = resolve_name(request["verifier"])
        print("{}", file=replies, flush=True)
        begin = time.monotonic()
        signal.setitimer(signal.ITIMER_PROF, request["limit"])  # then SIGPROF ends this process
        reply = {"score": _score(verifier, request), "seconds": time.monotonic() - begin}
    except Exception as error:  # MemoryError among them
        reply = {"error": worded(error, verifier)[:1000], "machine": isinstance(error, MACHINE)}
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(reply), file=replies, flush=True)


def _score(verifier: Callable[..., Any], request: dict[str, Any]) -> Verdict | list[float]:
    found = verifier(*request["arguments"], **request["knobs"])
    if not request["several"]:
        return verdict(found)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        scores = [float(each) for each in found]
        if all(map(math.isfinite, scores)):
            return scores
    raise ValueError(f"it returned {found!r}, expected finite numbers")


def verdict(found: Any) -> Verdict:
    """A verifier's result in plain numbers. Raises ValueError."""
    if found is None:
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        parts = found if isinstance(found, Mapping) else {"reward": found}
        numbers = {name: float(part) for name, part in parts.items() if re.search(PART, name)}
        if 0 < len(numbers) == len(parts) <= MOST_PARTS and all(map(math.isfinite, numbers.values())):
            return numbers if isinstance(found, Mapping) else numbers["reward"]
    raise ValueError(f"it returned {found!r}, expected a finite number, {{name: number}} of its parts, or None")


def weighted(found: Verdict, weights: Mapping[str, float], verifier: str) -> PartedReward:
    """The sum of the parts, each times its weight (1, if not given). Raises NoReward, RewardError."""
    if found is None:
        raise NoReward(f"{verifier} returned None")
    parts = found if isinstance(found, dict) else {}
    if missing := weights.keys() - parts.keys():
        got = f"parts of the reward {', '.join(parts)}" if parts else "a number without parts"
        raise RewardError(f"reward_weights name {', '.join(sorted(missing))}; {verifier} returned {got}")
    total = sum(weights.get(name, 1.0) * part for name, part in parts.items())
    score = PartedReward(found if isinstance(found, float) else total)
    score.parts = parts
    if not max(map(abs, (score, *parts.values()))) <= LARGEST_REWARD:
        raise RewardError(f"{verifier} returned {found}, expected finite numbers in float32")
    return score


def worded(error: BaseException, verifier: Any) -> str:
    """An error, with the last line that it has passed of the verifier's own file, or the verifier's first one."""
    code = getattr(getattr(verifier, "func", verifier), "__code__", None)
    if code is None:
        return f"{type(error).__name__}: {error}"
    passed = [
        line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == code.co_filename
    ]
    return f"{type(error).__name__} at {code.co_filename}:{[code.co_firstlineno, *passed][-1]}: {error}"


if __name__ == "__main__":
    main()
