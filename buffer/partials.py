"""What the buffer keeps of a group that was broken off, until a lease carries it on: which samples, how old.

Pure. The bound decides which samples a lease may carry: those whose tokens may all be trained in the group's slot. The
others begin anew with the lease.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from areal_like.groups import FINISHES, RUN
from areal_like.messages import PartialHead
from areal_like.partials import CALL, samples_of, versions_of
from buffer.payloads import Payload
from buffer.sizing import Lengths

ABORTED = FINISHES.index("abort")


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """As an actor has handed it back, undecoded (see `areal_like.partials`)."""

    head: PartialHead
    payload: Payload

    def usable(self, least: float, most: float = math.inf) -> dict[int, int]:
        """Sample index → version of its oldest token, of the samples made by versions from `least` to `most` alone."""
        made = versions_of(self.head).items()
        return {index: min(versions) for index, versions in made if least <= min(versions) and max(versions) <= most}

    @property
    def lengths(self) -> Lengths:
        """Of the samples that have begun: responses so far, and whether they go on."""
        tokens, calls = Counter[int](), np.frombuffer(self.head.calls, CALL)
        for index, n in zip(samples_of(self.head), np.frombuffer(self.head.runs, RUN)["n"].tolist(), strict=True):
            tokens[index] += n
        aborted = set(calls["sample"][calls["finish"] == ABORTED].tolist())
        return Lengths(tuple(tokens.values()), tuple(index in aborted for index in tokens))

    @property
    def ended(self) -> int:
        """Samples that have begun and were not cut."""
        return self.lengths.cut.count(False)

    @property
    def newest(self) -> int:
        """Version of its newest token."""
        return max(self.head.digests)

    @property
    def oldest(self) -> int:
        """Version of its oldest token."""
        return min(self.head.digests)
