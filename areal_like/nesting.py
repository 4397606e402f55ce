"""Finds out how deep packed data is nested, before unpacking it.

msgpack allocates a list when it reads its length, so nested lists that each claim a huge length cost 10,000 times the
bytes of the message. Limits on each list and on the bytes do not help. A walk over the headers does: it copies nothing
and skips texts and binary data."""

from __future__ import annotations

MAX_DEPTH = 16
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""First byte → how many more a number, boolean or nil has."""
_SKIPPED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Of texts and binary data: bytes of their length."""
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Of lists and maps: bytes of their length, and values per entry."""


def check_nesting(packed: bytes) -> None:
    """Raises ValueError if containers lie deeper than `MAX_DEPTH`, have more entries than there are bytes left, or if
    there is something in them that is none of msgpack's plain data."""
    at, end, left = 0, len(packed), [1]
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        if at >= end:
            raise ValueError("the data ends too early")
        code = packed[at]
        at += 1
        if code < 0x80 or code >= 0xE0:  # a small integer
            continue
        if 0xA0 <= code < 0xC0:  # a short text
            at += code & 0x1F
        elif code in _FIXED:
            at += _FIXED[code]
        elif code in _SKIPPED:
            width = _SKIPPED[code]
            at += width + int.from_bytes(packed[at : at + width], "big")
        else:
            at, entries = _entries(packed, at, code)
            if entries > end - at or len(left) > MAX_DEPTH:
                raise ValueError("lists are nested too deep, or longer than the data")
            left.append(entries)


def _entries(packed: bytes, at: int, code: int) -> tuple[int, int]:
    """(where the first entry begins, number of values) of a list or map."""
    if code < 0xA0:
        return at, 2 * (code & 0x0F) if code < 0x90 else code & 0x0F
    if code not in _CONTAINERS:
        raise ValueError(f"a value of type {code:#x} is not accepted")
    width, values = _CONTAINERS[code]
    return at + width, values * int.from_bytes(packed[at : at + width], "big")
