"""Calls once, before a run starts, rewards of the user's own and the address of a judge."""

import asyncio
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np

from actors.reward_pool import RewardError, RewardPool
from actors.rewards import reward_function
from areal_like.config.run_config import Config, ConfigError
from areal_like.interfaces import PooledTask, Task
from areal_like.wire.bus import bypass_proxies

CONNECT_SECONDS = 10.0
_TRIED = set[str]()
"""Tasks, with limits, whose rewards work: an ablation checks many configs of one task."""


def check_rewards(task: Task, config: Config) -> None:
    """Score an empty response to row 0, or else its answer, by each reward of the user's own. Raises ConfigError, with
    its file and line, where neither gets a number. Not where verifiers run in the actor, to be debugged."""
    key, limits, empty = "task", config.rewards, np.array([*task.stop_tokens, 0][:1], np.int32)
    own, spec = {}, repr((config.task, limits))
    for each in getattr(task, "members", {"": task}).values():
        prompt, name = each.prompt("train", 0), type(each).__module__
        if isinstance(each, PooledTask):
            key, name = "task.reward", each.verification(prompt, empty)[0]
        if limits.workers and spec not in _TRIED and name.partition(".")[0] != "areal_like":
            own[each] = prompt

    async def score() -> None:
        seconds, memory = limits.timeout, limits.memory_limit
        pool = RewardPool(timeout=seconds, memory_limit=memory)
        try:
            for each, prompt in own.items():
                reward = reward_function(each, pool, timeout=seconds, on_error="drop")
                try:
                    await reward(prompt, empty)
                except RewardError:  # it may expect more of an answer, which costs no run (`rewards.on_error`)
                    if prompt.codec is None:
                        raise
                    await reward(prompt, prompt.codec.encode(str(prompt.answer)))
                if pool.timeouts:
                    raise RewardError(f"none within rewards.timeout={seconds:g} s")
        finally:
            await pool.close()

    try:
        asyncio.run(score()) if own else None
        _TRIED.add(spec)
    except RewardError as error:
        raise ConfigError(f"{key}: got no number for a response to row 0: {error}", key) from None


def check_address(key: str, url: str) -> None:
    """Raises ConfigError where nobody answers at the URL of a key, with an error or without."""
    bypass_proxies()
    try:
        urlopen(url, timeout=CONNECT_SECONDS).close()
    except (HTTPError, HTTPException):
        return
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}={url}: no answer: {error}; start its server first", key) from None
