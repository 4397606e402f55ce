"""Calls once, before a run starts, rewards of the user's own and the addresses of servers."""

import asyncio
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np

from actors.reward_pool import RewardError, RewardPool
from actors.rewards import reward_function
from areal_like.config.run_config import Config, ConfigError
from areal_like.interfaces import PooledTask, Task

CONNECT_SECONDS = 5.0


def check_rewards(task: Task, config: Config) -> None:
    """Score an empty response to row 0, or else its answer, by each reward of the user's own. Raises ConfigError, with
    its file and line, where neither gets a number. Not where verifiers run in the actor, to be debugged."""
    key, limits, empty = "task", config.rewards, np.array([*task.stop_tokens, 0][:1], np.int32)
    own = {}
    for each in getattr(task, "members", {"": task}).values():
        prompt, name = each.prompt("train", 0), type(each).__module__
        if isinstance(each, PooledTask):
            key, name = "task.reward", each.verification(prompt, empty)[0]
        if limits.workers and name.partition(".")[0] != "areal_like":
            own[each] = prompt

    async def score() -> None:
        seconds, memory = limits.timeout, limits.memory_limit
        pool = RewardPool(timeout=seconds, memory_limit=memory, wall=1)
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
    except RewardError as error:
        raise ConfigError(f"{key}: got no number for a response to row 0: {error}", key) from None


def check_addresses(addresses: Mapping[str, str]) -> None:
    """Raises ConfigError where nobody listens at the address of a key. One that is reached by a proxy is not tried."""
    for key, url in addresses.items():
        try:
            found = urlsplit(url)
            if not found.hostname:
                raise ValueError("there is no host in it, as in http://host:8000/v1")
            if getproxies().get(found.scheme) and not proxy_bypass(found.hostname):
                continue
            port = found.port or {"https": 443, "wss": 443}.get(found.scheme, 80)
            socket.create_connection((found.hostname, port), CONNECT_SECONDS).close()
        except (ValueError, OSError) as error:
            raise ConfigError(f"{key}={url}: no answer: {error}; start its server first", key) from None
