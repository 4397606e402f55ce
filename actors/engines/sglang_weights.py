"""Gives an SGLang server new weights, in the one order of calls that never samples from wrong weights.

    pause → begin → a patch → (it failed: all weights, then their digest is asked for) → end → label → continue

The label, which the server records with every token from then on, is set only after the server has compared the digest
of its weights. A server that can't compare (it stores weights in a way that `sglang_loader` can't follow) gets all
weights each time, by the model's own loader; `Outcome.checked` is then False. Any other failure raises ServerGone or
ServerRefused, and the server stays paused: it must not continue with unknown weights.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from actors.engines import sglang_patch
from actors.engines.sglang_loader import APPLIED, LOAD_FORMAT, LoaderRefused
from actors.engines.sglang_server import Server, ServerRefused
from areal_like.errors import UserError
from areal_like.models import tensors_of
from areal_like.weights.state import State

PauseMode = Literal["in_place", "retract", "abort"]
BUCKET_BYTES = 1 << 30
"""Most bytes of whole weights in one message."""
_REFUSED = f"{LoaderRefused.__name__}: "
SLOWEST_BYTES_PER_SECOND = 32 << 20
"""At which a server reads, applies and digests weights: the least that is waited for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`whole`: all weights were sent. `checked`: the server has compared the digest."""

    whole: bool
    checked: bool
    nbytes: int
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class Weights:
    """What a server is to hold: `patch` (uint8, see `sglang_patch`) leads there from the weights with digest `base`."""

    state: State
    digest: str
    label: str
    patch: np.ndarray
    base: str


def serialised(tensors: list[tuple[str, torch.Tensor]], ranks: int) -> list[str]:
    """What SGLang takes for tensors: per rank base64 of a pickle, with the bytes in it. (Its own helper would put the
    tensors into shared memory, which only a child of the server could open.)"""
    return [base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()] * ranks


async def give(server: Server, weights: Weights, mode: PauseMode, flush: bool) -> Outcome:
    """Bring a server to these weights. Raises ServerGone, ServerRefused: then it is paused, its weights unknown."""
    message = serialised([(sglang_patch.NAME, torch.from_numpy(weights.patch))], server.ranks)  # before it stands still
    known = server.digest and server.digest == weights.base
    server.open.clear()
    begin = time.monotonic()
    await server.post("/pause_generation", {"mode": mode})
    server.digest = ""
    await _begin(server)
    nbytes, whole, checked = weights.patch.nbytes, False, True
    try:
        if not known:
            raise ServerRefused("what it holds is not known")
        await _patch(server, message, weights.state, weights.digest)
    except ServerRefused:
        whole = True
        nbytes, checked = await _give_all(server, weights)
    await server.post("/end_weight_update", {}, _seconds(weights.state))
    if flush:
        await server.post("/flush_cache", {})
    await server.post("/update_weight_version", {"new_version": weights.label, "abort_all_requests": False})
    server.digest, server.label = weights.digest, weights.label
    await server.post("/continue_generation", {})
    server.pulse.beat()
    server.open.set()
    return Outcome(whole, checked, nbytes, time.monotonic() - begin)


async def _begin(server: Server) -> None:
    try:
        await server.post("/begin_weight_update", {})
    except ServerRefused:  # one that was left open by an actor that died
        await server.post("/end_weight_update", {})
        await server.post("/begin_weight_update", {})


def _seconds(state: State) -> float:
    """How much longer a call may take that goes over all weights."""
    return state.nbytes / SLOWEST_BYTES_PER_SECOND


async def _patch(server: Server, message: list[str], state: State, digest: str) -> None:
    """Raises ServerRefused unless the server has confirmed the digest of its weights, which must equal that of `state`
    then; UserError where no server ever could."""
    body = {"serialized_named_tensors": message, "load_format": LOAD_FORMAT, "flush_cache": False}
    try:
        said = (await server.post("/update_weights_from_tensor", body, _seconds(state))).get("message")
    except ServerRefused as error:
        said = str(error)
    if _REFUSED in str(said):
        raise UserError(f"engine=sglang can't serve this model: {said}")
    if said != APPLIED + digest:
        raise ServerRefused(f"{server.name}: no confirmation of the weights: {said!r}")


async def _give_all(server: Server, weights: Weights) -> tuple[int, bool]:
    """By the model's own loader; returns the bytes, and whether the digest was compared. Raises ServerRefused."""
    for bucket in buckets(weights.state):
        body = {"serialized_named_tensors": serialised(bucket, server.ranks), "flush_cache": False}
        await server.post("/update_weights_from_tensor", body, _seconds(weights.state))
    probe = sglang_patch.digest_probe(weights.state, weights.digest)
    message = serialised([(sglang_patch.NAME, torch.from_numpy(probe))], server.ranks)
    try:
        await _patch(server, message, weights.state, weights.digest)
    except ServerRefused as error:
        if "LoaderUnable" not in str(error):
            raise
        return weights.state.nbytes, False
    return weights.state.nbytes, True


async def holds(server: Server, state: State, digest: str) -> bool:
    """Whether a server that is not serving yet has these weights."""
    probe = sglang_patch.digest_probe(state, digest)
    message = serialised([(sglang_patch.NAME, torch.from_numpy(probe))], server.ranks)
    await _begin(server)
    with contextlib.suppress(ServerRefused):
        await _patch(server, message, state, digest)
        server.digest = digest
    await server.post("/end_weight_update", {})
    return server.digest == digest


def buckets(state: State) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of a state, at most `BUCKET_BYTES` at a time (one that is larger comes alone)."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors_of(state):
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.clone()))  # a storage of its own: a view would be sent with the whole buffer
        size += tensor.nbytes
    if bucket:
        yield bucket
