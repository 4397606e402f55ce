"""Gives an SGLang server new weights, in the one order of calls that never samples from wrong weights.

    pause → begin → a patch → (it failed: all weights) → end → label → continue

The label, which the server records with every token from then on, is set only after the server has compared the digest
of its weights. Servers read patches and weights from memory that this process shares with them: anonymous (memfd), so
it ends with this process and is not bounded by /dev/shm. Any failure raises ServerGone or ServerRefused, and the server
stays paused: it must not continue with unknown weights.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import mmap
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from actors.engines import sglang_patch
from actors.engines.sglang_loader import APPLIED, LOAD_FORMAT, LoaderRefused
from actors.engines.sglang_server import ServerRefused, SglangServer
from areal_like.errors import UserError
from areal_like.weights.state import State, TensorSpec
from areal_like.weights.update import Update

PauseMode = Literal["in_place", "retract", "abort"]
_REFUSED = f"{LoaderRefused.__name__}: "
SLOWEST_BYTES_PER_SECOND = 32 << 20
"""Least rate at which a server reads, applies and digests weights: bounds the time of a call."""


class SharedBytes:
    """`array`, uint8 [nbytes], which other processes of this user can read at `path` until `close`."""

    def __init__(self, nbytes: int):
        self._descriptor = os.memfd_create("areal_like.weights")
        os.ftruncate(self._descriptor, nbytes)
        self.array = np.frombuffer(mmap.mmap(self._descriptor, nbytes), np.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Processes that have opened it keep it; the memory is freed with the last array."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class SharedCopy:
    """A copy of the weights that servers should hold: the subscriber overwrites its own with the next ones. `digest`:
    "" while they are not known. `stored`: see `stored_names`."""

    def __init__(self, state: State, stored: sglang_patch.Stored):
        self._bytes = SharedBytes(state.nbytes)
        self._bytes.array[:] = state.buffer
        self.state, self.digest, self.stored = State(state.specs, self._bytes.array), "", stored

    def probe(self) -> np.ndarray:
        """A patch without changes, which asks for the digest of all weights."""
        return sglang_patch.digest_probe(self.state, self.digest, self.stored)

    def whole(self) -> np.ndarray:
        """A patch of all weights, by the path of this memory."""
        return sglang_patch.whole_at(self._bytes.path, self.state, self.digest, self.stored)

    def advance(self, update: Update) -> np.ndarray | None:
        """Take an update; returns the patch that leads there, or None where all weights must be sent. Costs time by
        what `update.changes` names, if those are changes to what is held."""
        before, self.digest = self.digest, ""
        if update.state.specs != self.state.specs:
            raise ValueError("an update of other tensors than those of the engine's model")
        changes = update.changes if update.changes and update.changes.since == before else None
        patch = None
        if before:
            patch = sglang_patch.write(update.state, update.digest, self.state, changes, self.stored)
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


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """`whole`: all weights were sent."""

    whole: bool
    nbytes: int
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class WantedWeights:
    """What a server is to hold: `patch` (uint8, see `sglang_patch`) leads there from the weights with digest `base`;
    None: all weights must be sent."""

    held: SharedCopy
    label: str
    patch: np.ndarray | None
    base: str


def serialised(tensors: list[tuple[str, torch.Tensor]], ranks: int) -> list[str]:
    """What SGLang takes for tensors: per rank base64 of a pickle, with the bytes in it. (Its own helper would put the
    tensors into shared memory, which only a child of the server could open.)"""
    return [base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()] * ranks


async def give(server: SglangServer, weights: WantedWeights, mode: PauseMode, flush: bool) -> LoadOutcome:
    """Bring a server to these weights. Raises ServerGone, ServerRefused: then it is paused, its weights unknown."""
    held, patch = weights.held, weights.patch if server.digest and server.digest == weights.base else None
    server.open.clear()
    begin = time.monotonic()
    await server.post("/pause_generation", {"mode": mode})
    server.digest = ""
    await _begin(server)
    whole = patch is None
    if patch is not None:
        try:
            await _send(server, patch, held)
        except ServerRefused:
            whole = True
    if whole:
        await _send(server, held.whole(), held)
    await server.post("/end_weight_update", {}, _seconds(held.state))
    if flush:
        await server.post("/flush_cache", {})
    await server.post("/update_weight_version", {"new_version": weights.label, "abort_all_requests": False})
    server.digest, server.label = held.digest, weights.label
    await server.post("/continue_generation", {})
    server.beat()
    server.open.set()
    return LoadOutcome(whole, held.state.nbytes if patch is None or whole else patch.nbytes, time.monotonic() - begin)


async def _begin(server: SglangServer) -> None:
    await server.post("/begin_weight_update", {})


def _seconds(state: State) -> float:
    """Seconds that a call may take for going over all weights."""
    return state.nbytes / SLOWEST_BYTES_PER_SECOND


async def _send(server: SglangServer, patch: np.ndarray, held: SharedCopy) -> None:
    """Raises ServerRefused unless the server has confirmed the digest of its weights, UserError where it never can."""
    shared = SharedBytes(patch.nbytes)
    try:
        await asyncio.to_thread(np.copyto, shared.array, patch)
        message = torch.from_numpy(sglang_patch.pointer(shared.path))
        body = {
            "serialized_named_tensors": serialised([(sglang_patch.NAME, message)], server.ranks),
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
        }
        try:
            said = str((await server.post("/update_weights_from_tensor", body, _seconds(held.state))).get("message"))
        except ServerRefused as error:
            said = str(error)
    finally:
        shared.close()
    if _REFUSED in said:
        raise UserError(f"engine=sglang can't serve this model: {said}")
    if said != APPLIED + held.digest:
        raise ServerRefused(f"{server.name}: no confirmation of the weights: {said!r}")


async def holds(server: SglangServer, held: SharedCopy) -> bool:
    """Whether a server that is not serving yet has these weights."""
    await _begin(server)
    with contextlib.suppress(ServerRefused):
        await _send(server, held.probe(), held)
        server.digest = held.digest
    await server.post("/end_weight_update", {})
    return server.digest == held.digest


# Names of tensors. transformers keeps the experts of a layer in one tensor, and turns checkpoints into that while it
# loads them. Its reverse conversion runs here on tensors without data (torch's meta device), whose parts show where
# they come from.


class _Views(TorchDispatchMode):
    """Copies of data-less tensors stay views of what they are made from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def stored_names(model: PreTrainedModel, specs: Sequence[TensorSpec]) -> sglang_patch.Stored:
    """Of each tensor that a checkpoint has under other names, or in parts: those. Raises ValueError where what a
    checkpoint has is no part of the model's tensors."""
    unfit = f"engine=sglang can't serve {type(model).__name__}: of its checkpoints,"
    metas = {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}
    owner = {meta.untyped_storage()._cdata: name for name, meta in metas.items()}
    with torch.no_grad(), _Views():
        found = revert_weight_conversion(model, dict(metas))
    stored: sglang_patch.Stored = {}
    for name, view in found.items():
        if name in metas and owner.get(view.untyped_storage()._cdata) == name and view.shape == metas[name].shape:
            continue
        if (whole := owner.get(view.untyped_storage()._cdata)) is None:
            raise ValueError(f"{unfit} {name} is no part of a parameter")
        stored.setdefault(whole, []).append((name, tuple(view.shape), view.stride(), view.storage_offset()))
    for whole, parts in stored.items():
        shape = metas[whole].shape
        if sum(torch.Size(part[1]).numel() for part in parts) != shape.numel():
            raise ValueError(f"{unfit} the parts of {whole} are not all of it")
    return stored
