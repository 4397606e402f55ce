"""An actor's worker and engine, without a buffer."""

import asyncio

import numpy as np

from actors.engines.torch_engine import TorchEngine
from actors.worker import Rollout, Worker
from actors.workflows import single_turn
from areal_like.stops import NO_STOPS
from areal_like.types import Group, Lease, Prompt
from tests.actors.test_worker import Client
from tests.actors.tiny_models import new_model


class Task:
    stop_tokens = (5,)

    def prompt(self, split: str, row: int) -> Prompt:
        return Prompt(np.arange(6, dtype=np.int32), None, 24)


class Actor:
    def __init__(self, *, task=None, workflow=single_turn, engine=None, stops=NO_STOPS):
        self.client, self.engine = Client(), engine or TorchEngine(new_model(seed=0), slots=4)
        rollout = Rollout(3, 1.0, None, workflow, {}, stops)
        self.worker = Worker(task or Task(), self.engine, self.reward, self.client, rollout, {0: "d0"})

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        return float(tokens.sum())

    async def group(self) -> Group | None:
        """Group 7, of three samples; None if it fails."""
        self.worker.start([Lease(7, 0, "train", 3, 3)])
        while not self.client.groups and not self.client.failures:
            await asyncio.sleep(0)
        await self.engine.close()
        return self.client.groups[0] if self.client.groups else None
