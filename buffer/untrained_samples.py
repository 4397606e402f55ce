"""Samples that the buffer writes to files for people to read: held-out answers, and groups that are not trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from areal_like.config.schema import Run
from areal_like.run.samples import DROPPED, HELDOUT, TRAINED_SHARE, Fate, Kept, SampleLog, kept, unanswered, unfinished
from areal_like.types import PartialSample
from areal_like.wire.groups import Head, decode_group
from areal_like.wire.messages import LeftOut
from areal_like.wire.partials import decode_partial
from buffer.partial_group import PartialGroup
from buffer.payloads import Payload, load

log = logging.getLogger(__name__)
LONGEST_WHY = 500
"""Most characters of a reason."""
MOST_REASONS = 32
"""Most different reasons: a user's filter may have any number."""
Now = tuple[int, int]
"""(train steps made, newest version)."""
ALL = range(1 << 31)
"""All indices of samples."""
NO_TEXT = {
    "timed out": "its lease made no progress",
    "malformed": "what its actors sent can't be read",
    "stale": "it waited for an actor",
    "cut": "an actor sends it for one group per version",
}
"""Why the text of samples is not known, by reason."""
NO_ANSWER = "no answer was complete"


class Awaited(NamedTuple):
    """A group whose samples the actor was asked for."""

    now: Now
    why: str
    actor: str
    rare: bool


class UntrainedSamples:
    """`folder`: of the run (None: keep nothing). `done`: train steps before this start. It keeps the first untrained
    group of each train step and reason. The first group of a reason in a run may use the room of later steps."""

    def __init__(self, folder: Path | None = None, run: Run | None = None, done: int = 0):
        self._logs: dict[Fate, SampleLog] = {}
        self._reasons: dict[str, int] = {}  # → train steps made when a group was kept for it last
        self._awaited: dict[int, Awaited] = {}  # by group
        if folder and run and run.samples_bytes:
            most = (1 - TRAINED_SHARE) * run.samples_bytes
            self._logs[DROPPED] = SampleLog(folder, DROPPED, steps=run.steps, most=most, done=done)
            self._logs[HELDOUT] = SampleLog(folder, HELDOUT, steps=run.steps, most=None, done=done)

    def dropped(self, now: Now, head: Head, payload: Payload, why: str, actor: str) -> None:
        """A group that was rolled out and is not trained."""
        if not self._is_wanted(now, why):
            return
        self._write(why, _rolled_out(now, head, payload, why[:LONGEST_WHY], actor))

    def unfinished(self, now: Now, group_id: int, why: str, actor: str, left: PartialGroup | None = None) -> None:
        """A group that left before it was rolled out; `left`: what is known of its samples."""
        if self._is_wanted(now, why):
            self._write(why, _unfinished(now, group_id, why[:LONGEST_WHY], actor, left))

    def left_out(self, now: Now, message: LeftOut, left: PartialGroup | None, actor: str) -> None:
        """Samples that a group did not wait for, by their tokens so far, and others that were drawn again, by their
        reasons. `left`: what they said, in this order."""
        said, cut, redrawn = _decoded(left), message.cut, message.redrawn
        if cut:
            lengths = ", ".join(map(str, cut))
            why = f"cut: others of the group were faster; {len(cut)} sample{'s' * (len(cut) > 1)} had {lengths} tokens"
            pairs = {why: [said[place] for place in range(len(cut)) if place in said]}
            self._keep_left_out(now, message.id, pairs, actor)
        if redrawn:
            pairs = {}
            for place, reason in enumerate(redrawn, len(cut)):
                pairs.setdefault(f"redrawn: {reason}", []).extend([said[place]] if place in said else [])
            self._keep_left_out(now, message.id, pairs, actor)

    def _keep_left_out(self, now: Now, group_id: int, said: dict[str, list[PartialSample]], actor: str) -> None:
        """`said`: by reason. Without text only the first of a kind is kept: the next one may have text."""
        kind = next(iter(said)).partition(":")[0]
        if not any(said.values()):
            unread = f"{kind}, no text"
            if unread not in self._reasons and kind not in self._reasons and self._is_wanted(now, unread):
                why = f"{kind}: {'; '.join(each.partition(': ')[2] for each in said)}"
                self._write(unread, _unfinished(now, group_id, why[:LONGEST_WHY], actor, None))
        elif self._is_wanted(now, kind):
            pairs = [(why[:LONGEST_WHY], each) for why, samples in said.items() for each in samples]
            records = [unfinished(*now, (group_id, at), each, why, actor) for at, (why, each) in enumerate(pairs)]
            self._write(kind, records)

    # ---- groups that an actor is asked for --------------------------------------------------------------------------

    def ask(self, now: Now, group_id: int, why: str, actor: str) -> None:
        """A group left while an actor worked on it. If its samples are wanted, remember to ask the actor for them."""
        if self._is_wanted(now, why):
            self._awaited[group_id] = Awaited(now, why[:LONGEST_WHY], actor, self._reason(why) not in self._reasons)
            self._reasons[self._reason(why)] = now[0]

    def awaits(self, group_id: int, actor: str) -> bool:
        """Must this actor be asked for this group, or was it asked?"""
        return group_id in self._awaited and self._awaited[group_id].actor == actor

    def answered(self, group_id: int, left: PartialGroup | None) -> None:
        """Keep the samples of a group that an actor was asked for."""
        asked = self._awaited.pop(group_id)
        missing = "nothing was sampled"
        self._write(asked.why, _unfinished(asked.now, group_id, asked.why, asked.actor, left, missing), asked.rare)

    def rolled_out(self, head: Head, payload: Payload) -> None:
        """The actor had pushed the group before it was asked."""
        asked = self._awaited.pop(head.id)
        self._write(asked.why, _rolled_out(asked.now, head, payload, asked.why, asked.actor), asked.rare)

    def gone(self, actor: str) -> None:
        """An actor is lost: its answers will not come."""
        self._give_up("the actor was lost", actor)

    def finish(self) -> None:
        """The run ends."""
        self._give_up("the run ended before the actor had answered")

    def _give_up(self, missing: str, actor: str | None = None) -> None:
        for group_id, asked in list(self._awaited.items()):
            if actor in (None, asked.actor):
                del self._awaited[group_id]
                records = _unfinished(asked.now, group_id, asked.why, asked.actor, None, missing)
                self._write(asked.why, records, asked.rare)

    # ---- held-out answers -------------------------------------------------------------------------------------------

    def heldout(self, now: Now, of: str, place: tuple[int, int], head: Head, payload: Payload, actor: str) -> None:
        """Keep a held-out answer, a group of one sample, of the set `of`: `place` is (prompt, sample)."""
        if log_of := self._logs.get(HELDOUT):
            (sample,) = decode_group(head, load(payload)).samples
            log_of.write(kept(HELDOUT, *now, place, sample, actor=actor, of=of))

    def heldout_failed(self, now: Now, of: str, place: tuple[int, int], actor: str) -> None:
        """A held-out prompt whose answer, workflow or reward failed: it counts as 0."""
        if log_of := self._logs.get(HELDOUT):
            why = "failed: it counts as 0; no text: its actor's log has the error"
            log_of.write(Kept(HELDOUT, *now, *place, [], 0, [], 0.0, "", why=why, actor=actor, of=of))

    # ---- what is wanted ---------------------------------------------------------------------------------------------

    def _is_wanted(self, now: Now, why: str) -> bool:
        log_of, reason = self._logs.get(DROPPED), self._reason(why)
        if log_of is None or self._reasons.get(reason) == now[0]:
            return False
        return log_of.room(now[0], rare=reason not in self._reasons) > 0

    def _write(self, why: str, records: Sequence[Kept], rare: bool = False) -> None:
        reason = self._reason(why)
        rare |= reason not in self._reasons
        self._reasons[reason] = max(records[0].step, self._reasons.get(reason, 0))
        for record in records:
            self._logs[DROPPED].write(record, rare)

    def _reason(self, why: str) -> str:
        kind, _, detail = why.partition(": ")
        whole = f"{kind}: {detail.partition(':')[0]}" if kind == "filtered" else kind
        return whole if whole in self._reasons or len(self._reasons) < MOST_REASONS else kind


def _rolled_out(now: Now, head: Head, payload: Payload, why: str, actor: str) -> list[Kept]:
    """The records of a whole group."""
    try:
        samples = decode_group(head, load(payload)).samples
    except (ValueError, OSError) as error:  # WireError and JournalError among them
        return [unanswered(*now, head.id, _textless(why, str(error)), actor)]
    return [kept(DROPPED, *now, (head.id, at), each, why=why, actor=actor) for at, each in enumerate(samples)]


def _unfinished(
    now: Now, group_id: int, why: str, actor: str, left: PartialGroup | None, missing: str | None = None
) -> list[Kept]:
    """The records of a group's known samples; without any, one record that says why (`missing`)."""
    if said := _decoded(left):
        return [unfinished(*now, (group_id, index), each, why, actor) for index, each in said.items()]
    missing = missing or NO_TEXT.get(why.partition(":")[0], NO_ANSWER)
    return [unanswered(*now, group_id, _textless(why, missing), actor)]


def _textless(why: str, missing: str) -> str:
    """A reason, and why there is no text. What comes before its first colon stays the same."""
    return f"{why}{'; ' if ':' in why else ': '}no text: {missing[:LONGEST_WHY]}"


def _decoded(left: PartialGroup | None) -> dict[int, PartialSample]:
    """Samples by index."""
    try:
        return decode_partial(left.head, load(left.payload), ALL).samples if left else {}
    except (ValueError, OSError) as error:  # JournalError among them
        log.debug("can't read what the samples of group %d said: %s", left.head.id if left else -1, error)
        return {}
