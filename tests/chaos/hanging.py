"""The embedded engine with a switch that hangs it: `engine.name=tests.chaos.hanging:HangingEngine`."""

import time
from pathlib import Path

from actors.engines.torch_engine import TorchEngine


def switch(folder: Path) -> Path:
    """The file whose existence hangs the engine of an actor's folder."""
    return folder / "hang"


class HangingEngine(TorchEngine):
    """Makes no decode step while its switch exists; its actor continues to send heartbeats and to take leases."""

    needs_folder = True

    def __init__(self, model, folder: Path, *, slots: int = 64):
        super().__init__(model, slots=slots)
        self._switch = switch(folder)

    async def _step(self) -> None:
        if self._switch.exists():
            time.sleep(0.01)
        else:
            await super()._step()
