"""What the buffer keeps of a group that was broken off, until another lease continues it: its samples and their ages.

Pure. A lease may carry a sample only if the bound lets all its tokens be trained in the group's slot. The lease starts
the other samples again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from areal_like.wire.columns import FINISHES, RUN
from areal_like.wire.messages import PartialHead
from areal_like.wire.partials import CALL, samples_of, versions_of
from buffer.payloads import Payload
from buffer.sizing import GroupLengths

ABORTED = FINISHES.index("abort")


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """A partial group as an actor handed it back, undecoded (see `areal_like.wire.partials`)."""

    head: PartialHead
    payload: Payload

    def usable(self, least: float) -> dict[int, int]:
        """Sample index → version of its oldest token, for samples without a token of before `least`."""
        return {index: min(made) for index, made in versions_of(self.head).items() if min(made) >= least}

    @property
    def lengths(self) -> GroupLengths:
        """Lengths of the samples that have begun: response tokens so far, and whether the sample was cut."""
        tokens, calls = Counter[int](), np.frombuffer(self.head.calls, CALL)
        for index, n in zip(samples_of(self.head), np.frombuffer(self.head.runs, RUN)["n"].tolist(), strict=True):
            tokens[index] += n
        aborted = set(calls["sample"][calls["finish"] == ABORTED].tolist())
        return GroupLengths(tuple(tokens.values()), tuple(index in aborted for index in tokens))

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
