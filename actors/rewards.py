"""From a task to the reward function that workflows call: in this process, or in the reward pool.

A task whose verifier may be slow, hang or crash has `verification` (`areal_like.interfaces.PooledTask`): its calls go
to the pool. Either way an answer that can't be verified in time earns 0 (RollPacker, §4), and is counted.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np

from actors.reward_pool import RewardError, RewardPool, RewardTimeout
from areal_like.interfaces import PooledTask, RewardFunction, Task
from areal_like.types import Prompt
from areal_like.wire.groups import LARGEST_REWARD


def reward_function(task: Task, pool: RewardPool, *, timeout: float = math.inf) -> RewardFunction:
    """`async (prompt, tokens) -> float` for this task. Raises RewardError, and nothing else, for any error in the
    task's code: that costs the sample, not its group. `timeout`: seconds that a verifier in this process may wait."""
    if not hasattr(task, "members"):
        return _of_one(task, pool, timeout)
    each = {name: _of_one(member, pool, timeout) for name, member in task.members.items()}
    return lambda prompt, tokens: each[prompt.task](prompt, tokens)


def _of_one(task: Task, pool: RewardPool, timeout: float) -> RewardFunction:
    name = f"{type(task).__module__}:{type(task).__qualname__}.reward"

    async def verify(prompt: Prompt, tokens: np.ndarray) -> float:
        nonlocal name
        if isinstance(task, PooledTask):
            name, arguments, *knobs = task.verification(prompt, tokens)
            try:
                return await pool.score(name, *arguments, knobs=dict(*knobs))
            except RewardTimeout:
                return 0.0  # the pool counts it
        limit = asyncio.timeout(timeout if timeout < math.inf else None)
        try:
            async with limit:
                return await task.reward(prompt, tokens)
        except TimeoutError:
            if not limit.expired():
                raise
            pool.timeouts += 1
            return 0.0

    async def reward(prompt: Prompt, tokens: np.ndarray) -> float:
        try:
            score = float(await verify(prompt, tokens))
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"the task's verifier {name} raised {type(error).__name__}: {error}") from error
        finally:
            pool.answered += 1
        if not abs(score) <= LARGEST_REWARD:
            raise RewardError(f"the task's verifier {name} returned {score:g}: expected a finite number in float32")
        return score

    return reward
