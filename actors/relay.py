"""Weights on to other actors: what this actor's subscriber holds is served as the learner's publisher would serve it.

The server and the history are the publisher's own (`areal_like.weights.server`, `.history`); what is different is where
versions come from. Deltas are handed on as they came, once they are verified and applied here. The replica's bits serve
for whole weights, copied when somebody needs them; while the replica changes there are none: who asks hears "later".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal_like.weights.delta import ends_of
from areal_like.weights.history import History
from areal_like.weights.layout import Layout
from areal_like.weights.replica import Message, Replica
from areal_like.weights.server import WeightServer


class Relay:
    """Serves on `endpoint`; `progress()` grows while this actor itself is being sent weights. `keep` and `anchor_every`
    as for the learner (`configs/base.yaml`, weights). Raises BusError, KeysError."""

    def __init__(
        self, endpoint: str, progress: Callable[[], int], *, keep: int, anchor_every: int, keys: str | None = None
    ):
        self._keep, self._anchor_every = keep, anchor_every
        self._layout: Layout | None = None
        self._history: History | None = None
        self._server = WeightServer(endpoint, keys, lambda: self._history, progress, as_client=True)
        self.offer = {"endpoint": self._server.endpoint, "key": self._server.key}

    @property
    def bytes_sent(self) -> int:
        return self._server.bytes_sent

    def begin(self, replica: Replica) -> None:
        """The replica's bits are going to change."""
        if self._history:
            self._history.release(replica.state)

    def add(self, replica: Replica, deltas: Sequence[Message] | None) -> None:
        """The replica holds another version, to which `deltas` have led from the one before; None: whole weights."""
        if self._history is None or self._layout is not replica.layout:
            self._layout, deltas = replica.layout, None
            self._history = History(replica.layout, keep=self._keep, anchor_every=self._anchor_every)
        if not deltas:
            self._history.add(replica.version, replica.digest, replica.state, None)
            return
        for delta in deltas:
            version, digest = ends_of(delta)
            self._history.add(version, digest, replica.state if version == replica.version else None, delta)

    def close(self) -> None:
        self._server.close()
