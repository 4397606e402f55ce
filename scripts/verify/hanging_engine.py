"""The embedded engine with a switch that hangs it, for `scripts.verify.chaos`.

Name it in a config as `engine.name=scripts.verify.hanging_engine:HangingEngine`.
"""

from __future__ import annotations

import time
from pathlib import Path

from actors.engines.torch_engine import TorchEngine

from .faults import SWITCH

LOOK_SECONDS = 0.01


class HangingEngine(TorchEngine):
    """Makes no decode step while `RUN/servers/ACTOR/hang` is there. Its actor's event loop continues: it sends
    heartbeats, takes leases, and its process looks healthy. `step_seconds` are added to each step, as a larger model
    would take."""

    needs_folder = True

    def __init__(self, model, folder: Path, *, slots: int = 64, step_seconds: float = 0.0):
        super().__init__(model, slots=slots)
        self._switch, self._step_seconds = folder / SWITCH, step_seconds

    async def _step(self) -> None:
        if self._switch.exists():
            time.sleep(LOOK_SECONDS)
        else:
            time.sleep(self._step_seconds)
            await super()._step()
