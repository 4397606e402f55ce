"""Plans a prefill so that each prompt goes through the model once, however many sequences share it: samples of a group
when they join, in any later step, and again when a weight update recomputes all. Its last token is not shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.engines.slot_table import SlotTable


class PositionSpan(NamedTuple):
    """Positions [start, stop) of the sequences in `slots`, in which these are equal up to `stop`."""

    slots: list[int]
    start: int
    stop: int


@dataclass(slots=True)
class PrefillPlan:
    """In this order: `copies` (source slot, target slot, positions from 0 on), `whole` (spans that start at 0), `rests`
    (spans of what comes behind a shared prompt), both the shortest first."""

    copies: list[tuple[int, int, int]] = field(default_factory=list)
    whole: list[PositionSpan] = field(default_factory=list)
    rests: list[PositionSpan] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Tokens that go through the model."""
        return sum(span.stop - span.start for span in [*self.whole, *self.rests])

    @property
    def shared(self) -> int:
        """Tokens that would have, if no sequence took them from another."""
        return sum(time for _, _, time in self.copies) + sum((len(s.slots) - 1) * s.stop for s in self.whole)


def plan(table: SlotTable, slots: Iterable[int], sources: Iterable[int]) -> PrefillPlan:
    """How to fill the KV cache of `slots` for all but their last token; that of `sources` may be copied from."""
    found = PrefillPlan()
    held = {_prompt(table, slot): slot for slot in sources}
    sharers: dict[bytes, list[int]] = {}
    for slot in slots:
        sharers.setdefault(_prompt(table, slot), []).append(slot)
    for prompt, same in sharers.items():
        bare = len(table.requests[same[0]].prompt) - 1
        source = held.get(prompt)
        if source is not None:
            found.copies += [(source, slot, bare) for slot in same]
        else:
            if len(same) == 1:  # nothing to share: all in one forward
                bare = int(table.lengths[same[0]]) - 1
            found.whole.append(PositionSpan(same, 0, bare))
        found.rests += [PositionSpan([slot], bare, int(table.lengths[slot]) - 1) for slot in same]
    found.whole = sorted((span for span in found.whole if span.stop), key=lambda span: span.stop)
    rests = (span for span in found.rests if span.stop > span.start)
    found.rests = sorted(rests, key=lambda span: span.stop - span.start)
    return found


def _prompt(table: SlotTable, slot: int) -> bytes:
    return table.tokens[slot, : len(table.requests[slot].prompt) - 1].tobytes()
