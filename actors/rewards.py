"""From a task to the reward function that workflows call: in this process, or in the reward pool.

A task whose verifier may be slow, hang or crash has `verification` (`areal_like.interfaces.PooledTask`): its calls go
to the pool. An answer that can't be verified in time earns 0 (RollPacker, §4), by default also one whose verifier
raises; both are counted. Another draw would leave out what cannot be parsed.
A verdict of None leaves the sample out of its group.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping

import numpy as np

from actors import reward_pool
from actors.reward_pool import MACHINE, MachineError, NoReward, RewardError, RewardPool, RewardTimeout
from areal_like.interfaces import PooledTask, RewardFunction, Task
from areal_like.types import Prompt

log = logging.getLogger(__name__)
MOST_LOGGED = 5


def reward_function(
    task: Task, pool: RewardPool, *, timeout: float = math.inf, on_error: str = "zero"
) -> RewardFunction:
    """`async (prompt, tokens) -> float` for this task. `timeout`: seconds that a verifier in this process may wait.
    Raises NoReward, MachineError for a fault of the machine and, unless `on_error` is "zero", RewardError for any
    other."""
    if not hasattr(task, "members"):
        return _Verifier(task, pool, timeout, on_error)
    each = {name: _Verifier(member, pool, timeout, on_error) for name, member in task.members.items()}
    return lambda prompt, tokens: each[prompt.task](prompt, tokens)


class _Verifier:
    def __init__(self, task: Task, pool: RewardPool, timeout: float, on_error: str):
        self._task, self._pool, self._timeout, self._on_error = task, pool, timeout, on_error
        self._name = f"{type(task).__module__}:{type(task).__qualname__}.reward"
        self._weights: Mapping[str, float] = getattr(task, "reward_weights", None) or {}
        self._logged = 0

    async def __call__(self, prompt: Prompt, tokens: np.ndarray) -> float:
        try:
            return await self._checked(prompt, tokens)
        except MachineError:
            raise
        except NoReward:
            self._pool.unscored += 1
            raise
        except RewardTimeout:
            pass
        except RewardError as error:
            error.redraw, self._pool.note = self._on_error == "redraw", str(error)
            if self._on_error != "zero":
                raise
            self._logged += 1
            if self._logged <= MOST_LOGGED:
                log.warning("an answer earns 0: %s", error)
        finally:
            self._pool.answered += 1
        self._pool.unverified += 1
        return 0.0

    async def _checked(self, prompt: Prompt, tokens: np.ndarray) -> float:
        try:
            found = await self._verified(prompt, tokens)
        except RewardError:
            raise
        except Exception as error:
            kind = MachineError if isinstance(error, MACHINE) else RewardError
            raise kind(f"{self._name} raised {reward_pool.worded(error, self._task.reward)}") from error
        return reward_pool.weighted(found, self._weights, self._name)

    async def _verified(self, prompt: Prompt, tokens: np.ndarray) -> reward_pool.Verdict:
        if isinstance(self._task, PooledTask):
            self._name, arguments, *knobs = self._task.verification(prompt, tokens)
            found: reward_pool.Verdict = await self._pool.score(self._name, *arguments, knobs=dict(*knobs))
            return found
        limit = asyncio.timeout(self._timeout if self._timeout < math.inf else None)
        try:
            async with limit:
                return reward_pool.verdict(await self._task.reward(prompt, tokens))
        except TimeoutError:
            if not limit.expired():
                raise
            self._pool.timeouts += 1
            raise RewardTimeout(f"{self._name} took more than {self._timeout:g} s") from None
