"""Checks of what peers send: pushes against leases and published weights. Also ends a run in which all groups fail, or
whose verifier hangs. No I/O."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_like.models.experts import Routing
from areal_like.wire import messages
from areal_like.wire.frames import Frame, Payloads, WireError
from areal_like.wire.groups import Head, check_partial, check_payload, unpack_heads, versions_of
from areal_like.wire.messages import PartialHead
from buffer.entries import Entry
from buffer.fleet import Stats

log = logging.getLogger(__name__)
WORDS = ("engine", "engine_note")
"""The stats of an actor that are text; all others are numbers (`buffer.peers.Actor.engine`)."""
MOST_REDRAWN = 8
"""Redraws of one sample."""


def faults_of_push(
    heads: Sequence[Head],
    payloads: Payloads,
    entries: Mapping[int, Entry],
    digests: Mapping[int, str],
    vocab_size: int | None = None,
    routing: Routing | None = None,
) -> dict[int, WireError]:
    """Faulty groups: group id → its fault. A group must fit its lease, its payload and published weights (`digests`),
    and the learner must be able to train on it (`check_payload`): its model knows `vocab_size` tokens and chooses
    experts by `routing` (None: not known). A deferred group may have another size now."""
    faults: dict[int, WireError] = {}
    for head, payload in zip(heads, payloads, strict=True):
        entry = entries.get(head.id)
        try:
            if entry and head.samples != entry.need and not entry.was_deferred:
                raise WireError(f"group {head.id}: {head.samples} samples where {entry.need} were asked for")
            _check_digests(head.id, head.digests, entry, digests)
            if len(payload) != head.size:
                raise WireError(f"group {head.id}: its payload has {len(payload)} bytes where {head.size} belong")
            check_payload(head, payload, vocab_size, routing)
        except WireError as error:
            faults[head.id] = error
    return faults


def check_left_out(cut: Sequence[int], redrawn: Sequence[str], entry: Entry) -> None:
    """Raises WireError if there are more cut or redrawn samples than the group can have."""
    if len(cut) > entry.launch or len(redrawn) > MOST_REDRAWN * entry.launch:
        raise WireError(f"group {entry.id} can't have that many cut or redrawn samples")


def check_stats(stats: dict[str, float | str]) -> dict[str, float | str]:
    """Returns `stats`: an actor's running totals as numbers, the state of its engine as text. Raises WireError."""
    for name, value in stats.items():
        if (name in WORDS) != isinstance(value, str) or (isinstance(value, str) and not value.isprintable()):
            raise WireError(f"stats: {name!r} is {'printable text' if name in WORDS else 'a number'}")
    return stats


def check_hand_back(
    heads: Sequence[PartialHead],
    payloads: Payloads,
    entries: Mapping[int, Entry],
    digests: Mapping[int, str],
    vocab_size: int | None = None,
    routing: Routing | None = None,
) -> None:
    """Raises WireError if a partial group does not fit its lease, its payload or published weights."""
    if len(heads) != len(payloads):
        raise WireError(f"{len(payloads)} payloads for {len(heads)} partial groups")
    for head, payload in zip(heads, payloads, strict=True):
        check_partial(head, payload, vocab_size, routing)
        entry = entries.get(head.id)
        if entry and max(versions_of(head)) >= entry.launch:
            raise WireError(f"partial group {head.id}: it has {entry.launch} samples")
        _check_digests(head.id, head.digests, entry, digests)


def checked_answer(
    message: messages.Evaluated, payloads: Payloads, vocab_size: int | None
) -> tuple[Head, Frame] | None:
    """The sample of a held-out result, if the message has one. Raises WireError."""
    if message.answer is None:
        return None
    heads = unpack_heads(message.answer)
    if not len(heads) == heads[0].samples == len(payloads) == 1 or len(payloads[0]) != heads[0].size:
        raise WireError("a held-out answer must be one sample, with its payload")
    check_payload(heads[0], payloads[0], vocab_size)
    return heads[0], payloads[0]


def _check_digests(
    group_id: int, claimed: Mapping[int, str], entry: Entry | None, published: Mapping[int, str]
) -> None:
    """Tokens that a lease carried may have older digests: these were checked at the hand-back, maybe before a crash."""
    carried = entry.partial.head.digests if entry and entry.partial else {}
    for version, digest in claimed.items():
        if digest != carried.get(version):
            check_published(version, digest, published, f"group {group_id}: ")


def check_published(version: int, digest: str, published: Mapping[int, str], where: str = "") -> None:
    if published.get(version) != digest:
        raise WireError(f"{where}no version {version} with digest {digest[:40]} was published")


class RolloutsFail(RuntimeError):
    """No group can be rolled out: the task, the reward or the model does not work."""


class FailedGroups:
    """Counts groups that failed in a row, with no success between. `most` of them end the run: it makes no progress."""

    def __init__(self, most: int):
        self.most, self.count = most, 0

    def add(self, group_id: int, reason: str, detail: str) -> None:
        """Count a failed group. Raises RolloutsFail at the `most`-th in a row."""
        self.count += 1
        if self.count <= 3:
            log.warning("group %d %s %s", group_id, reason, detail)
        if self.count >= self.most:
            raise RolloutsFail(f"{self.count} groups in a row could not be rolled out; the last: {reason} {detail}")


MOST_ANSWERS = 32
"""The most answers that `Unverified` considers, even if a batch has more: each may take its full time."""


@dataclass(slots=True)
class Unverified:
    """Counts the answers of the task `name`, and those that earned 0 without a verdict, from the totals that actors
    report: their verifier raised, or took more than `timeout` seconds. With a verifier that always does a run would
    look healthy but learn nothing. The run ends if their share of the newest `window` answers reaches `limit` (None:
    never)."""

    name: str = ""
    timeout: float = 0.0
    limit: float | None = None
    window: int = MOST_ANSWERS
    _totals: dict[str, tuple[float, float]] = field(default_factory=dict)
    _newest: deque[tuple[float, float]] = field(default_factory=deque)

    def see(self, actor: str, stats: Stats) -> None:
        """Note an actor's totals; they restart when the actor does. Raises RolloutsFail."""
        totals = float(stats.get("sum:rewards/answered", 0.0)), float(stats.get("sum:rewards/unverified", 0.0))
        before = self._totals.get(actor, (0.0, 0.0))
        self._totals[actor] = totals
        answered, failed = totals if totals[0] < before[0] else (totals[0] - before[0], totals[1] - before[1])
        if answered > 0:
            self._newest.append((answered, failed))
            self._check()

    def _check(self) -> None:
        answered = sum(each for each, _ in self._newest)
        while answered - self._newest[0][0] >= self.window:
            answered -= self._newest.popleft()[0]
        failed = sum(each for _, each in self._newest)
        if self.limit is not None and answered >= self.window and failed >= self.limit * answered:
            raise RolloutsFail(
                f"{failed:.0f} of the last {answered:.0f} answers earned 0: the verifier of task {self.name} raised "
                f"(see the actors' logs) or overran rewards.timeout ({self.timeout:g} s); see rewards.max_unverified"
            )
