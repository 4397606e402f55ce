"""What became of a connecting socket's connection: was it let in, was it made anew.

ZeroMQ connects and reconnects by itself, and says nothing: a wrong key shows as endless silence, and what was on its
way when a connection broke is lost without a word. Its monitor tells.
"""

from __future__ import annotations

from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from areal_like.errors import UserError

FAILED_HANDSHAKES = 20
"""Tries, of some 100 ms. With the server key of another buffer each of them ends without a reason given; some also do
while the network is bad or the other side just ends."""
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | _REFUSALS


class BusError(RuntimeError):
    """A socket that can't be opened, or a peer that does not answer in time, or does not let this side in."""


class WrongKeysError(BusError, UserError):
    """The other side does not let this one in, and never will: its keys are wrong."""


class Link:
    """Of a socket that has not connected yet; `peer` names the other side in errors, `keys` is this side's folder.

    Either `check` and `reconnected` are called now and then, or `until_reconnected` is awaited (asyncio), not both.
    All raise BusError if the other side will not have this one.
    """

    def __init__(self, sock: zmq.Socket, endpoint: str, peer: str, keys: str | None):
        self._watched, self._events = sock, cast(Any, sock.get_monitor_socket(_EVENTS))
        self._blocking: zmq.Socket = zmq.Socket.shadow(self._events)  # an asyncio socket has an asyncio monitor
        self._who, self._keys = f"{peer} ({endpoint})", keys
        self.connections = self._told = self._failed = 0

    def check(self) -> None:
        """Take in what has happened since."""
        while self._blocking.poll(0):
            self._take(self._blocking.recv_multipart())

    def reconnected(self) -> bool:
        """Has the connection been made anew since the last call?"""
        self.check()
        anew, self._told = self.connections > max(1, self._told), self.connections
        return anew

    async def until_reconnected(self) -> None:
        """Returns when the connection has been made anew."""
        while not (self._take(await self._events.recv_multipart()) and self.connections > 1):
            pass

    def _take(self, parts: list[Any]) -> bool:
        """Was it a success?"""
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connections += 1
            return True
        self._failed += 1
        strange = self._keys and not self.connections and self._failed >= FAILED_HANDSHAKES
        if event & _REFUSALS or strange:
            raise WrongKeysError(self._explain(event))
        return False

    def _explain(self, event: int) -> str:
        if not self._keys:
            return f"the {self._who} refused the connection: it asks for keys, and here security.key_folder is not set"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"the {self._who} refused the keys of {self._keys}: this client's public key is not in its allow-list "
                "(clients/ of its keys folder)"
            )
        return (
            f"the {self._who} does not accept the keys of {self._keys}: server.key is not that of its keys, or it "
            "runs without keys (security.key_folder)"
        )

    def close(self) -> None:
        self._watched.disable_monitor()
        self._events.close(linger=0)
