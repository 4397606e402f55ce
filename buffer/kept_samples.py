"""Samples that the buffer writes to files for people to read: held-out answers, and groups that are not trained."""

from __future__ import annotations

import logging
from pathlib import Path

from areal_like.groups import Head, decode_group
from areal_like.samples import DROPPED, HELDOUT, TRAINED_SHARE, Fate, SampleLog, kept
from areal_like.schema import Run
from buffer.payloads import Payload, load

log = logging.getLogger(__name__)


class KeptSamples:
    """`folder`: of the run (None: keep nothing). `done`: train steps before this start. `now`: (train steps made,
    newest version)."""

    def __init__(self, folder: Path | None = None, run: Run | None = None, done: int = 0):
        self._logs: dict[Fate, SampleLog] = {}
        self._told = (-1, "")  # step and reason of the group that was kept last
        if folder and run and run.samples_bytes:
            most = (1 - TRAINED_SHARE) * run.samples_bytes
            self._logs[DROPPED] = SampleLog(folder, DROPPED, steps=run.steps, most=most, done=done)
            self._logs[HELDOUT] = SampleLog(folder, HELDOUT, steps=run.steps, most=None, done=done)

    def dropped(self, now: tuple[int, int], head: Head, payload: Payload, why: str, actor: str) -> None:
        """Keep a group that is not trained, if it is the first of its train step and reason."""
        (step, version), log_of, told = now, self._logs.get(DROPPED), (now[0], why.partition(":")[0])
        if log_of is None or told == self._told or log_of.room(step) <= 0:
            return
        self._told = told
        try:
            group = decode_group(head, load(payload))
        except (ValueError, OSError) as error:  # WireError and JournalError among them
            log.debug("group %d (%s) can't be kept: %s", head.id, why, error)
            return
        for index, sample in enumerate(group.samples):
            log_of.write(kept(DROPPED, step, version, (head.id, index), sample, why=why, actor=actor))

    def heldout(self, now: tuple[int, int], row: int, head: Head, payload: Payload, actor: str) -> None:
        """Keep a held-out answer: a group of one sample."""
        if log_of := self._logs.get(HELDOUT):
            (sample,) = decode_group(head, load(payload)).samples
            log_of.write(kept(HELDOUT, *now, (row, 0), sample, actor=actor))
