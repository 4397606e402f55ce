"""The learner's half of the probe: the logprobs of a few prompts if engines really serve the attested weights.

Every `weights.probe_every` versions the announcement of new weights carries the ends of a few held-out prompts, and the
learner's logprobs of their tokens; `actors.probe_check` compares. The probe also covers what no digest covers, such as
weights derived from those received, copies for a kernel, and positions. The learner scores between two train steps,
without gradient and random numbers, so no bit of a run depends on it.
"""

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from areal_like.interfaces import Task
from areal_like.wire.messages import Manifest, Probe

PROMPTS, LONGEST = 4, 64
"""Prompts of a probe; tokens of each (its last ones: prompts of a task often begin alike)."""


def sequences_of(task: Task) -> list[list[int]]:
    """The ends of a few prompts that are never trained, without those shorter than two tokens."""
    split = "heldout" if task.size("heldout") else "train"
    rows = range(min(PROMPTS, task.size(split)))
    ends = [task.prompt(split, row).tokens[-LONGEST:].tolist() for row in rows]
    return [tokens for tokens in ends if len(tokens) > 1]


class Reference:
    """Adds a probe to the manifest of every `every`-th version (0: of none). `score`: `Trainer.logprobs_of`."""

    def __init__(self, sequences: list[list[int]], every: int, score: Callable[..., Any] | None):
        self._sequences, self._every, self._score = sequences, every, score
        self._taken: dict[int, Probe] = {}

    def take(self, version: int) -> None:
        """If it is time, score the present weights, which will be published as `version`."""
        if not self._every or version % self._every or not self._sequences or self._score is None:
            return
        logprobs, dtype = self._score(self._sequences)
        if all(math.isfinite(each) for row in logprobs for each in row):
            self._taken[version] = Probe(self._sequences, logprobs, dtype)

    def added_to(self, manifest: Manifest) -> Manifest:
        """The manifest, with the probe of its version if there is one. Any thread may call this."""
        probe = self._taken.pop(manifest.version, None)
        return manifest if probe is None else replace(manifest, probe=probe)
