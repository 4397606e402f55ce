"""Serves histories of weights in chunks: each learner rank those of its part, a relay those of all parts.

A `Sync` is answered by the hops (`weights.history`) that lead there, none if there is no route; the subscriber fetches
them in chunks. `Gone`: a hop is no longer held. A plan may lead to the newest version here instead: so a lagging relay
still brings others forward. If there is nothing new yet, `Later` is repeated until a plan can be made."""

import threading
import time
from collections.abc import Callable

from areal_like.weights.history import History
from areal_like.weights.replica import NOTHING
from areal_like.wire.bus import Router
from areal_like.wire.frames import WireError
from areal_like.wire.messages import Chunk, Fetch, Gone, Hops, Later, Sync

MAX_CHUNK_BYTES = 4 << 20
MAX_FRAME_BYTES = 4096
"""Largest message that is received: requests are small."""
UNSENT_CHUNKS = 32
"""Chunks that may wait for one subscriber; it asks for no more than a few at once."""
LOOK_SECONDS, LATER_SECONDS = 0.002, 0.5
"""Seconds between checks whether a version that a peer waits for has arrived, and between messages to such peers."""
MOST_WAITING = 10_000
"""Most peers at a time. Others are ignored, and try again."""


class WeightServer:
    """Serves what `history(part)` returns, if anything yet, on `endpoint`, in a thread of its own. `progress()` grows
    while more is on its way. `keys` see `wire.keys`; with `as_client` it shows a client's pair."""

    def __init__(
        self,
        endpoint: str,
        keys: str | None,
        history: Callable[[int], History | None],
        progress: Callable[[], int] = int,
        *,
        as_client: bool = False,
    ):
        self._router = Router(endpoint, keys, max_frame=MAX_FRAME_BYTES, unsent=UNSENT_CHUNKS, as_client=as_client)
        self.endpoint, self.key = self._router.endpoint, self._router.key
        self._history, self._progress = history, progress
        self._waiting: dict[bytes, Sync] = {}
        self._told = 0.0
        self._ending = threading.Event()
        self.bytes_sent = 0
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.is_set():
            received = self._router.receive(timeout=LOOK_SECONDS if self._waiting else 0.2)
            if self._waiting:
                self._look_again()
            if received is None:
                continue
            peer, said = received
            if isinstance(said, WireError):
                continue
            if isinstance(said.message, Sync):
                self._plan(peer, said.message)
            elif isinstance(said.message, Fetch):
                self._chunk(peer, said.message)
            else:
                self._router.refuse(peer, f"weights are served to sync and fetch, not {said.message.kind()!r}")

    def _look_again(self) -> None:
        for peer in list(self._waiting):
            self._plan(peer, self._waiting.pop(peer))
        now = time.monotonic()
        if self._waiting and now - self._told >= LATER_SECONDS:
            self._told = now
            for peer, asked in self._waiting.items():
                self._router.send(peer, Later(asked.part, asked.version, self._progress()))

    def _plan(self, peer: bytes, asked: Sync) -> None:
        version, held, digest = asked.version, asked.held, asked.digest
        history = self._history(asked.part)
        hops = history.plan(version, held, digest) if history else None
        if history and not hops and NOTHING < held < history.version:  # a new joiner has seen no other version
            hops = history.plan(history.version, held, digest) or hops
        if hops is not None:
            self._router.send(peer, Hops(asked.part, version, list(hops)))
        elif len(self._waiting) < MOST_WAITING:
            self._waiting[peer] = asked

    def _chunk(self, peer: bytes, asked: Fetch) -> None:
        history = self._history(asked.part)
        payload = history.payload(asked.base, asked.version) if history else None
        if payload is None or asked.offset >= payload.nbytes or asked.size < 1:
            self._router.send(peer, Gone(asked.part, asked.version))
            return
        chunk = payload[asked.offset : asked.offset + min(asked.size, MAX_CHUNK_BYTES)]
        self.bytes_sent += chunk.nbytes
        self._router.send(peer, Chunk(asked.part, asked.base, asked.version, asked.offset), [chunk])

    def close(self) -> None:
        self._ending.set()
        self._thread.join(timeout=2.0)
        self._router.close()
