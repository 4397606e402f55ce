"""Batches that the learner can't train: their groups are dropped as "untrainable", and others take their places.

Later batches that were already served wait again, so that batches stay in order. The untrainable batch is kept as a
file in `RUN/untrainable/` for inspection; `read` opens it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_like.types import Group
from areal_like.wire.groups import decode_group, pack_heads, unpack_heads
from areal_like.wire.messages import Table
from buffer.payloads import JournalError, load
from buffer.run_state import RunState
from buffer.store import Entry

log = logging.getLogger(__name__)
FOLDER, REASON = "untrainable", "untrainable"


class _Kept(msgspec.Struct):
    """The contents of a batch's file."""

    batch: int
    reason: str
    actors: list[str]
    table: Table
    payloads: list[bytes]


def set_aside(state: RunState, index: int, reason: str) -> None:
    """Set aside batch `index`, which can't be trained. A repeated call changes nothing."""
    voided = state.shares.void(index)
    if not voided:
        return
    state.gauges.tell_again(sum(len(each.batch.info["evaluations"]) for each in voided))
    faulty = state.replay.unserve(index)
    state.learner.redo += 1
    log.warning("batch %d is set aside, its %d groups are replaced: %s", index, len(faulty), reason)
    if state.folder:
        _keep(state.folder / FOLDER / f"batch-{index:08d}-{state.learner.redo}.msgpack", index, reason, faulty)
    for entry in faulty:
        state.replay.drop(entry.id, REASON, reason)
    state.learner.wanted = None
    if state.learner.parts is not None:
        state.learner.parts = 0


def _keep(path: Path, index: int, reason: str, entries: Sequence[Entry]) -> None:
    table = pack_heads([entry.head for entry in entries if entry.head])
    try:
        payloads = [bytes(load(entry.payload)) for entry in entries]
        path.parent.mkdir(exist_ok=True)
        kept = _Kept(index, reason, [entry.pushed_by for entry in entries], table, payloads)
        path.write_bytes(msgspec.msgpack.encode(kept))
    except (OSError, JournalError) as error:
        log.error("can't keep %s for inspection: %s", path, error)


def read(path: Path) -> tuple[int, str, list[Group]]:
    """Batch, reason and groups of a file that `set_aside` wrote."""
    kept = msgspec.msgpack.decode(path.read_bytes(), type=_Kept)
    groups = [
        decode_group(head, payload) for head, payload in zip(unpack_heads(kept.table), kept.payloads, strict=True)
    ]
    for group, actor in zip(groups, kept.actors, strict=True):
        group.actor = actor
    return kept.batch, kept.reason, groups
