"""The client of the buffer for an actor."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from areal_like.types import Group
from areal_like.wire import messages
from areal_like.wire.bus import AsyncDealer
from areal_like.wire.frames import Frame
from areal_like.wire.groups import Head, encode_group, pack_heads
from areal_like.wire.messages import Lengths, Message

log = logging.getLogger(__name__)
RETRY_SECONDS = 5.0
"""Seconds until a push without an answer is repeated, doubled each time: all repeats wait in this process."""
MAX_GROUPS_PER_PUSH = 64


@dataclass(frozen=True, slots=True)
class _Pushed:
    """A group to push again at `due` (monotonic seconds), `wait` seconds after the last push."""

    head: Head
    payload: Frame
    due: float
    wait: float


class ActorClient:
    """An actor's side; `slots` is the number of sequences that its engine decodes at once. A pushed group is sent again
    until the buffer acknowledges it; groups of one turn of the event loop share a message."""

    def __init__(
        self, endpoint: str, name: str, slots: int, *, link_timeout: float | None = None, keys: str | None = None
    ):
        self.name, self.slots = name, slots
        self.dealer = AsyncDealer(endpoint, name, "buffer", link_timeout=link_timeout, keys=keys, role="actor")
        self._ready: dict[int, None] = {}  # groups to push, in order
        self._unacknowledged: dict[int, _Pushed] = {}
        self.relay: messages.Relay | None = None

    def send(self, message: Message) -> None:
        """The buffer discards it at the actor's next `Hello`."""
        self.dealer.send(message)

    def hello(self) -> None:
        self.dealer.send(messages.Hello("actor", self.name, os.getpid(), self.slots))
        if self.relay:
            self.dealer.send(self.relay)

    def heartbeat(self, stats: dict[str, float | str], progress: dict[int, int], heldout: dict[int, int]) -> None:
        """Send a `Heartbeat`, and repeat pushes that got no answer."""
        self.dealer.send(messages.Heartbeat(stats, progress, heldout))
        now = time.monotonic()
        for group_id, pushed in list(self._unacknowledged.items()):
            if now > pushed.due:
                log.warning("group %d: no acknowledgement for %.0f s, pushing it again", group_id, pushed.wait)
                self._push_soon(replace(pushed, due=now + 2 * pushed.wait, wait=2 * pushed.wait))

    def push(self, group: Group) -> None:
        self._push_soon(_Pushed(*encode_group(group), time.monotonic() + RETRY_SECONDS, RETRY_SECONDS))

    def _push_soon(self, pushed: _Pushed) -> None:
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._push_ready)
        self._unacknowledged[pushed.head.id] = pushed
        self._ready[pushed.head.id] = None

    def _push_ready(self) -> None:
        found = [self._unacknowledged[each] for each in self._ready if each in self._unacknowledged]
        self._ready.clear()
        for start in range(0, len(found), MAX_GROUPS_PER_PUSH):
            some = found[start : start + MAX_GROUPS_PER_PUSH]
            self.dealer.send(messages.Push(pack_heads([each.head for each in some])), [each.payload for each in some])

    def acknowledged(self, ids: Iterable[int]) -> None:
        for group_id in ids:
            self._unacknowledged.pop(group_id, None)

    def hand_back(self, lengths: Mapping[int, Lengths], leaving: bool) -> None:
        """Return leases unfinished, with the lengths of their samples."""
        left = list(lengths)
        while True:
            some, left = left[:MAX_GROUPS_PER_PUSH], left[MAX_GROUPS_PER_PUSH:]
            self.send(messages.HandBack({group_id: lengths[group_id] for group_id in some}, leaving and not left))
            if not left:
                return

    def evaluated(self, lease_id: int, version: int, answer: Group | None) -> None:
        """The result of a held-out lease: a group of one sample. None: it has failed, at `version`, and earns 0."""
        if answer is None:
            self.dealer.send(messages.Evaluated(lease_id, 0.0, version, version, 0, None))
            return
        (sample,), (head, payload) = answer.samples, encode_group(answer)
        facts = float(sample.reward), sample.oldest_version, sample.newest_version, sample.response_length
        self.dealer.send(messages.Evaluated(lease_id, *facts, pack_heads([head])), [payload])

    def close(self) -> None:
        self._push_ready()
        self.dealer.close()
