"""From a task to the reward function that workflows call: in this process, or in the reward pool.

A cheap verifier runs where the workflow runs. A task whose verifier may be slow, hang or crash has `verification`
(see `areal_like.interfaces.PooledTask`), and its calls go to the pool.
"""

from __future__ import annotations

import numpy as np
import xxhash

from actors.reward_pool import RewardPool, RewardTimeout
from areal_like.interfaces import PooledTask, RewardFunction, Task
from areal_like.types import Prompt


def reward_function(task: Task, pool: RewardPool) -> RewardFunction:
    """`async (prompt, tokens) -> float` for this task. The pool starts no process before the first pooled call."""
    if not isinstance(task, PooledTask):
        return task.reward

    async def pooled(prompt: Prompt, tokens: np.ndarray) -> float:
        verifier, arguments = task.verification(prompt, tokens)
        try:
            return await pool.score(verifier, *arguments, case=xxhash.xxh3_64_intdigest(prompt.tokens.tobytes()))
        except RewardTimeout:
            return 0.0  # an answer that can't be verified in time earns nothing (RollPacker, §4); the pool counts it

    return pooled
