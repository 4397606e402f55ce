"""Copies between main memory and a GPU, by pinned memory, which overlap with computing; on a CPU, plain copies."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

PIECE = 64 << 20
"""Bytes that are copied out at once, with one such buffer in flight while another is emptied."""


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Outbound:
    """Copies tensors of a device into main memory, piece by piece by two pinned buffers, on a stream of its own behind
    the work queued so far. Until `drain` their sources must not change."""

    def __init__(self, device: torch.device, piece: int = PIECE):
        gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device=device) if gpu else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=gpu) for _ in range(2)]
        self._flying: list[Callable[[], None]] = []  # to be called in this order
        self._in_use = 0

    def copy(self, source: Tensor, target: Tensor, then: Callable[[], None]) -> None:
        """Round `source` to the dtype of the flat `target`, of its size, and copy it there. Calls `then` after that."""
        flat, step = source.reshape(-1), self._buffers[0].numel() // target.element_size()
        if self._stream:  # it may just have been made, and may be freed after this
            self._stream.wait_stream(torch.cuda.current_stream(flat.device))
            flat.record_stream(self._stream)
        for start in range(0, len(flat), step):
            self._send(flat[start : start + step], target[start : start + step])
        self._flying.append(then)

    def _send(self, source: Tensor, target: Tensor) -> None:
        while self._in_use >= len(self._buffers):
            self._flying.pop(0)()
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        self._in_use += 1
        held = buffer[: target.nbytes].view(target.dtype)
        with torch.cuda.stream(self._stream):  # None: does nothing
            held.copy_(source.to(target.dtype), non_blocking=True)
            arrived = self._stream.record_event() if self._stream else None

        def arrive() -> None:
            if arrived:
                arrived.synchronize()
            target.copy_(held)
            self._in_use -= 1

        self._flying.append(arrive)

    def drain(self) -> None:
        while self._flying:
            self._flying.pop(0)()
