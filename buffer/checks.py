"""What the controller checks before it believes: pushes against leases and published weights, and endless failure."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.groups import Head, check_payload
from areal_like.partials import check_partial
from areal_like.ring import DESCRIPTOR_BYTES, MappedRing
from areal_like.wire import WireError
from buffer.fleet import Actor
from buffer.store import Entry

log = logging.getLogger(__name__)
MAX_NAME, MAX_SLOTS, MAX_STATS = 100, 1 << 20, 100
WORDS = ("engine", "engine_note")
"""What is text among an actor's stats (`buffer.fleet.Actor.engine`)."""
MOST_REDRAWN, MOST_CHARACTERS = 8, 256
"""Of one sample, so many times; of a reason for it."""


def read_payloads(heads: Sequence[Head], frames: Sequence[Any], ring: MappedRing | None) -> list[Any]:
    """The frames of a push, or the memory that they name. None in place of a block that was pushed before and is free
    again: a push that is repeated late. Raises WireError."""
    if len(heads) != len(frames):
        raise WireError(f"push: {len(frames)} payloads for {len(heads)} groups")
    return [
        ring.piece(bytes(frame), head.size) if ring and len(frame) == DESCRIPTOR_BYTES else frame
        for head, frame in zip(heads, frames, strict=True)
    ]


def faults_of_push(
    heads: Sequence[Head],
    payloads: Sequence[Any],
    entries: Mapping[int, Entry],
    digests: Mapping[int, str],
    vocab_size: int | None = None,
) -> dict[int, WireError]:
    """Group → what is wrong with it, of those that don't fit their leases, their payloads, or weights that the learner
    has published, or that a learner whose model knows `vocab_size` tokens (None: not known) can't train on
    (`check_payload`).

    `digests` maps published versions to the digests of their bits: a sample of any other weights is refused. A group
    that was deferred may have another size now; a push of before, which comes again, is no fault of its sender's.
    """
    faults: dict[int, WireError] = {}
    for head, payload in zip(heads, payloads, strict=True):
        entry = entries.get(head.id)
        try:
            if entry and head.samples != entry.need and not entry.was_deferred:
                raise WireError(f"group {head.id}: {head.samples} samples where {entry.need} were asked for")
            _check_digests(head.id, head.digests, entry, digests)
            if payload is not None and len(payload) != head.size:
                raise WireError(f"group {head.id}: its payload has {len(payload)} bytes where {head.size} belong")
            if payload is not None:
                check_payload(head, payload, vocab_size)
        except WireError as error:
            faults[head.id] = error
    return faults


def check_hello(name: str, role: str, slots: int, known: Actor | None) -> None:
    """Raises WireError unless one with whom the buffer can work says hello; `known` is who the sender is so far."""
    if role not in ("actor", "learner"):
        raise WireError(f"{role[:40]!r} is no role that says hello")
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or not 0 <= slots <= MAX_SLOTS:
        raise WireError(f"a name has 1 to {MAX_NAME} letters, and an engine at most {MAX_SLOTS} slots")
    if known and known.name != name:
        raise WireError(f"this connection is {known.name} already")


def check_left_out(cut: Any, redrawn: Any, entry: Entry) -> None:
    """Raises WireError unless so many samples may have been cut, each after a number of tokens, and so many drawn anew,
    each for a reason of some length."""
    good_cut = len(cut) <= entry.launch and all(type(each) is int and 0 < each < 1 << 31 for each in cut)
    good_reasons = all(type(each) is str and len(each) <= MOST_CHARACTERS for each in redrawn)
    if not good_cut or not good_reasons or len(redrawn) > MOST_REDRAWN * entry.launch:
        raise WireError(f"left_out: group {entry.id} can't have left out these samples")


def check_stats(stats: dict[str, Any]) -> dict[str, Any]:
    """An actor's running totals, as numbers, and the state of its engine, in words. Raises WireError, TypeError,
    ValueError."""
    words = {key: stats[key] for key in WORDS if key in stats}
    checked = {key: float(value) for key, value in stats.items() if key not in words}
    if len(checked) > MAX_STATS or not all(map(math.isfinite, checked.values())):
        raise WireError(f"at most {MAX_STATS} finite numbers")
    if not all(type(each) is str and len(each) <= MOST_CHARACTERS and each.isprintable() for each in words.values()):
        raise WireError(f"{' and '.join(WORDS)}: text of at most {MOST_CHARACTERS} printable characters")
    return checked | words


def check_progress(progress: Mapping[Any, Any], heldout: Mapping[Any, Any]) -> None:
    """Raises WireError unless a heartbeat maps leases to tokens."""
    numbers = [*progress, *progress.values(), *heldout, *heldout.values()]
    if not all(type(each) is int for each in numbers):
        raise WireError("heartbeat: progress maps leases to tokens, both numbers")


def check_give_back(
    metas: list[Any],
    payloads: Sequence[Any],
    entries: Mapping[int, Entry],
    digests: Mapping[int, str],
    vocab_size: int | None = None,
) -> None:
    """Raises WireError unless the partial groups fit their leases, their payloads, and published weights."""
    if len(metas) != len(payloads):
        raise WireError("give_back: a partial group is a table and a payload")
    for meta, payload in zip(metas, payloads, strict=True):
        check_partial(meta, payload, vocab_size)
        entry = entries.get(meta["id"])
        if entry and max(row[0] for row in meta["samples"]) >= entry.launch:
            raise WireError(f"partial group {meta['id']}: it has {entry.launch} samples")
        _check_digests(meta["id"], meta["digests"], entry, digests)


def _check_digests(
    group_id: int, claimed: Mapping[int, str], entry: Entry | None, published: Mapping[int, str]
) -> None:
    """Those of the tokens that a lease carried were checked when they were handed back, maybe before a crash."""
    carried = entry.partial.meta["digests"] if entry and entry.partial else {}
    for version, digest in claimed.items():
        if digest not in (published.get(version), carried.get(version)):
            raise WireError(f"group {group_id}: no version {version} with digest {str(digest)[:40]} was published")


class RolloutsFail(RuntimeError):
    """Nothing can be rolled out: the task, the reward or the model does not work."""


class Failures:
    """Groups that failed in a row, with none rolled out between. `most` of them end the run: it would never move."""

    def __init__(self, most: int):
        self.most, self.count, self.last = most, 0, ""

    def add(self, group_id: int, reason: str, detail: str) -> None:
        """Raises RolloutsFail."""
        self.count, self.last = self.count + 1, f"{reason} {detail}".strip()
        if self.count <= 3:
            log.warning("group %d %s", group_id, self.last)
        if self.count >= self.most:
            raise RolloutsFail(f"{self.count} groups in a row could not be rolled out; the last: {self.last}")

    def end(self) -> None:
        self.count, self.last = 0, ""
