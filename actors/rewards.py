"""From a task to the reward function that workflows call: in this process, or in the reward pool.

A cheap verifier runs where the workflow runs. A task whose verifier may be slow, hang or crash has `verification`
(see `areal_like.interfaces.PooledTask`), and its calls go to the pool.
"""

from __future__ import annotations

import math

import numpy as np
import xxhash

from actors.reward_pool import RewardError, RewardPool, RewardTimeout
from areal_like.interfaces import PooledTask, RewardFunction, Task
from areal_like.types import Prompt


def reward_function(task: Task, pool: RewardPool) -> RewardFunction:
    """`async (prompt, tokens) -> float` for this task. The pool starts no process before the first pooled call. Raises
    RewardError, and nothing else, whatever goes wrong in the task's code: that costs the sample, not its group."""

    async def pooled(prompt: Prompt, tokens: np.ndarray) -> float:
        assert isinstance(task, PooledTask)
        verifier, arguments = task.verification(prompt, tokens)
        try:
            return await pool.score(verifier, *arguments, case=xxhash.xxh3_64_intdigest(prompt.tokens.tobytes()))
        except RewardTimeout:
            return 0.0  # an answer that can't be verified in time earns nothing (RollPacker, §4); the pool counts it

    verify = pooled if isinstance(task, PooledTask) else task.reward

    async def reward(prompt: Prompt, tokens: np.ndarray) -> float:
        try:
            score = float(await verify(prompt, tokens))
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"the task's verifier raised {type(error).__name__}: {error}") from error
        if not math.isfinite(score):
            raise RewardError(f"the task's verifier returned {score}, which is not finite")
        return score

    return reward
