"""How many samples a group has."""

from __future__ import annotations


class Fixed:
    """The same group size always."""

    def __init__(self, *, group_size: int = 8):
        if group_size < 1:
            raise ValueError(f"sizing.group_size must be at least 1, not {group_size}")
        self.group_size = group_size

    @property
    def largest(self) -> int:
        """The largest group that may ever be asked for."""
        return self.group_size
