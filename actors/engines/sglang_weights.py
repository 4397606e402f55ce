"""Gives an SGLang server new weights, in the one order of calls that never samples from wrong weights.

    pause → begin → a patch → (it failed: all weights) → end → label → continue

The label, which the server records with every token from then on, is set after the server has compared digests. Servers
read patches and weights from this process's memfd. After a failure it stays paused.
"""

import asyncio
import base64
import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from actors.engines.sglang_boxes import NAME, Patch, Stored, places_of
from actors.engines.sglang_loader import APPLIED, LOAD_FORMAT, LoaderRefused
from actors.engines.sglang_server import ServerRefused, SglangServer
from areal_like.errors import UserError
from areal_like.weights.replica import Update, Where
from areal_like.weights.state import State, TensorSpec

PauseMode = Literal["in_place", "retract", "abort"]
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
    "" while they are not known. `stored`: see `stored_names`. `seconds`: time limit of a call over all of them."""

    def __init__(self, state: State, stored: Stored):
        self._bytes = SharedBytes(state.nbytes)
        self._bytes.array[:] = state.buffer
        self.state, self.digest, self.stored = State(state.specs, self._bytes.array), "", stored
        self.seconds = state.nbytes / SLOWEST_BYTES_PER_SECOND

    def patch(self, changes: dict[int, bytes | None]) -> bytes:
        """A patch that leads here, from weights that differ by no more than `changes`."""
        patch = Patch(self._bytes.path, self.digest, self.state.specs, self.stored, changes)
        return msgspec.msgpack.encode(patch)

    def whole(self) -> bytes:
        """A patch that leads here from any weights."""
        return self.patch(dict.fromkeys(range(len(self.state.specs))))

    def advance(self, update: Update) -> bytes:
        """Take an update; returns the patch that leads there. Takes time by `update.changes`, if these fit."""
        before, self.digest = self.digest, ""
        if update.state.specs != self.state.specs:
            raise ValueError("an update of other tensors than those of the engine's model")
        known = update.changes if update.changes and update.changes.since == before else None
        found: dict[int, bytes | None] = {}
        for index, ((spec, mine), (_, new)) in enumerate(
            zip(self.state.tensors(), update.state.tensors(), strict=True)
        ):
            where: list[Where] = known.tensors.get(index, []) if known else [slice(0, spec.count)]
            if len(places := _differing(mine, new, where)):
                found[index] = places_of(places, spec)
            for each in where:
                mine[each] = new[each]
        self.digest = update.digest
        return self.patch(found)

    def close(self) -> None:
        self._bytes.close()


def _differing(before: np.ndarray, bits: np.ndarray, where: list[Where]) -> np.ndarray:
    """Places at which two tensors differ, int64 [n], in order; of `where` only."""
    found = [np.zeros(0, np.int64)]
    for each in where:
        unlike = np.flatnonzero(before[each] != bits[each])
        found.append(unlike + each.start if isinstance(each, slice) else each[unlike])
    return found[1] if len(where) == 1 and isinstance(where[0], slice) else np.unique(np.concatenate(found))


def serialised(tensors: list[tuple[str, torch.Tensor]], ranks: int) -> list[str]:
    """The tensors as SGLang takes them: per rank base64 of a pickle, with the bytes in it. (Its own helper would put
    the tensors into shared memory, which only a child of the server could open.)"""
    return [base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()] * ranks


async def give(
    server: SglangServer, held: SharedCopy, label: str, patch: bytes | None, mode: PauseMode
) -> tuple[bool, int]:
    """Bring a server to the held weights, by `patch` or, where that is None or does not lead there, by all of them →
    whether all were sent, and the bytes. Raises ServerGone, ServerRefused: then it is paused, its weights unknown."""
    server.open.clear()
    await server.post("/pause_generation", {"mode": mode})
    server.digest = ""
    await server.post("/begin_weight_update", {})
    sent = 0 if patch is None else len(patch)
    try:
        if patch is None:
            raise ServerRefused("no patch leads there")
        await _send(server, patch, held)
    except ServerRefused:
        patch, sent = None, held.state.nbytes
        await _send(server, held.whole(), held)
    await server.post("/end_weight_update", {}, held.seconds)
    if mode != "in_place":
        await server.post("/flush_cache", {})
    await server.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
    server.digest, server.label = held.digest, label
    await server.post("/continue_generation", {})
    server.beat()
    server.open.set()
    return patch is None, sent


async def _send(server: SglangServer, patch: bytes, held: SharedCopy) -> None:
    """Raises ServerRefused unless the server has confirmed the digest of its weights, UserError where it never can."""
    shared = SharedBytes(len(patch))
    try:
        await asyncio.to_thread(np.copyto, shared.array, np.frombuffer(patch, np.uint8))
        path = torch.frombuffer(bytearray(shared.path.encode()), dtype=torch.uint8)
        body = {
            "serialized_named_tensors": serialised([(NAME, path)], server.ranks),
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
        }
        try:
            reply = await server.post("/update_weights_from_tensor", body, held.state.nbytes / SLOWEST_BYTES_PER_SECOND)
            message = str(reply.get("message"))
        except ServerRefused as error:
            message = str(error)
    finally:
        shared.close()
    if f"{LoaderRefused.__name__}: " in message:
        raise UserError(f"engine=sglang can't serve this model: {message}")
    if message != APPLIED + held.digest:
        raise ServerRefused(f"{server.name}: no confirmation of the weights: {message!r}")


# Names of tensors. transformers keeps the experts of a layer in one tensor, and turns checkpoints into that while it
# loads them. Its reverse conversion runs here on tensors without data, whose parts show their source.


class _Views(TorchDispatchMode):
    """Copies of data-less tensors stay views of what they are made from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def stored_names(model: PreTrainedModel, specs: Sequence[TensorSpec]) -> Stored:
    """Of each tensor that checkpoints have under other names, or in parts: those. Raises ValueError for others."""
    unfit = f"engine=sglang can't serve {type(model).__name__}: of its checkpoints,"
    metas = {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}
    owner = {meta.untyped_storage()._cdata: name for name, meta in metas.items()}
    with torch.no_grad(), _Views():
        found = revert_weight_conversion(model, dict(metas))
    stored: Stored = {}
    for name, view in found.items():
        whole = owner.get(view.untyped_storage()._cdata)
        if whole is None:
            raise ValueError(f"{unfit} {name} is no part of a parameter")
        if whole != name or view.shape != metas[name].shape:
            part = (name, tuple(view.shape), view.stride(), int(view.storage_offset()))
            stored.setdefault(whole, []).append(part)
    for whole, parts in stored.items():
        if sum(torch.Size(part[1]).numel() for part in parts) != metas[whole].numel():
            raise ValueError(f"{unfit} the parts of {whole} are not all of it")
    return stored
