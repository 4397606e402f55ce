"""Plans a prefill so that each prompt goes through the model once, however many sequences share it: samples of a group
when they join, in any later step, and again when a weight update recomputes all. Its last token is not shared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from actors.engines.slot_table import SlotTable


class PositionSpan(NamedTuple):
    """Positions [start, stop) of the sequences in `slots`, in which these are equal up to `stop`."""

    slots: list[int]
    start: int
    stop: int


Plan = tuple[list[tuple[int, int, int]], list[PositionSpan], list[PositionSpan]]
"""In this order: copies (source slot, target slot, positions from 0 on), spans that start at 0, and spans of what comes
behind a shared prompt, both the shortest first."""


def plan(table: SlotTable, slots: Iterable[int], sources: Iterable[int]) -> Plan:
    """How to fill the KV cache of `slots` for all but their last token; that of `sources` may be copied from."""
    copies, whole, rests = list[tuple[int, int, int]](), list[PositionSpan](), list[PositionSpan]()
    held = {_prompt(table, slot): slot for slot in sources}
    sharers: dict[bytes, list[int]] = {}
    for slot in slots:
        sharers.setdefault(_prompt(table, slot), []).append(slot)
    for prompt, same in sharers.items():
        bare = len(table.requests[same[0]].prompt) - 1
        if (source := held.get(prompt)) is not None:
            copies += [(source, slot, bare) for slot in same]
        else:
            if len(same) == 1:  # nothing to share: all in one forward
                bare = int(table.lengths[same[0]]) - 1
            whole.append(PositionSpan(same, 0, bare))
        rests += [PositionSpan([slot], bare, int(table.lengths[slot]) - 1) for slot in same]
    return copies, _rising(whole), _rising(rests)


def _rising(spans: list[PositionSpan]) -> list[PositionSpan]:
    return sorted((span for span in spans if span.stop > span.start), key=lambda span: span.stop - span.start)


def _prompt(table: SlotTable, slot: int) -> bytes:
    return table.tokens[slot, : len(table.requests[slot].prompt) - 1].tobytes()
