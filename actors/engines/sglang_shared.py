"""Weights in memory that the servers of this host read where they lie: no copies on the way, no files left behind.

The memory is anonymous (memfd), so it ends with this process, and is not bounded by the size of /dev/shm. Other
processes of the same user open it by its path under /proc.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from actors.engines import sglang_patch
from areal_like.weights.state import State
from areal_like.weights.update import Update


class SharedBytes:
    """`array`, uint8 [nbytes], which others can read at `path` until `close`."""

    def __init__(self, nbytes: int):
        self._descriptor = os.memfd_create("areal_like.weights")
        os.ftruncate(self._descriptor, nbytes)
        self.array = np.frombuffer(mmap.mmap(self._descriptor, nbytes), np.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def of(cls, data: np.ndarray) -> SharedBytes:
        shared = cls(data.nbytes)
        shared.array[:] = data
        return shared

    def close(self) -> None:
        """Whoever has opened it keeps it; the memory is given back with the last array."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class SharedCopy:
    """A copy of the weights that servers should hold: the subscriber overwrites its own with the next ones. `digest`:
    "" while they are not known. `stored`: see `sglang_names`."""

    def __init__(self, state: State, stored: sglang_patch.Stored):
        self._bytes = SharedBytes(state.nbytes)
        self._bytes.array[:] = state.buffer
        self.state, self.digest, self.stored = State(state.specs, self._bytes.array), "", stored

    @property
    def path(self) -> str:
        return self._bytes.path

    def probe(self) -> np.ndarray:
        """A patch without changes, which asks for the digest of all weights."""
        return sglang_patch.digest_probe(self.state, self.digest, self.stored)

    def advance(self, update: Update, sweep: bool) -> np.ndarray | None:
        """Take an update; returns the patch that leads there, or None where all weights must be sent. Costs time by
        what `update.changes` names, if those are changes to what is held."""
        before, self.digest = self.digest, ""
        if update.state.specs != self.state.specs:
            raise ValueError("an update of other tensors than those of the engine's model")
        changes = update.changes if update.changes and update.changes.since == before else None
        patch = None
        if before:
            patch = sglang_patch.write(update.state, update.digest, self.state, changes, self.stored, sweep)
        if changes is None:
            self.state.buffer[:] = update.state.buffer
        else:
            pairs = zip(self.state.tensors(), update.state.tensors(), strict=True)
            for index, ((_, mine), (_, new)) in enumerate(pairs):
                for where in changes.tensors.get(index, ()):
                    mine[where] = new[where]
        self.digest = update.digest
        return patch

    def close(self) -> None:
        self._bytes.close()
