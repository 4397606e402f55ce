"""Weights out: serves the newest versions, in chunks, to whoever asks.

The learner calls `publish` and goes on: `learners.publication` encodes and announces in a thread of its own, and
another one, here, answers messages. Who says `sync` says which version it wants, which one it holds and the digest of
that, and gets a plan: which parts (`learners.history`) lead there; none if none do. Parts are fetched in chunks; one
that is no longer held is answered with `gone`, and the asker turns to the newest.
"""

from __future__ import annotations

import threading
from typing import Any

from areal_like.bus import Router
from areal_like.wire import Message, WireError
from learners.publication import Announce, Coding, Publication, Snapshot

MAX_CHUNK_BYTES = 4 << 20
MAX_FRAME_BYTES = 4096
"""Of what is received: small requests, and nothing else."""
UNSENT_CHUNKS = 32
"""That may wait for one subscriber; it asks for no more than a few at once."""


class Publisher:
    """Serves on `endpoint`, with `keys` (see `areal_like.keys`) to those on the allow-list. `announce(manifest)` is
    called for every version as soon as it can be fetched, by another thread than the caller of `publish`."""

    def __init__(self, endpoint: str, coding: Coding, announce: Announce, keys: str | None = None):
        self._router = Router(endpoint, keys, max_frame=MAX_FRAME_BYTES, unsent=UNSENT_CHUNKS)
        self.endpoint = self._router.endpoint
        self._publication = Publication(self.endpoint, coding, announce)
        self._ending = threading.Event()
        self.bytes_sent = 0
        self._thread = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, snapshot: Snapshot) -> float:
        """Have the weights that `snapshot` returns published as `version`. Returns the seconds for which the caller,
        and with it the learner, stood still."""
        return self._publication.publish(version, snapshot)

    def wait(self) -> dict[str, Any]:
        """Until what was published is announced; returns the manifest of the newest version."""
        self._publication.wait()
        return self._publication.manifest

    @property
    def metrics(self) -> dict[str, float]:
        """Of the newest version that is announced."""
        return {"publish/bytes": self.bytes_sent, **self._publication.metrics}

    def _serve(self) -> None:
        answers = {"sync": self._plan, "fetch": self._chunk}
        while not self._ending.is_set():
            received = self._router.receive(timeout=0.2)
            if received is None:
                continue
            peer, message = received
            if isinstance(message, WireError):
                continue
            if message.kind in answers:
                answers[message.kind](peer, message)
            else:
                self._router.refuse(peer, f"the publisher takes sync and fetch, not {message.kind!r}")

    def _plan(self, peer: bytes, message: Message) -> None:
        history = self._publication.history
        version, held, digest = (message.body[key] for key in ("version", "held", "digest"))
        parts = history.plan(version, held, digest) if history else []
        self._router.send(peer, "plan", {"version": version, "parts": [part.row() for part in parts]})

    def _chunk(self, peer: bytes, message: Message) -> None:
        base, version, offset, size = (message.body[key] for key in ("base", "version", "offset", "size"))
        history = self._publication.history
        payload = history.payload(base, version) if history else None
        if payload is None or not 0 <= offset < payload.nbytes or size < 1:
            self._router.send(peer, "gone", {"version": version})
            return
        chunk = payload[offset : offset + min(size, MAX_CHUNK_BYTES)]
        self.bytes_sent += chunk.nbytes
        self._router.send(peer, "chunk", {"base": base, "version": version, "offset": offset}, [chunk])

    def close(self) -> None:
        self._ending.set()
        self._thread.join(timeout=2.0)
        self._router.close()
