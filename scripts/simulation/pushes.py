"""Groups on their way into the buffer as they are: a simulated actor does not pack what the same process would unpack.

Only reading and checking are left out. From there on a push takes the buffer's own way
(`buffer.handlers.Handlers.read_push`).
"""

from __future__ import annotations

from areal_like.wire.frames import Payloads, WireError
from areal_like.wire.groups import Head
from areal_like.wire.messages import Push, Table
from buffer.handlers import Handlers

_EMPTY = Table([], b"", b"", {})


class HandedOver(Push):
    """A push whose table is empty: its `heads` are there already."""

    heads: list[Head]


def hand_over(heads: list[Head]) -> HandedOver:
    return HandedOver(_EMPTY, heads)


class SimulatedHandlers(Handlers):
    """Those of a buffer that takes heads over."""

    def read_push(self, message: Push, payloads: Payloads) -> tuple[list[Head], dict[int, WireError]]:
        assert isinstance(message, HandedOver)
        return message.heads, {}
