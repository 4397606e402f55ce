"""The user's agent: an async function in this process, or a command in one of its own.

Both get the model's URL, a key (it identifies the sample), and the row: `{"messages": [...], "answer": ...}`.

- `"module:function"`: `await function(base_url, api_key, row)`. It shares the actor's event loop, so it must not block.
  Returns the reward (a number, or a list of one number per turn), or None: the verifier then scores the last turn.
- `[program, argument, ...]`: OPENAI_BASE_URL and OPENAI_API_KEY in its environment, the row as JSON at its standard
  input. Its reward is the last line of its standard output, if that is `{"reward": ...}`. All that it starts is killed
  when it ends, when its result is not needed any more, and when the actor exits.
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import IO, Any

from actors.child import GUARD

Reward = float | list[float] | None
LAST_WORDS = 2000
"""Characters of a program's output that go into an error."""


class AgentError(RuntimeError):
    """An agent that failed, took too long, or did not do what an agent does."""


async def play(agent: str | Sequence[str], base_url: str, key: str, row: dict[str, Any]) -> Reward:
    """Run the agent to its end; cancelling ends it at once. Raises AgentError; ValueError where it can't run at all."""
    if isinstance(agent, str):
        return await _call(agent, base_url, key, row)
    return await _run(list(agent), base_url, key, row)


async def _call(name: str, base_url: str, key: str, row: dict[str, Any]) -> Reward:
    try:
        function = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"workflow.agent: {name!r} can't be found: {error}") from error
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"workflow.agent: {name!r} is no async function; give a blocking program as a command")
    try:
        return _checked(await function(base_url, key, row))
    except AgentError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() of an agent must not be the actor's end
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise AgentError(f"{error!r} at {place.filename}:{place.lineno}") from error


async def _run(command: list[str], base_url: str, key: str, row: dict[str, Any]) -> Reward:
    ours = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        given.write(json.dumps(row).encode())
        given.seek(0)
        guard = subprocess.Popen(GUARD, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=given, stdout=said, stderr=errors, env=os.environ | ours, process_group=guard.pid
            )
            code = await process.wait()
        except OSError as error:
            raise ValueError(f"workflow.agent: {command[0]!r} can't be started: {error}") from None
        finally:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # it may have left its group
            os.killpg(guard.pid, signal.SIGKILL)
            guard.communicate()
        if code:
            raise AgentError(f"ended with exit code {code}: {_end_of(errors).strip() or 'without output'}")
        return _reward_in(_end_of(said))


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LAST_WORDS))
    return file.read().decode(errors="replace")


def _reward_in(said: str) -> Reward:
    """Of the last line, where it has one. Other programs print what they like."""
    try:
        last = json.loads(said.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return _checked(last["reward"]) if isinstance(last, dict) and "reward" in last else None


def _checked(reward: Any) -> Reward:
    """Raises AgentError for what is no reward."""
    if reward is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        numbers = [float(each) for each in reward] if isinstance(reward, list | tuple) else [float(reward)]
        if all(map(math.isfinite, numbers)):
            return numbers if isinstance(reward, list | tuple) else numbers[0]
    raise AgentError(f"{reward!r} is no reward: want a finite number, or a list with one for each turn")
