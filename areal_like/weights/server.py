"""Serves histories of weights, in chunks, to whoever asks: each rank of the learner that of its part of the weights,
and relays beside actors those of all parts.

Who says `sync` says which version of which part it wants, which one it holds and the digest of that, and gets a plan:
which legs (`areal_like.weights.history`) lead there; none if none do. They are fetched in chunks; what is no longer
held is answered with `gone`, and the asker turns to the newest. A plan may lead to another version than was asked for,
the newest here: one who is behind is brought forward by a relay that is not at the end itself. Where there is nothing
new for the asker yet, the answer is `later`, with how far things have come, now and again until a plan can be made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from areal_like import turns
from areal_like.bus import Router
from areal_like.weights.history import History
from areal_like.weights.replica import NOTHING
from areal_like.wire import Message, WireError

MAX_CHUNK_BYTES = 4 << 20
MAX_FRAME_BYTES = 4096
"""Largest message that is received: requests are small."""
UNSENT_CHUNKS = 32
"""Chunks that may wait for one subscriber; it asks for no more than a few at once."""
LOOK_SECONDS = 0.002
"""Seconds between checks whether a version that somebody waits for has arrived."""
LATER_SECONDS = 0.5
"""Seconds between messages to those who wait."""
MOST_WAITING = 10_000
"""Most peers at a time. Others are ignored, and try again."""


class WeightServer:
    """Serves what `history(part)` returns, if anything yet, on `endpoint`, in a thread of its own. `progress()` is any
    number that grows while more is on its way. `keys` see `areal_like.keys`; with `as_client` it shows a client's pair,
    and not the server's."""

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
        self._waiting: dict[bytes, Message] = {}
        self._told = 0.0
        self._ending = threading.Event()
        self.bytes_sent = 0
        self._thread = turns.thread("weights", self._serve)
        self._thread.start()

    def _serve(self) -> None:
        answers = {"sync": self._plan, "fetch": self._chunk}
        while not self._ending.is_set():
            received = self._router.receive(timeout=LOOK_SECONDS if self._waiting else 0.2)
            if self._waiting:
                self._look_again()
            if received is None:
                continue
            peer, message = received
            if isinstance(message, WireError):
                continue
            if message.kind in answers:
                answers[message.kind](peer, message)
            else:
                self._router.refuse(peer, f"weights are served to sync and fetch, not {message.kind!r}")

    def _look_again(self) -> None:
        for peer in list(self._waiting):
            self._plan(peer, self._waiting.pop(peer))
        now = time.monotonic()
        if self._waiting and now - self._told >= LATER_SECONDS:
            self._told = now
            for peer, message in self._waiting.items():
                self._later(peer, message)

    def _plan(self, peer: bytes, message: Message) -> None:
        part, version, held, digest = (message.body[key] for key in ("part", "version", "held", "digest"))
        history = self._history(part)
        legs = history.plan(version, held, digest, wait=False) if history else None
        if history and not legs and NOTHING < held < history.version:  # who has just joined knows of no other version
            legs = history.plan(history.version, held, digest, wait=False) or legs
        if legs is not None:
            rows = [leg.row() for leg in legs]
            self._router.send(peer, "plan", {"part": part, "version": version, "legs": rows})
        elif len(self._waiting) < MOST_WAITING:
            self._waiting[peer] = message

    def _later(self, peer: bytes, message: Message) -> None:
        about = {key: message.body[key] for key in ("part", "version")}
        self._router.send(peer, "later", {**about, "progress": self._progress()})

    def _chunk(self, peer: bytes, message: Message) -> None:
        part, base, version, offset, size = (message.body[key] for key in ("part", "base", "version", "offset", "size"))
        history = self._history(part)
        payload = history.payload(base, version) if history else None
        if payload is None or not 0 <= offset < payload.nbytes or size < 1:
            self._router.send(peer, "gone", {"part": part, "version": version})
            return
        chunk = payload[offset : offset + min(size, MAX_CHUNK_BYTES)]
        self.bytes_sent += chunk.nbytes
        about = {"part": part, "base": base, "version": version, "offset": offset}
        self._router.send(peer, "chunk", about, [chunk])

    def close(self) -> None:
        self._ending.set()
        with turns.outside():
            self._thread.join(timeout=2.0)
        self._router.close()
