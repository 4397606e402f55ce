"""Which groups make the next batch. Pure functions: (waiting, missing, want) → group ids, or () to wait."""

from __future__ import annotations

from collections.abc import Mapping, Set


def in_order(waiting: Mapping[int, int], missing: Set[int], want: int) -> tuple[int, ...]:
    """The `want` lowest slots, once all of them are there.

    `waiting`: slot → id of the groups that can be served; `missing`: slots that were given out, or left by a dropped
    group, and hold nothing to serve yet. A missing slot below the batch's last one means wait.
    """
    slots = sorted(waiting)[:want]
    if len(slots) < want or any(slot < slots[-1] for slot in missing):
        return ()
    return tuple(waiting[slot] for slot in slots)
