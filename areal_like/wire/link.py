"""Watches the connection of a connecting socket, by its monitor. ZeroMQ itself connects and reconnects silently."""

from __future__ import annotations

import errno

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from areal_like.errors import UserError

FAILED_HANDSHAKES, CLOSED_HANDSHAKES = 20, 100
"""Attempts of about 100 ms each. The first with keys: with the server key of another buffer each fails without a
reason; a few also fail when the network is bad or the other side is ending. The second without: a server with keys
closes such a connection at once, as does a tunnel whose far end does not listen yet; one that is slow closes none."""
_CLOSED = errno.EPIPE, errno.ECONNRESET
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | _REFUSALS


class BusError(RuntimeError):
    """A socket cannot be opened, or a peer does not answer in time, or refuses this side."""


class WrongKeysError(BusError, UserError):
    """The other side will never accept this one: its keys are wrong."""


class Link:
    """Tracks one socket, from before it connects. `peer` names the other side in errors; `keys` is this side's folder.
    Either call `check` and `reconnected` regularly, or await `until_reconnected` (asyncio). All raise BusError if the
    other side refuses this one."""

    def __init__(self, sock: zmq.SyncSocket | zmq.asyncio.Socket, endpoint: str, peer: str, keys: str | None):
        self._watched, self._events = sock, sock.get_monitor_socket(_EVENTS)
        self._blocking: zmq.SyncSocket = zmq.Socket.shadow(self._events)  # an asyncio socket has an asyncio monitor
        self.peer, self._keys = f"{peer} ({endpoint})", keys
        self.connections = self._told = self._failed = self._closed = 0

    def check(self) -> None:
        """Process what has happened since the last call."""
        while self._blocking.poll(0):
            self._take(self._blocking.recv_multipart())

    def reconnected(self) -> bool:
        """Has the socket reconnected since the last call?"""
        self.check()
        again, self._told = self.connections > max(1, self._told), self.connections
        return again

    async def until_reconnected(self) -> None:
        assert isinstance(self._events, zmq.asyncio.Socket)
        while not (self._take(await self._events.recv_multipart()) and self.connections > 1):
            pass

    def _take(self, parts: list[bytes]) -> bool:
        """Was it a success?"""
        said = parse_monitor_message(parts)
        if said["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connections += 1
            return True
        self._failed += 1
        self._closed += said["value"] in _CLOSED
        hopeless = self._failed >= FAILED_HANDSHAKES if self._keys else self._closed >= CLOSED_HANDSHAKES
        if said["event"] & _REFUSALS or (hopeless and not self.connections):
            raise WrongKeysError(self._explain(said["event"]))
        return False

    def _explain(self, event: int) -> str:
        if not self._keys:
            how = "refused the connection" if event & _REFUSALS else f"closed the connection {self._closed} times"
            return f"the {self.peer} {how}: it asks for keys, and here security.key_folder is not set"
        why = "server.key is not that of its keys, or it runs without keys (security.key_folder)"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            why = "this client's public key is not in its allow-list (clients/ of its keys folder)"
        return f"the {self.peer} does not accept the keys of {self._keys}: {why}"

    def close(self) -> None:
        self._watched.disable_monitor()
        self._events.close(linger=0)
