"""Hands weights on to other actors, as the learner's publisher does: deltas unchanged, once they are verified and
applied here; whole weights from the replica's bits. While the replica changes, the answer is "later"."""

from collections.abc import Callable, Sequence

from areal_like.weights.delta import ends_of
from areal_like.weights.history import History
from areal_like.weights.layout import Layout
from areal_like.weights.replica import Replica, Route
from areal_like.weights.server import WeightServer
from areal_like.wire import messages


class Relay:
    """Serves on `endpoint`; `progress()` grows while this actor itself is being sent weights. `keep` and
    `snapshot_every` as for the learner (`configs/base.yaml`, weights). Raises BusError, KeysError."""

    def __init__(
        self, endpoint: str, progress: Callable[[], int], *, keep: int, snapshot_every: int, keys: str | None = None
    ):
        self._keep, self._snapshot_every = keep, snapshot_every
        self._layouts: list[Layout] = []
        self._histories: list[History] = []
        history = lambda part: self._histories[part] if 0 <= part < len(self._histories) else None  # noqa: E731
        self._server = WeightServer(endpoint, keys, history, progress, as_client=True)
        self.offer = messages.Relay(self._server.endpoint, self._server.key)

    @property
    def bytes_sent(self) -> int:
        return self._server.bytes_sent

    def begin(self, replica: Replica) -> None:
        """Stop serving the replica's bits: they are going to change."""
        for history in self._histories:
            history.release(replica.state)

    def add(self, replica: Replica, routes: Sequence[Route]) -> None:
        """Serve the replica's new version, with the messages that led its parts there (none: only its bits)."""
        if self._layouts is not replica.layouts:
            self._layouts, routes = replica.layouts, ()
            knobs = {"keep": self._keep, "snapshot_every": self._snapshot_every}
            self._histories = [History(layout, **knobs) for layout in replica.layouts]
        for part, history in enumerate(self._histories):
            route = routes[part] if routes else Route(replica.version, [])
            if route.base_snapshot is not None:
                history.add(*replica.held(part), replica.state, None)
                continue
            for delta in route.messages:
                version, digest = ends_of(delta)
                history.add(version, digest, replica.state if version == replica.version else None, delta)

    def close(self) -> None:
        self._server.close()
