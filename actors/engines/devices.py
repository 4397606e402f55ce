"""Where the embedded engine computes, and how much of a GPU's memory its keys and values may take: never what happens
to be free, since a learner may share the GPU, and starts at the same time."""

from __future__ import annotations

import torch

GIB = 1 << 30
SHARE = 0.25
"""Of a GPU's memory, for keys and values, where no budget is stated."""


def device_of(name: str, model: torch.device) -> torch.device:
    """The device that `engine.device` names: "auto" is a GPU where there is one, else where the model is.

    Raises ValueError for a name that is unknown, or a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda", 0) if model.type == "cpu" and torch.cuda.is_available() else model
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"engine.device must be auto, cpu, cuda or e.g. cuda:0, not {name!r}")
    seen = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= seen:
        raise ValueError(f"engine.device={name}: torch sees {seen} GPUs here; set engine.device=cpu, or another one")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device  # `set_device` wants a number


def kv_budget(
    device: torch.device, per_token: int, longest: int, slots: int, tokens: int | None, memory: float | None
) -> int | None:
    """Most tokens whose keys and values are held: the least of `tokens` and `memory` GiB at `per_token` bytes, where
    they are given. Where neither is: on a GPU what the slots need, but no more than `SHARE` of the card; else None.

    Raises ValueError where the budget does not hold a single token.
    """
    bounds = [] if tokens is None else [tokens]
    if memory is not None:
        bounds.append(int(memory * GIB) // per_token)
    if not bounds and device.type == "cuda":
        bounds = [slots * longest, int(SHARE * torch.cuda.get_device_properties(device).total_memory) // per_token]
    if bounds and min(bounds) < 1:
        raise ValueError(f"engine.memory={memory:g} GiB holds no token: one takes {per_token} bytes; raise it")
    return min(bounds, default=None)
