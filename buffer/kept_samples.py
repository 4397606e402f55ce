"""Samples that the buffer writes to files for people to read: held-out answers, and groups that are not trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from areal_like.groups import Head, decode_group
from areal_like.samples import DROPPED, HELDOUT, TRAINED_SHARE, Fate, Kept, SampleLog, kept, unanswered
from areal_like.schema import Run
from buffer.payloads import Payload, load

log = logging.getLogger(__name__)
LONGEST_WHY = 500
"""Characters of a reason."""
MOST_REASONS = 32
"""Reasons that are told apart: of a user's filter there may be any number."""
Now = tuple[int, int]
"""(train steps made, newest version)."""


class KeptSamples:
    """`folder`: of the run (None: keep nothing). `done`: train steps before this start. Of what is not trained it keeps
    the first group of each train step and reason; the first of a reason in a run has room whatever came before."""

    def __init__(self, folder: Path | None = None, run: Run | None = None, done: int = 0):
        self._logs: dict[Fate, SampleLog] = {}
        self._reasons: dict[str, int] = {}  # → train steps made when a group was kept for it last
        if folder and run and run.samples_bytes:
            most = (1 - TRAINED_SHARE) * run.samples_bytes
            self._logs[DROPPED] = SampleLog(folder, DROPPED, steps=run.steps, most=most, done=done)
            self._logs[HELDOUT] = SampleLog(folder, HELDOUT, steps=run.steps, most=None, done=done)

    def dropped(self, now: Now, head: Head, payload: Payload, why: str, actor: str) -> None:
        """A group that was rolled out and is not trained."""
        if not self._is_wanted(now, why):
            return
        try:
            group = decode_group(head, load(payload))
        except (ValueError, OSError) as error:  # WireError and JournalError among them
            log.debug("group %d (%s) can't be kept: %s", head.id, why, error)
            return
        why = why[:LONGEST_WHY]
        samples = enumerate(group.samples)
        self._write(why, [kept(DROPPED, *now, (head.id, index), each, why=why, actor=actor) for index, each in samples])

    def unanswered(self, now: Now, group_id: int, why: str, actor: str) -> None:
        """A group that left without having been rolled out."""
        if self._is_wanted(now, why):
            self._write(why, [unanswered(*now, group_id, why[:LONGEST_WHY], actor)])

    def left_out(self, now: Now, group_id: int, cut: Sequence[int], redrawn: Sequence[str], actor: str) -> None:
        """Samples that a group did not wait for, by their tokens so far, and reasons why others were drawn again."""
        if cut:
            lengths = ", ".join(map(str, cut))
            why = f"cut: others of the group were faster; {len(cut)} sample{'s' * (len(cut) > 1)} had {lengths} tokens"
            self.unanswered(now, group_id, why, actor)
        if redrawn:
            self.unanswered(now, group_id, f"redrawn: {'; '.join(dict.fromkeys(redrawn))}", actor)

    def heldout(self, now: Now, row: int, head: Head, payload: Payload, actor: str) -> None:
        """Keep a held-out answer: a group of one sample."""
        if log_of := self._logs.get(HELDOUT):
            (sample,) = decode_group(head, load(payload)).samples
            log_of.write(kept(HELDOUT, *now, (row, 0), sample, actor=actor))

    def _is_wanted(self, now: Now, why: str) -> bool:
        log_of, reason = self._logs.get(DROPPED), self._reason(why)
        if log_of is None or self._reasons.get(reason) == now[0]:
            return False
        return log_of.room(now[0], rare=reason not in self._reasons) > 0

    def _write(self, why: str, records: Sequence[Kept]) -> None:
        reason = self._reason(why)
        rare = reason not in self._reasons
        self._reasons[reason] = records[0].step
        for record in records:
            self._logs[DROPPED].write(record, rare)

    def _reason(self, why: str) -> str:
        kind, _, detail = why.partition(": ")
        whole = f"{kind}: {detail.partition(':')[0]}" if kind == "filtered" else kind
        return whole if whole in self._reasons or len(self._reasons) < MOST_REASONS else kind
