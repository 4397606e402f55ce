"""Copies between main memory and a GPU with as little waiting as possible on both sides. On a CPU they are plain
copies.

A copy to or from pinned memory overlaps with the GPU's computing; from other memory the driver makes it wait.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

PIECE = 64 << 20
"""Bytes that are copied out at once, with one such buffer in flight while another is emptied."""
INBOUND = 16 << 20
"""Bytes that are sent in at once."""
ALIGNED = 8
"""Bytes at whose multiples the parts of a buffer begin."""


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Outbound:
    """Copies tensors of a device into main memory, piece by piece by way of two pinned buffers, on a stream of its own
    behind the device's work queued so far. Pieces are in flight until `drain`; their sources must not change
    before."""

    def __init__(self, device: torch.device, piece: int = PIECE):
        gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device=device) if gpu else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=gpu) for _ in range(2)]
        self._flying: list[Callable[[], None]] = []

    def copy(self, source: Tensor, target: Tensor, then: Callable[[], None]) -> None:
        """Round `source` to the dtype of the flat `target`, of as many elements, and copy it there. `then` is called
        when all of it has arrived."""
        flat, step = source.reshape(-1), self._buffers[0].numel() // target.element_size()
        if self._stream:  # it may just have been made, and may be freed after this
            self._stream.wait_stream(torch.cuda.current_stream(flat.device))
            flat.record_stream(self._stream)
        starts = range(0, len(flat), step)
        for start in starts:
            self._send(flat[start : start + step], target[start : start + step])
        if starts:
            self._flying[-1] = _both(self._flying[-1], then)
        else:
            self._flying.append(then)

    def _send(self, source: Tensor, target: Tensor) -> None:
        while len(self._flying) >= len(self._buffers):
            self._flying.pop(0)()
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        held = buffer[: target.nbytes].view(target.dtype)
        with torch.cuda.stream(self._stream):  # None: does nothing
            held.copy_(source.to(target.dtype), non_blocking=True)
            arrived = self._stream.record_event() if self._stream else None

        def arrive() -> None:
            if arrived:
                arrived.synchronize()
            target.copy_(held)

        self._flying.append(arrive)

    def drain(self) -> None:
        """Wait until everything has arrived."""
        while self._flying:
            self._flying.pop(0)()


class Inbound:
    """Writes elements of tensors in main memory into tensors of a device, however many these are: places and values are
    collected in pinned memory, and travel together. All is on its way after `flush`; later work of the device's
    current stream sees it, and the sources may change."""

    def __init__(self, device: torch.device, piece: int = INBOUND):
        gpu = device.type == "cuda"
        self._here = [torch.empty(piece, dtype=torch.uint8, pin_memory=gpu) for _ in range(2)]
        self._there = torch.empty(piece, dtype=torch.uint8, device=device)
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._used = 0
        self._parts: list[tuple[Tensor, slice | None, int, torch.dtype]] = []  # target, where, how many, of what type

    def put(self, source: Tensor, target: Tensor, where: slice | np.ndarray) -> None:
        """Elements of the flat `source`, of any dtype, into the same places (int64, each once) of the flat `target`."""
        first, count = (where.start, where.stop - where.start) if isinstance(where, slice) else (0, len(where))
        each = source.element_size() + (0 if isinstance(where, slice) else 8)
        while count:
            now = min(count, (len(self._there) - self._used - 2 * ALIGNED) // each)
            if now <= 0:
                self.flush()
                continue
            stretch = slice(first, first + now)
            if isinstance(where, slice):
                self._append(source[stretch])
                self._parts.append((target, stretch, now, source.dtype))
            else:
                places = torch.from_numpy(where[stretch])
                self._append(places)
                self._append(source.index_select(0, places))
                self._parts.append((target, None, now, source.dtype))
            first, count = first + now, count - now

    def _append(self, values: Tensor) -> None:
        self._here[0][self._used : self._used + values.nbytes].view(values.dtype).copy_(values)
        self._used += -(-values.nbytes // ALIGNED) * ALIGNED

    def flush(self) -> None:
        """Send what has been collected."""
        if not self._used:
            return
        self._send(self._here[0][: self._used])
        at = 0
        for target, where, count, dtype in self._parts:
            places: slice | Tensor | None = where
            if places is None:
                places, at = self._there[at : at + 8 * count].view(torch.int64), at + 8 * count
            size = count * dtype.itemsize
            values = self._there[at : at + size].view(dtype).to(target.dtype)
            at += -(-size // ALIGNED) * ALIGNED
            target[places] = values
        self._parts, self._used = [], 0
        self._here.reverse()
        self._sent.reverse()
        if before := self._sent[0]:
            before.synchronize()  # this memory is written next

    def _send(self, pinned: Tensor) -> None:
        self._there[: len(pinned)].copy_(pinned, non_blocking=True)
        self._sent[0] = torch.cuda.current_stream(self._there.device).record_event() if self._there.is_cuda else None


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
