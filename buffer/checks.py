"""What the controller checks before it believes: pushes against leases and published weights, and endless failure."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from areal_like import messages
from areal_like.groups import Head, check_payload, unpack_heads
from areal_like.messages import PartialHead
from areal_like.partials import check_partial, versions_of
from areal_like.wire import Frame, Payloads, WireError
from buffer.fleet import Actor
from buffer.store import Entry

log = logging.getLogger(__name__)
WORDS = ("engine", "engine_note")
"""What is text among an actor's stats (`buffer.fleet.Actor.engine`)."""
MOST_REDRAWN, MOST_CHARACTERS = 8, 256
"""Of one sample, so many times; of a word among stats."""


def faults_of_push(
    heads: Sequence[Head],
    payloads: Payloads,
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
            if len(payload) != head.size:
                raise WireError(f"group {head.id}: its payload has {len(payload)} bytes where {head.size} belong")
            check_payload(head, payload, vocab_size)
        except WireError as error:
            faults[head.id] = error
    return faults


def check_hello(name: str, role: str, known: Actor | None) -> None:
    """Raises WireError unless one with whom the buffer can work says hello; `known` is who the sender is so far."""
    if role not in ("actor", "learner"):
        raise WireError(f"{role!r} is no role that says hello")
    if not name.isprintable():
        raise WireError("a name is made of letters that can be printed")
    if known and known.name != name:
        raise WireError(f"this connection is {known.name} already")


def check_left_out(cut: Sequence[int], redrawn: Sequence[str], entry: Entry) -> None:
    """Raises WireError unless so many samples may have been cut, and so many drawn anew."""
    if len(cut) > entry.launch or len(redrawn) > MOST_REDRAWN * entry.launch:
        raise WireError(f"group {entry.id} can't have left out these samples")


def check_stats(stats: dict[str, float | str]) -> dict[str, float | str]:
    """An actor's running totals, as numbers, and the state of its engine, in words. Raises WireError."""
    for name, value in stats.items():
        if (name in WORDS) != isinstance(value, str):
            raise WireError(f"stats: {name!r} is {'text' if name in WORDS else 'a number'}")
        if isinstance(value, str) and (len(value) > MOST_CHARACTERS or not value.isprintable()):
            raise WireError(f"stats: {name!r} has at most {MOST_CHARACTERS} printable characters")
    return stats


def check_hand_back(
    heads: Sequence[PartialHead],
    payloads: Payloads,
    entries: Mapping[int, Entry],
    digests: Mapping[int, str],
    vocab_size: int | None = None,
) -> None:
    """Raises WireError unless the partial groups fit their leases, their payloads, and published weights."""
    if len(heads) != len(payloads):
        raise WireError(f"{len(payloads)} payloads for {len(heads)} partial groups")
    for head, payload in zip(heads, payloads, strict=True):
        check_partial(head, payload, vocab_size)
        entry = entries.get(head.id)
        if entry and max(versions_of(head)) >= entry.launch:
            raise WireError(f"partial group {head.id}: it has {entry.launch} samples")
        _check_digests(head.id, head.digests, entry, digests)


def checked_answer(
    message: messages.Evaluated, payloads: Payloads, vocab_size: int | None
) -> tuple[Head, Frame] | None:
    """The sample of a held-out result, if it brings one. Raises WireError."""
    if message.answer is None:
        return None
    heads = unpack_heads(message.answer)
    if not len(heads) == heads[0].samples == len(payloads) == 1 or len(payloads[0]) != heads[0].size:
        raise WireError("a held-out answer is one sample, with its payload")
    check_payload(heads[0], payloads[0], vocab_size)
    return heads[0], payloads[0]


def _check_digests(
    group_id: int, claimed: Mapping[int, str], entry: Entry | None, published: Mapping[int, str]
) -> None:
    """Those of the tokens that a lease carried were checked when they were handed back, maybe before a crash."""
    carried = entry.partial.head.digests if entry and entry.partial else {}
    for version, digest in claimed.items():
        if digest not in (published.get(version), carried.get(version)):
            raise WireError(f"group {group_id}: no version {version} with digest {digest[:40]} was published")


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
