"""Files for people to read: held-out answers, and groups that are not trained."""

import logging
from pathlib import Path

from areal_like.config.schema import Run
from areal_like.run.samples import DROPPED, HELDOUT, TRAINED_SHARE, Kept, SampleLog, kept
from areal_like.wire.groups import Head, decode_group
from areal_like.wire.stored import Payload, load
from buffer.evaluation import AnswerPlace

log = logging.getLogger(__name__)
LONGEST_WHY = 500
"""Most characters of a reason."""
Now = tuple[int, int]
"""(train steps made, newest version)."""


class KeptSamples:
    """`folder`: of the run (None: keep nothing). `done`: train steps before this start. It keeps the first untrained
    group of each train step and reason, within a part of `run.samples_bytes`."""

    def __init__(self, folder: Path | None = None, run: Run | None = None, done: int = 0):
        self._dropped: SampleLog | None = None
        self._heldout: SampleLog | None = None
        self._steps: dict[tuple[str, bool], int] = {}  # (reason, pushed?) → train steps when it was kept last
        if folder and run and run.samples_bytes:
            most = (1 - TRAINED_SHARE) * run.samples_bytes
            self._dropped = SampleLog(folder, DROPPED, steps=run.steps, most=most, done=done)
            self._heldout = SampleLog(folder, HELDOUT, steps=run.steps, most=None, done=done)

    def dropped(self, now: Now, group: int, head: Head | None, payload: Payload, why: str, actor: str) -> None:
        """Keep a group that is not trained: its samples, or without a push (no `head`) the reason alone."""
        reason, why = (why.partition(": ")[0], head is not None), why[:LONGEST_WHY]
        if self._dropped is None or self._steps.get(reason) == now[0] or self._dropped.room(now[0]) <= 0:
            return
        try:
            samples = decode_group(head, load(payload)).samples if head else []
        except (ValueError, OSError) as error:  # WireError and JournalError among them
            log.debug("group %d (%s) can't be read: %s", group, why, error)
            return
        self._steps[reason] = now[0]
        for index, sample in enumerate(samples):
            self._dropped.write(kept(DROPPED, *now, (group, index), sample, why=why, actor=actor))
        if head is None:
            self._dropped.write(Kept(DROPPED, *now, group, 0, [], 0, [], None, "", why=why, actor=actor))

    def heldout(self, now: Now, place: AnswerPlace, answer: tuple[Head, Payload] | None, actor: str) -> None:
        """Keep a held-out answer, a group of one sample (None: the answer, its workflow or its reward failed)."""
        if self._heldout is None:
            return
        of, at = place.of.name, (place.prompt, place.sample)
        if answer:
            (sample,) = decode_group(answer[0], load(answer[1])).samples
            self._heldout.write(kept(HELDOUT, *now, at, sample, actor=actor, of=of))
        else:
            why = "failed: it counts as 0; no text: its actor's log has the error"
            self._heldout.write(Kept(HELDOUT, *now, *at, [], 0, [], 0.0, "", why=why, actor=actor, of=of))
