"""Tasks of runs: one whose rewards have parts, one whose processes hold weights as on a device."""

from typing import ClassVar

import numpy as np

from areal_like.tasks.copying import Copy
from areal_like.weights import device


class Parted(Copy):
    """A reward of two parts, or, for some answers, none."""

    reward_weights: ClassVar = {"even": 0.5}

    async def reward(self, prompt, tokens):
        if tokens[0] % 3 == 0:
            return None
        return {"place": await super().reward(prompt, tokens), "even": float(np.mean(tokens % 2 == 0))}


class Held(device.DeviceState):
    def __init__(self, *arguments, **knobs):
        super().__init__(*arguments, **knobs)
        print("weights on a device")


class OnDevice(Copy):
    """Its processes, which make it before their weights, take the CPU for a device."""

    def __init__(self, *arguments, **knobs):
        super().__init__(*arguments, **knobs)
        device.ON_DEVICE, device.DeviceState = {"cpu"}, Held
