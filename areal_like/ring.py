"""Payloads of actors on the buffer's own host: shared memory instead of a socket.

An actor owns a ring of memory (a memfd) and writes payloads into it; in place of the payload, a push and a batch have a
frame of `DESCRIPTOR_BYTES`, which is no payload's size, that says where it lies. The buffer and the learner map the
same memory: nobody copies, and the kernel is not asked. A block is free again once the buffer holds no reference to it
any more (its group was trained, dropped or filtered) and has said so.

Why a killed process does no harm: a memfd has no name, so nothing stays behind; it is sealed against shrinking, so no
reader can fault; what an actor had pushed outlives it, because the buffer has the memory open; and what it had not
pushed was never referenced. Block numbers grow and are never used again, so a push that is repeated late can't be taken
for new content. Where it can't be used (another host, another system, a full ring) payloads travel as frames.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from areal_like.wire import WireError

DESCRIPTOR_BYTES = 16
MAX_RING_BYTES = 1 << 36
_BLOCK = struct.Struct("<QQ")  # number and offset of a block
_PLACE = struct.Struct("<IIII")  # number of a ring, process and file that hold it open, offset / _ALIGN
_F_ADD_SEALS, _F_GET_SEALS, _SEAL_SHRINK = 1033, 1034, 2
_ALIGN = 64


@dataclass(slots=True)
class _Block:
    begin: int
    free: bool = False


class Ring:
    """The actor's side: `size` bytes. Raises OSError where shared memory is not to be had. `readable` is set once the
    buffer has said that it can read it."""

    def __init__(self, size: int):
        if sys.platform != "linux":
            raise OSError("memory that is shared between roles needs Linux")
        self.token = secrets.token_hex(8)
        self.fd = os.memfd_create(_name(self.token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_SHRINK)
        self.size, self.readable = size, False
        self._memory = memoryview(mmap.mmap(self.fd, size))
        self._blocks: dict[int, _Block] = {}  # by number
        self._order: deque[_Block] = deque()  # in the ring
        self._number = self._end = 0

    def take(self, size: int) -> tuple[bytes, memoryview] | None:
        """A new block: its descriptor and memory of `size` bytes to write to. None if there is no room now."""
        padded = max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
        begin = self._place(padded)
        if begin is None:
            return None
        self._number += 1
        self._end = begin + padded
        self._blocks[self._number] = block = _Block(begin)
        self._order.append(block)
        return _BLOCK.pack(self._number, begin), self._memory[begin : begin + size]

    def _place(self, size: int) -> int | None:
        """Where a block of `size` fits: behind the newest, or at the start. It never ends where the oldest begins, or
        a full ring would look like an empty one."""
        if not self._order:
            return 0 if size <= self.size else None
        oldest = self._order[0].begin
        if self._end <= oldest:  # the free part is in the middle
            return self._end if self._end + size < oldest else None
        if self._end + size <= self.size:
            return self._end
        return 0 if size < oldest else None

    def release(self, numbers: Iterable[int]) -> None:
        """These blocks are not referenced any more. Unknown numbers are passed over."""
        for number in numbers:
            if block := self._blocks.pop(number, None):
                block.free = True
        while self._order and self._order[0].free:
            self._order.popleft()

    def close(self) -> None:
        """Make no more blocks; written ones stay as long as somebody has them mapped."""
        os.close(self.fd)


def _name(token: str) -> str:
    return f"areal-like-ring-{token}"


class Mapped(np.ndarray):
    """The bytes of a block, uint8 [size], as the buffer keeps them: whoever reads a payload need not know the
    difference. `place` is the descriptor by which others on this host find it."""

    place: bytes


class MappedRing:
    """A ring as the buffer sees it. Raises OSError if process `pid` has no ring of that `token` as its file `fd`."""

    def __init__(self, number: int, pid: int, fd: int, token: str):
        path = f"/proc/{int(pid)}/fd/{int(fd)}"
        _check_name(path, token)  # before it is opened: that alone can do things, if it is a device
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._memory = _checked_memory(self.fd, path, token)
        except OSError:
            os.close(self.fd)
            raise
        self._place = number, os.getpid(), self.fd
        self.freed: list[int] = []
        self._newest = 0
        self._closing = False
        self._live: dict[int, weakref.ref[Mapped]] = {}

    def piece(self, descriptor: bytes, size: int) -> Mapped | None:
        """The content of a block; None if it was pushed, and given free, before. Raises WireError."""
        block, offset = _BLOCK.unpack(descriptor)
        if offset % _ALIGN or offset + size > len(self._memory):
            raise WireError(f"push: a block at {offset} of {size} bytes in a ring of {len(self._memory)}")
        known = self._live.get(block)
        piece = known() if known else None
        if piece is not None:
            return piece
        if block <= self._newest:
            return None
        self._newest = block
        piece = np.frombuffer(self._memory, np.uint8, size, offset).view(Mapped)
        piece.place = _PLACE.pack(*self._place, offset // _ALIGN)
        self._live[block] = weakref.ref(piece, partial(self._gone, block))
        return piece

    def _gone(self, block: int, reference: weakref.ref[Mapped]) -> None:
        self._live.pop(block, None)
        self.freed.append(block)
        if self._closing and not self._live:
            os.close(self.fd)

    def take_freed(self) -> list[int]:
        """Blocks that nobody refers to any more, for their owner to use again."""
        freed, self.freed = self.freed, []
        return freed

    def close(self) -> None:
        """Accept no more pushes. The file stays open for the learner until the last piece is gone."""
        self._closing = True
        if not self._live:
            os.close(self.fd)


def _check_name(path: str, token: str) -> None:
    """Raises OSError."""
    if os.readlink(path).split(" ")[0] != f"/memfd:{_name(token)}":
        raise OSError(f"{path} is not the ring {token!r}")


def _checked_memory(fd: int, path: str, token: str) -> memoryview:
    """Raises OSError where it is no ring, or not one that stays readable."""
    _check_name(f"/proc/self/fd/{fd}", token)
    if not fcntl.fcntl(fd, _F_GET_SEALS) & _SEAL_SHRINK:
        raise OSError(f"{path} could be shrunk under its readers")
    size = os.fstat(fd).st_size
    if not 0 < size <= MAX_RING_BYTES:
        raise OSError(f"{path} has {size} bytes; a ring has 1 to {MAX_RING_BYTES}")
    return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))


def frame_of(payload: Any) -> Any:
    """What to send to a reader on this host: the payload, or its place."""
    return payload.place if isinstance(payload, Mapped) else payload


class RingReader:
    """The learner's side. Keeps the rings of the newest batch mapped."""

    def __init__(self) -> None:
        self._rings: dict[int, memoryview] = {}

    def payloads(self, frames: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Each frame, or what it describes. Raises OSError if the buffer's memory can't be read from here."""
        rings, found = {}, []
        for frame, size in zip(frames, sizes, strict=True):
            if len(frame) == DESCRIPTOR_BYTES:
                number, pid, fd, place = _PLACE.unpack(frame)
                if number not in rings:
                    rings[number] = self._rings.get(number) or _map(pid, fd)
                frame = rings[number][place * _ALIGN : place * _ALIGN + size]
            found.append(frame)
        self._rings = rings
        return found


def _map(pid: int, fd: int) -> memoryview:
    handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(handle, 0, prot=mmap.PROT_READ))
    finally:
        os.close(handle)
