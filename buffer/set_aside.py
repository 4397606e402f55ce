"""Batches that the learner can't train: their groups leave as dropped ("untrainable"), and others take their places.

What was served ahead of such a batch waits again, so that batches go on in order. The batch is kept as a file in
`RUN/untrainable/`, for whoever wants to know why; `read` opens it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from areal_like.groups import decode_group, pack_heads, unpack_heads
from areal_like.types import Group
from buffer.payloads import JournalError, load
from buffer.run_state import RunState
from buffer.store import Entry

log = logging.getLogger(__name__)
FOLDER, REASON = "untrainable", "untrainable"


def set_aside(state: RunState, index: int, reason: str) -> None:
    """Batch `index` can't be trained. Said again, it changes nothing."""
    voided = state.shares.void(index)
    if not voided:
        return
    state.gauges.tell_again(sum(len(each.body["info"]["evaluations"]) for each in voided))
    faulty = state.replay.unserve(index)
    state.learner.redo += 1
    log.warning("batch %d is set aside, its %d groups are replaced: %s", index, len(faulty), reason)
    if state.folder:
        _keep(state.folder / FOLDER / f"batch-{index:08d}-{state.learner.redo}.msgpack", index, reason, faulty)
    for entry in faulty:
        state.replay.drop(entry.id, REASON)
    state.learner.wanted = None
    if state.learner.parts is not None:
        state.learner.parts = 0


def _keep(path: Path, index: int, reason: str, entries: Sequence[Entry]) -> None:
    held: dict[str, Any] = {"batch": index, "reason": reason, "actors": [entry.maker for entry in entries]}
    held |= {"table": pack_heads([entry.head for entry in entries if entry.head])}
    try:
        held |= {"payloads": [bytes(load(entry.payload)) for entry in entries]}
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgpack.packb(held))
    except (OSError, JournalError) as error:
        log.error("%s: it can't be kept for inspection: %s", path, error)


def read(path: Path) -> tuple[int, str, list[Group]]:
    """Batch, reason and groups of a file that `set_aside` has written."""
    held = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
    heads = unpack_heads(held["table"])
    groups = [decode_group(head, payload) for head, payload in zip(heads, held["payloads"], strict=True)]
    for group, actor in zip(groups, held["actors"], strict=True):
        group.actor = actor
    return held["batch"], held["reason"], groups
