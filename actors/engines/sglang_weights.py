"""Gives an SGLang server new weights, in the one order of calls that never samples from wrong weights.

    pause → begin → a patch → (it failed: all weights, then their digest is asked for) → end → label → continue

The label, which the server records with every token from then on, is set only after the server has compared the digest
of its weights. A server that can't compare (it stores weights in a way that `sglang_loader` can't follow) gets all
weights each time, by the model's own loader; `LoadOutcome.checked` is then False. A server of ours reads weights from
shared memory (`sglang_shared`); one that was joined, and may run elsewhere, gets them in messages, of which each of its
ranks has a slice. Any other failure raises ServerGone or ServerRefused, and the server stays paused: it must not
continue with unknown weights.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from actors.engines import sglang_patch
from actors.engines.sglang_loader import APPLIED, LOAD_FORMAT, SWEPT, LoaderRefused
from actors.engines.sglang_server import ServerRefused, SglangServer
from actors.engines.sglang_shared import SharedBytes, SharedCopy
from areal_like.errors import UserError
from areal_like.weights.state import State, TensorSpec

PauseMode = Literal["in_place", "retract", "abort"]
BUCKET_BYTES = 1 << 28
"""Most bytes of whole weights in one message."""
INLINE_BYTES = 1 << 16
"""Up to which a patch is in the message itself."""
_UNABLE = "LoaderUnable"
_REFUSED = f"{LoaderRefused.__name__}: "
SLOWEST_BYTES_PER_SECOND = 32 << 20
"""At which a server reads, applies and digests weights: the least that is waited for."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """`whole`: all weights were sent. `checked`: the server has compared the digest. `swept`: it has computed it from
    all weights, and did not just follow the changes."""

    whole: bool
    checked: bool
    swept: bool
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


class _Message:
    """A patch as a server takes it. A server of ours, on this host, is told where it lies; to any other it goes once,
    however many ranks that has."""

    def __init__(self, server: SglangServer, patch: np.ndarray):
        self._shared = SharedBytes.of(patch) if server.is_ours and patch.nbytes > INLINE_BYTES else None
        sent = sglang_patch.pointer(self._shared.path) if self._shared else patch
        if server.is_ours or server.ranks == 1:
            self.payload = serialised([(sglang_patch.NAME, torch.from_numpy(sent))], server.ranks)
        else:
            size = torch.tensor(sent.size)
            slices = [torch.from_numpy(each) for each in sglang_patch.slices(sent, server.ranks)]
            parts = [serialised([(sglang_patch.SLICE, each), (sglang_patch.SIZE, size)], 1) for each in slices]
            self.payload = [part for (part,) in parts]

    def close(self) -> None:
        if self._shared:
            self._shared.close()


@contextlib.asynccontextmanager
async def _message(server: SglangServer, patch: np.ndarray) -> AsyncIterator[list[str]]:
    message = await asyncio.to_thread(_Message, server, patch)
    try:
        yield message.payload
    finally:
        message.close()


def serialised(tensors: list[tuple[str, torch.Tensor]], ranks: int) -> list[str]:
    """What SGLang takes for tensors: per rank base64 of a pickle, with the bytes in it. (Its own helper would put the
    tensors into shared memory, which only a child of the server could open.)"""
    return [base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()] * ranks


async def give(server: SglangServer, weights: WantedWeights, mode: PauseMode, flush: bool) -> LoadOutcome:
    """Bring a server to these weights. Raises ServerGone, ServerRefused: then it is paused, its weights unknown."""
    patch = weights.patch if server.digest and server.digest == weights.base else None
    async with contextlib.AsyncExitStack() as stack:
        message = await stack.enter_async_context(_message(server, patch)) if patch is not None else None
        server.open.clear()
        begin = time.monotonic()
        await server.post("/pause_generation", {"mode": mode})
        server.digest = ""
        await _begin(server)
        outcome = await _patched_or_given_all(server, weights.held, message, patch)
    await server.post("/end_weight_update", {}, _seconds(weights.held.state))
    if flush:
        await server.post("/flush_cache", {})
    await server.post("/update_weight_version", {"new_version": weights.label, "abort_all_requests": False})
    server.digest, server.label = weights.held.digest, weights.label
    await server.post("/continue_generation", {})
    server.pulse.beat()
    server.open.set()
    return LoadOutcome(*outcome, time.monotonic() - begin)


async def _patched_or_given_all(
    server: SglangServer, held: SharedCopy, message: list[str] | None, patch: np.ndarray | None
) -> tuple[bool, bool, bool, int]:
    """All weights were sent; their digest was compared; it was computed from all weights; bytes."""
    if message is not None and patch is not None:
        with contextlib.suppress(ServerRefused):
            swept = await _patch(server, message, held.state, held.digest)
            return False, True, swept, patch.nbytes
    checked = await (_give_all(server, held) if server.is_ours else _send_all(server, held))
    return True, checked, checked, held.state.nbytes


async def _begin(server: SglangServer) -> None:
    try:
        await server.post("/begin_weight_update", {})
    except ServerRefused:  # one that was left open by an actor that died
        await server.post("/end_weight_update", {})
        await server.post("/begin_weight_update", {})


def _seconds(state: State) -> float:
    """How much longer a call may take that goes over all weights."""
    return state.nbytes / SLOWEST_BYTES_PER_SECOND


async def _patch(server: SglangServer, message: list[str], state: State, digest: str) -> bool:
    """Returns whether the digest was computed from all weights. Raises ServerRefused unless the server has confirmed
    the digest of its weights, which must equal that of `state` then; UserError where no server ever could."""
    body = {"serialized_named_tensors": message, "load_format": LOAD_FORMAT, "flush_cache": False}
    try:
        said = (await server.post("/update_weights_from_tensor", body, _seconds(state))).get("message")
    except ServerRefused as error:
        said = str(error)
    if _REFUSED in str(said):
        raise UserError(f"engine=sglang can't serve this model: {said}")
    if str(said).removesuffix(SWEPT) != APPLIED + digest:
        raise ServerRefused(f"{server.name}: no confirmation of the weights: {said!r}")
    return str(said).endswith(SWEPT)


async def _give_all(server: SglangServer, held: SharedCopy) -> bool:
    """From shared memory; returns whether the digest was compared. Raises ServerRefused."""
    told = held.path, held.state, held.digest, held.stored
    async with _message(server, sglang_patch.whole_at(*told, own_loader=False)) as message:
        try:
            await _patch(server, message, held.state, held.digest)
            return True
        except ServerRefused as error:
            if _UNABLE not in str(error):
                raise
    async with _message(server, sglang_patch.whole_at(*told, own_loader=True)) as message:
        body = {"serialized_named_tensors": message, "load_format": LOAD_FORMAT, "flush_cache": False}
        await server.post("/update_weights_from_tensor", body, _seconds(held.state))
    return False


async def _send_all(server: SglangServer, held: SharedCopy) -> bool:
    """To a server that may run elsewhere, by the model's own loader; as `_give_all`."""
    for bucket in buckets(held.state):
        patch = await asyncio.to_thread(sglang_patch.whole, bucket, held.stored)
        async with _message(server, patch) as message:
            body = {"serialized_named_tensors": message, "load_format": LOAD_FORMAT, "flush_cache": False}
            await server.post("/update_weights_from_tensor", body, _seconds(held.state))
    async with _message(server, held.probe()) as message:
        try:
            await _patch(server, message, held.state, held.digest)
        except ServerRefused as error:
            if _UNABLE not in str(error):
                raise
            return False
    return True


async def holds(server: SglangServer, held: SharedCopy) -> bool:
    """Whether a server that is not serving yet has these weights."""
    await _begin(server)
    with contextlib.suppress(ServerRefused):
        async with _message(server, held.probe()) as message:
            await _patch(server, message, held.state, held.digest)
        server.digest = held.digest
    await server.post("/end_weight_update", {})
    return server.digest == held.digest


def buckets(state: State) -> Iterator[list[tuple[TensorSpec, np.ndarray]]]:
    """Its tensors (bits), at most `BUCKET_BYTES` at a time (one that is larger comes alone)."""
    bucket: list[tuple[TensorSpec, np.ndarray]] = []
    size = 0
    for spec, bits in state.tensors():
        if bucket and size + bits.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((spec, bits))
        size += bits.nbytes
    if bucket:
        yield bucket
