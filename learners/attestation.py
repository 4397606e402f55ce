"""A record of all published weights: the learner refuses samples that claim to come from other weights.

Each group carries, for every version that made one of its tokens, the digest of the weights that its actor held. The
buffer compares these digests when a group is pushed. Before it computes a gradient, the learner compares them again
with its own record, `RUN/published.log`. This has a line "VERSION DIGEST" per publication, written before the version
is announced and never changed. So a resume still knows the versions that were published after the last checkpoint. A
version has two lines if its second publication had other bits. A replay trains on another run's batches, and uses that
run's record.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from areal_like.groups import OR
from areal_like.types import Batch
from learners.untrainable import Untrainable

FILE = "published.log"


class AttestationError(Untrainable):
    """A batch made by weights that the learner did not publish."""


class Attestation:
    """The record of `run`. With `recorded`, the folder of a replayed run, batches are compared with that run's record.
    Raises FileNotFoundError if it has none."""

    def __init__(self, run: Path, recorded: Path | None = None):
        self._known: dict[int, set[str]] = defaultdict(set)
        self._path, self._recorded = run / FILE, recorded
        self._path.touch()
        text = self._path.read_text()
        if text and not text.endswith("\n"):
            self._path.write_text(text[: text.rfind("\n") + 1])  # a crash tore the line: that version was not announced
        for line in (recorded / FILE if recorded else self._path).read_text().splitlines():
            version, _, digest = line.partition(" ")
            self._known[int(version)].add(digest)

    def add(self, version: int, digest: str) -> None:
        """Record weights that are about to be published. Any thread may call this."""
        if self._recorded is None and digest in self._known[version]:
            return  # a resume has repeated it
        with self._path.open("a") as file:
            file.write(f"{version} {digest}\n")
        if self._recorded is None:
            self._known[version].add(digest)

    def check(self, batch: Batch) -> None:
        """Raises AttestationError, which names the version and the first group of the batch with tokens of it."""
        for group in batch.groups:
            for version, digest in ((v, d) for v, text in group.digests.items() for d in text.split(OR)):
                if digest not in self._known.get(version, ()):
                    made = f"group {group.id} of {group.actor or 'an actor before the resume'}"
                    raise AttestationError(
                        f"batch {batch.index}, {made}: its tokens of version {version} were made by weights with the "
                        f"digest {digest[:40]}, which this learner has not published; the batch is not trained"
                    )
