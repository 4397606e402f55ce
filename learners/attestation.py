"""A record of all published weights: the learner refuses samples that claim to come from other weights.

Each group carries, for every version that made one of its tokens, the digest of the weights that its actor held. Before
it computes a gradient, each rank of the learner compares those of its share of the batch with the learner's own record,
`RUN/published.log`: a line "VERSION DIGEST" per publication, written before the version is announced and never changed.
A version has two lines if its second publication, after a resume, had other bits. A replay uses its source's.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from areal_like.errors import UserError
from areal_like.run.run_folder import PUBLISHED
from areal_like.types import Batch
from areal_like.wire.groups import OR
from learners.untrainable import Untrainable


class AttestationError(Untrainable):
    """A batch made by weights that the learner did not publish."""


class Attestation:
    """The record of `run`, to compare with; with `recorded`, the folder of a replayed run, that run's record. For an
    unknown digest it reads on: the learner's first rank `writes`. Raises FileNotFoundError without a record."""

    def __init__(self, run: Path, recorded: Path | None = None, *, writes: bool = True):
        self._known: dict[int, set[str]] = defaultdict(set)
        self.resumed: int | None = None
        """The version of the checkpoint that the learner has loaded: its weights were published before."""
        self._own, self._compared, self._read = run / PUBLISHED, (recorded or run) / PUBLISHED, 0
        if writes:
            self._own.touch()
            text = self._own.read_text(encoding="utf-8")
            if text and not text.endswith("\n"):  # a crash tore the line: that version was not announced
                self._own.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
            self._read_on()

    def add(self, version: int, digest: str) -> None:
        """Record weights that are about to be published. Any thread may call this. Raises UserError if those of a
        checkpoint are other weights than were published."""
        if self._own == self._compared:
            if digest in self._known[version]:
                return  # a resume has repeated it
            if version == self.resumed and self._known[version]:
                raise UserError(
                    f"the checkpoint's weights have the digest {digest}, but {self._own} has version {version} with "
                    f"{' or '.join(sorted(self._known[version]))}: the checkpoint is damaged; remove it"
                )
            self._known[version].add(digest)
        with self._own.open("a", encoding="utf-8") as file:
            file.write(f"{version} {digest}\n")

    def check(self, batch: Batch) -> None:
        if fault := self.fault(batch):
            raise AttestationError(f"batch {batch.index}, {fault}; the batch is not trained")

    def fault(self, batch: Batch) -> str:
        """Names a version with tokens of weights of another digest, and the batch's first such group; else empty."""
        for group in batch.groups:
            for version, digest in ((v, d) for v, text in group.digests.items() for d in text.split(OR)):
                if digest not in self._known[version]:
                    self._read_on()
                if digest not in self._known[version]:
                    return (
                        f"group {group.id} of {group.actor or 'an actor before the resume'}: its tokens of version "
                        f"{version} were made by weights with the digest {digest[:40]}, which this learner has not "
                        "published"
                    )
        return ""

    def _read_on(self) -> None:
        with self._compared.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]  # the last one may be half written
        self._read += len(whole)
        for line in whole.decode().splitlines():
            version, _, digest = line.partition(" ")
            self._known[int(version)].add(digest)
