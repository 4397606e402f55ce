"""Shared memory for payloads: blocks never overlap, are read in place, and outlive the process that wrote them."""

import contextlib
import fcntl
import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.ring import DESCRIPTOR_BYTES, MappedRing, Ring, RingReader, frame_of
from areal_like.wire import WireError


def mapped(ring: Ring) -> MappedRing:
    return MappedRing(1, os.getpid(), ring.fd, ring.token)


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 5)), max_size=60))
def test_blocks_keep_their_content_until_nobody_refers_to_them(steps: list[tuple[int, int]]) -> None:
    """Against a model: what is held has its bytes; a block is refused only if no gap is large enough."""
    ring = Ring(4096)
    buffer, held = mapped(ring), []
    for number, (size, drop) in enumerate(steps):
        block = ring.take(size)
        if block is None:
            assert held, "an empty ring has room"
        else:
            descriptor, memory = block
            memory[:] = bytes([number]) * size
            held.append((bytes([number]) * size, buffer.piece(descriptor, size)))
        del block
        if drop < len(held):
            held.pop(drop)
        ring.release(buffer.take_freed())
        assert all(bytes(piece) == content for content, piece in held)
    held.clear()
    ring.release(buffer.take_freed())
    assert ring.take(4096), "all room is there again"


def test_the_learner_reads_the_same_memory_and_frames_pass_through() -> None:
    ring = Ring(1 << 16)
    buffer, reader = mapped(ring), RingReader()
    descriptor, memory = ring.take(100)
    memory[:] = b"x" * 100
    piece = buffer.piece(descriptor, 100)
    assert len(descriptor) == len(frame_of(piece)) == DESCRIPTOR_BYTES and len(piece) == 100
    first, second = reader.payloads([frame_of(piece), b"y" * 40], [100, 40])
    assert bytes(first) == b"x" * 100 and second == b"y" * 40
    memory[:] = b"z" * 100
    assert bytes(first) == b"z" * 100, "it is the same memory"


def test_a_view_of_a_piece_keeps_its_block() -> None:
    ring = Ring(1 << 16)
    buffer = mapped(ring)
    piece = buffer.piece(ring.take(100)[0], 100)
    view = memoryview(piece).toreadonly()
    del piece
    assert buffer.take_freed() == []
    del view
    gc.collect()
    assert buffer.take_freed() == [1]


def test_a_push_that_is_repeated_names_the_same_block_or_none() -> None:
    ring = Ring(1 << 16)
    buffer, (descriptor, _) = mapped(ring), ring.take(100)
    piece = buffer.piece(descriptor, 100)
    assert buffer.piece(descriptor, 100) is piece
    del piece
    assert buffer.piece(descriptor, 100) is None, "its memory may have new content by now"
    assert buffer.take_freed() == [1]


@pytest.mark.parametrize("offset", [1, 1 << 16, (1 << 64) - 64])
def test_a_place_outside_of_the_ring_is_refused(offset: int) -> None:
    ring = Ring(1 << 16)
    with pytest.raises(WireError):
        mapped(ring).piece((9).to_bytes(8, "little") + offset.to_bytes(8, "little"), 100)


def test_only_a_ring_is_mapped_and_only_one_that_cannot_shrink(tmp_path) -> None:
    ring = Ring(1 << 16)
    with pytest.raises(OSError, match="is not the ring"):
        MappedRing(1, os.getpid(), ring.fd, "another token")
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="is not the ring"):
        MappedRing(1, os.getpid(), file.fileno(), ring.token)
    with pytest.raises(FileNotFoundError):
        MappedRing(1, os.getpid(), 10_000, ring.token)
    unsealed = os.memfd_create("areal-like-ring-token", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(OSError, match="shrunk"):
        MappedRing(1, os.getpid(), unsealed, "token")
    os.close(unsealed)
    with pytest.raises(PermissionError):
        os.ftruncate(ring.fd, 10)


def test_the_file_is_open_until_the_last_piece_is_gone() -> None:
    ring = Ring(1 << 16)
    buffer = mapped(ring)
    piece = buffer.piece(ring.take(10)[0], 10)
    buffer.close()
    os.fstat(buffer.fd)
    del piece
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(buffer.fd)


def _write_and_wait(told: Connection) -> None:
    ring = Ring(1 << 16)
    descriptor, memory = ring.take(1000)
    memory[:] = b"k" * 1000
    told.send((os.getpid(), ring.fd, ring.token, descriptor))
    told.recv()


def test_what_was_pushed_outlives_a_killed_writer() -> None:
    here, there = multiprocessing.Pipe()
    writer = multiprocessing.get_context("fork").Process(target=_write_and_wait, args=(there,))
    writer.start()
    try:
        assert here.poll(20)
        pid, fd, token, descriptor = here.recv()
        buffer = MappedRing(1, pid, fd, token)
        piece = buffer.piece(descriptor, 1000)
        os.kill(pid, signal.SIGKILL)
        writer.join(20)
        assert bytes(piece) == b"k" * 1000
        assert bytes(RingReader().payloads([frame_of(piece)], [1000])[0]) == b"k" * 1000, "the buffer holds it open"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer.pid, signal.SIGKILL)
        writer.join(20)


def test_what_is_no_ring_is_refused_at_once_and_leaves_nothing_open(tmp_path: Path) -> None:
    token = "x"
    os.mkfifo(tmp_path / f"areal-like-ring-{token}")
    pipe = os.open(tmp_path / f"areal-like-ring-{token}", os.O_RDONLY | os.O_NONBLOCK)
    empty = os.memfd_create(f"areal-like-ring-{token}", os.MFD_ALLOW_SEALING)
    unsealed = os.memfd_create(f"areal-like-ring-{token}", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    fcntl.fcntl(empty, 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
    try:
        before = len(os.listdir("/proc/self/fd"))
        for fd in (pipe, empty, unsealed, 10_000):
            with pytest.raises(OSError, match=r"ring|shrunk|No such file"):
                MappedRing(1, os.getpid(), fd, token)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        for fd in (pipe, empty, unsealed):
            os.close(fd)
