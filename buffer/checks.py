"""Checks of what peers send: pushes against leases and published weights. Also ends a run in which all groups fail, or
whose verifier hangs. No I/O."""

import logging
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from areal_like.wire import messages
from areal_like.wire.frames import Frame, Payloads, WireError
from areal_like.wire.groups import Head, check_payload, decode_group, unpack_heads
from buffer.entries import Entry
from buffer.fleet import Stats

log = logging.getLogger(__name__)
WORDS = ("engine", "engine_note", "verifier_note")
"""The stats of an actor that are text; all others are numbers (`buffer.peers.Actor.engine`)."""
STATISTIC = re.compile(
    r"(sum|part|whole|now|mean|max):(rollout|engine|servers|served|agents|turns|rewards)/[\w./-]+", re.ASCII
)
MOST_REDRAWN, MOST_CONTEXTS = 8, 64
"""Redraws of one sample; contexts of one that progress may count."""


@dataclass(slots=True)
class AnswerLimits:
    """How long answers are at most: `longest(row)` tokens (None: not known) in each context. `one_prompt`: all samples
    of a group have the same prompt."""

    longest: Callable[[int], int] | None = None
    one_prompt: bool = False
    _most: int = 0  # for the rows so far: most groups need no other look

    def of(self, row: int, tokens: float) -> float:
        """The limit of a row, or of rows before it if `tokens` are within that."""
        if self.longest and tokens > self._most:
            self._most = max(self._most, most := self.longest(row))
            return most
        return self._most if self.longest else math.inf

    def allows_progress(self, row: int, samples: int, tokens: int) -> bool:
        """Can so many samples of a row have so many tokens?"""
        contexts = samples * (MOST_CONTEXTS if not self.one_prompt else MOST_REDRAWN)
        return tokens <= contexts * self.of(row, tokens / contexts)

    def check(self, head: Head, payload: Frame, row: int, positions: int | None) -> None:
        """Raises WireError for a prompt or an answer that is longer than its limit, or prompts that differ."""
        allowed, room = self.of(row, head.response), positions or math.inf
        if head.response > allowed or head.prompt + head.response > room:
            for sample in decode_group(head, payload).samples:
                contexts = 1 + len(sample.forks)
                if sample.response_length > contexts * allowed or len(sample.tokens) > contexts * room:
                    lengths = f"{sample.prompt_length} + {sample.response_length} tokens in {contexts} contexts"
                    raise WireError(f"{lengths}, where {allowed:g} in {room:g} positions fit")
        if self.one_prompt and head.prompts > head.prompt:
            raise WireError("its samples have several prompts")


def faults_of_push(
    heads: Sequence[Head],
    payloads: Payloads,
    entries: Mapping[int, Entry],
    digests: Mapping[int, str],
    model: messages.Model | None,
    limits: AnswerLimits,
) -> dict[int, WireError]:
    """Faulty groups: group id → its fault. A group must fit its lease, its payload, published weights (`digests`) and
    the `limits`, and the learner's `model` must be able to train on it (`check_payload`). A deferred group may have
    another size now."""
    faults: dict[int, WireError] = {}
    for head, payload in zip(heads, payloads, strict=True):
        entry = entries.get(head.id)
        try:
            if entry and head.samples + head.unscored != entry.need and not entry.was_deferred:
                raise WireError(f"{head.samples} samples where {entry.need} were asked for")
            if head.unscored and head.samples < 2:
                raise WireError(f"a group of one sample, without {head.unscored} that have no reward")
            for version, digest in head.digests.items():
                check_published(version, digest, digests)
            if len(payload) != head.size:
                raise WireError(f"its payload has {len(payload)} bytes where {head.size} belong")
            check_payload(head, payload, model)
            if entry:
                limits.check(head, payload, entry.row, model.positions if model else None)
        except WireError as error:
            faults[head.id] = WireError(f"group {head.id}: {error}")
    return faults


def check_left_out(cut: Sequence[int], redrawn: Sequence[str], entry: Entry, limits: AnswerLimits) -> None:
    """Raises WireError if there are more cut or redrawn samples than the group can have, or longer ones."""
    most = MOST_CONTEXTS * limits.of(entry.row, max(cut, default=0) / MOST_CONTEXTS)
    if len(cut) > entry.launch or len(redrawn) > MOST_REDRAWN * entry.launch or max(cut, default=0) > most:
        raise WireError(f"group {entry.id} can't have that many cut or redrawn samples")


def check_stats(stats: Stats) -> None:
    """Raises WireError unless they are an actor's own (`actors.measures`): its running totals as numbers, the state of
    its engine as text."""
    for name, value in stats.items():
        if name in WORDS:
            if not isinstance(value, str) or not value.isprintable():
                raise WireError(f"stats: {name!r} is printable text")
        elif isinstance(value, str) or not STATISTIC.fullmatch(name):
            raise WireError(f"stats: {name!r} is no number of an actor")
        elif value < 0:
            raise WireError(f"stats: {name!r} is {value:g}, expected at least 0")


def check_credit(ended: int, leased: int) -> None:
    """Raises WireError if more sequences ended than were leased."""
    if ended > leased:
        raise WireError(f"credit: {ended} sequences ended of {leased} leased")


def check_hand_back(lengths: Sequence[tuple[int, bool]], entry: Entry, limits: AnswerLimits) -> None:
    """Raises WireError if these are not lengths of the group's samples."""
    longest = max((tokens for tokens, _ in lengths), default=0)
    if len(lengths) > entry.launch or longest > MOST_CONTEXTS * limits.of(entry.row, longest / MOST_CONTEXTS):
        raise WireError(f"group {entry.id} can't have {len(lengths)} samples of up to {longest} tokens")


def checked_answer(
    message: messages.Evaluated,
    payloads: Payloads,
    model: messages.Model | None,
    digests: Mapping[int, str],
    limits: AnswerLimits,
    place: int,
) -> tuple[Head, Frame] | None:
    """The sample of a held-out result, if the message has one. `limits`: of places. Raises WireError."""
    if not {message.oldest, message.newest} <= digests.keys() or message.oldest > message.newest:
        raise WireError(f"no versions {message.oldest} to {message.newest} were published")
    if message.answer is None:
        if message.reward or message.length:
            raise WireError("a held-out result without its answer earns 0")
        return None
    heads = unpack_heads(message.answer)
    if not len(heads) == heads[0].samples == len(payloads) == 1 or len(payloads[0]) != heads[0].size:
        raise WireError("a held-out answer must be one sample, with its payload")
    (head,), (payload,) = heads, payloads
    if [message.reward, message.length, message.oldest, message.newest] != [
        *head.rewards, head.tokens, head.oldest, head.newest
    ]:  # fmt: skip
        raise WireError("a held-out result must be that of its answer")
    check_payload(head, payload, model)
    limits.check(head, payload, place, model.positions if model else None)
    return head, payload


def check_published(version: int, digest: str, published: Mapping[int, str]) -> None:
    if published.get(version) != digest:
        raise WireError(f"no version {version} with digest {digest[:40]} was published")


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
    look healthy but learn nothing. The run ends if, with `window` answers in all, their share of each actor's newest
    `window` reaches `limit` (None: never): one actor alone may be the cause."""

    name: str = ""
    timeout: float = 0.0
    limit: float | None = None
    window: int = MOST_ANSWERS
    _totals: dict[str, tuple[float, float]] = field(default_factory=dict)
    _newest: defaultdict[str, deque[tuple[float, float]]] = field(default_factory=partial(defaultdict, deque))

    def see(self, actor: str, stats: Stats, present: Collection[str]) -> None:
        """Note an actor's totals; they restart when the actor does. `present`: all actors. Raises RolloutsFail."""
        totals = float(stats.get("sum:rewards/answered", 0.0)), float(stats.get("sum:rewards/unverified", 0.0))
        before = self._totals.get(actor, (0.0, 0.0))
        self._totals[actor] = totals
        answered, failed = totals if totals[0] < before[0] else (totals[0] - before[0], totals[1] - before[1])
        if answered > 0:
            newest = self._newest[actor]
            newest.append((answered, failed))
            while sum(each for each, _ in newest) - newest[0][0] >= self.window:
                newest.popleft()
            why = str(stats.get("verifier_note") or "see the actors' logs")
            self._check([self._newest[name] for name in present], why)

    def _check(self, of_actors: list[deque[tuple[float, float]]], why: str) -> None:
        counts = [[sum(each[0] for each in newest), sum(each[1] for each in newest)] for newest in of_actors]
        answered, failed = (sum(each[column] for each in counts) for column in (0, 1))
        if self.limit is None or answered < self.window:
            return
        if all(each[1] >= self.limit * each[0] > 0 for each in counts):
            raise RolloutsFail(
                f"{failed:.0f} of the last {answered:.0f} answers earned 0: the verifier of task {self.name} raised "
                f"({why}) or overran rewards.timeout ({self.timeout:g} s); see rewards.max_unverified"
            )
