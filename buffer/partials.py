"""What the buffer keeps of a group that was broken off, until a lease carries it on: which samples, how old.

Pure. The bound decides which samples a lease may carry: those whose tokens may all be trained in the group's slot. The
others begin anew with the lease.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from areal_like.groups import FINISHES
from areal_like.partials import versions_of
from buffer.payloads import Payload
from buffer.sizing import Lengths

ABORTED = FINISHES.index("abort")


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """An actor's message, undecoded (see `areal_like.partials`)."""

    meta: dict[str, Any]
    payload: Payload

    def usable(self, least: float, most: float = math.inf) -> dict[int, int]:
        """Sample index → version of its oldest token, of the samples made by versions from `least` to `most` alone."""
        made = ((row[0], versions_of(row)) for row in self.meta["samples"])
        return {index: min(versions) for index, versions in made if least <= min(versions) and max(versions) <= most}

    @property
    def lengths(self) -> Lengths:
        """Of the samples that have begun: responses so far, and whether they go on."""
        rows = [row[1] for row in self.meta["samples"]]
        tokens = tuple(sum(sum(call[3][1::2]) for call in calls) for calls in rows)
        return Lengths(tokens, tuple(any(call[2] == ABORTED for call in calls) for calls in rows))

    @property
    def ended(self) -> int:
        """Samples that have begun and were not cut."""
        return self.lengths.cut.count(False)

    @property
    def newest(self) -> int:
        """Version of its newest token."""
        return max(max(versions_of(row)) for row in self.meta["samples"])

    @property
    def oldest(self) -> int:
        """Version of its oldest token."""
        return min(self.usable(-math.inf).values())
