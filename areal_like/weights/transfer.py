"""Copies between main memory and a GPU, by pinned memory, which overlap with computing; on a CPU, none."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> tuple[list[np.ndarray], Any]:
    """Arrays with the tensors' contents once the event that is returned has been waited for (None: at once)."""
    if not tensors[0].is_cuda:
        return [tensor.numpy() for tensor in tensors], None
    held = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for target, tensor in zip(held, tensors, strict=True):
        target.copy_(tensor, non_blocking=True)
    return [target.numpy() for target in held], torch.cuda.current_stream(tensors[0].device).record_event()
