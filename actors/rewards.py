"""From a task to the reward function that workflows call: in this process, or in the reward pool.

A cheap verifier runs where the workflow runs. A task whose verifier may be slow, hang or crash has `verification`
(see `areal_like.interfaces.PooledTask`), and its calls go to the pool. Either way an answer that can't be verified in
time earns 0 (RollPacker, §4), and is counted.
"""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import xxhash

from actors.reward_pool import RewardError, RewardPool, RewardTimeout
from actors.time_limit import Breathing, Overtime
from areal_like.interfaces import PooledTask, RewardFunction, Task
from areal_like.types import Prompt
from areal_like.wire.columns import LARGEST_REWARD

log = logging.getLogger(__name__)
WARNINGS = 5


def reward_function(
    task: Task, pool: RewardPool, *, timeout: float = 30.0, step_timeout: float = 15.0
) -> RewardFunction:
    """`async (prompt, tokens) -> float` for this task. The pool starts no process before the first pooled call. Raises
    RewardError, and nothing else, whatever goes wrong in the task's code: that costs the sample, not its group.

    timeout, step_timeout: seconds of a verifier in this process, in all and of what it computes between two awaits,
        for which the actor stands still (see `actors.time_limit`). The pool has limits of its own.
    """
    members = getattr(task, "members", None)
    if members is None:
        return _of_one(task, pool, timeout, step_timeout)
    each = {name: _of_one(member, pool, timeout, step_timeout) for name, member in members.items()}

    async def of_its_task(prompt: Prompt, tokens: np.ndarray) -> float:
        return await each[prompt.task](prompt, tokens)

    return of_its_task


def _of_one(task: Task, pool: RewardPool, timeout: float, step_timeout: float) -> RewardFunction:
    name = f"{type(task).__module__}:{type(task).__qualname__}.reward"

    async def pooled(prompt: Prompt, tokens: np.ndarray) -> float:
        nonlocal name
        assert isinstance(task, PooledTask)
        name, arguments, *knobs = task.verification(prompt, tokens)
        case = xxhash.xxh3_64_intdigest(prompt.tokens.tobytes())
        try:
            return await pool.score(name, *arguments, knobs=dict(*knobs), case=case)
        except RewardTimeout:
            return 0.0  # the pool counts it

    async def called(prompt: Prompt, tokens: np.ndarray) -> float:
        return await task.reward(prompt, tokens)  # what computes before it returns something to wait for is timed, too

    in_turn = Breathing()

    async def here(prompt: Prompt, tokens: np.ndarray) -> float:
        try:
            return await in_turn.within(timeout, step_timeout, partial(called, prompt, tokens))
        except Overtime as error:
            pool.timeouts += 1
            if pool.timeouts <= WARNINGS:
                log.warning("the task's verifier: %s, so the answer earns 0 (slow ones belong to the pool)", error)
            return 0.0

    verify = pooled if isinstance(task, PooledTask) else here

    async def reward(prompt: Prompt, tokens: np.ndarray) -> float:
        try:
            score = float(await verify(prompt, tokens))
        except Exception as error:
            pool.answered += 1
            if isinstance(error, RewardError):
                raise
            raise RewardError(f"the task's verifier {name} raised {type(error).__name__}: {error}") from error
        pool.answered += 1
        if not abs(score) <= LARGEST_REWARD:
            raise RewardError(
                f"the task's verifier {name} returned {score:g}: a reward must be a finite number that float32 can hold"
            )
        return score

    return reward
