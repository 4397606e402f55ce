"""ZeroMQ sockets for `wire` messages: a `Router` serves many peers, a `Dealer` blocks, an `AsyncDealer` is for asyncio.

All data moves over ROUTER/DEALER, which queue and never drop while a connection lasts. Credits limit the amount in
flight. A broken connection is made again, but messages in flight are lost silently: dealers report it (`link`), and
their user repeats what matters. With `link_timeout` a silently dead connection counts as broken after that time.

The file system guards local sockets: only the user has access to their folder. On TCP a Router is a CURVE server
(`wire.keys`), which accepts clients on its allow-list, and from each only the messages of its key's role. `max_frame`
limits the size of a frame (refused before memory is taken), `UNREAD` and `unsent` the messages that wait. ZeroMQ does
not limit the frames of one message: a holder of keys can fill the memory."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import TypedDict, TypeVar, Unpack

import zmq
import zmq.asyncio

from areal_like.wire import frames as wire
from areal_like.wire import keys as keyring
from areal_like.wire.frames import MAX_FRAME_BYTES, Frame, Payloads, Received, WireError, decode, encode
from areal_like.wire.link import BusError, Link
from areal_like.wire.messages import Message, Refused
from areal_like.wire.wake import Wake

log = logging.getLogger(__name__)
Socket = TypeVar("Socket", zmq.SyncSocket, zmq.asyncio.Socket)
Options = dict[zmq.SocketOption, int | bytes]
_MORE, _NOW = int(zmq.SNDMORE), int(zmq.DONTWAIT)  # as plain numbers: arithmetic on zmq's enums is slow
COPY_BELOW = 1 << 16
"""Bytes from which a received frame is kept as it is: copying a smaller one is cheaper."""
_ZERO_COPY_RECV = 10  # libzmq's number: messages kept where they were received cost 4 KB more per idle peer
PINGS_PER_TIMEOUT = 3
"""Seconds between pings on an idle connection."""

UNREAD = 1000
"""Messages that a Router receives ahead from one peer; further ones wait in that peer's own queue."""
UNSENT = 10_000
"""Messages that may wait for one peer: far more than a healthy peer has. A peer that does not read loses the rest."""
HANDSHAKE_MS = 10_000
NODE = "node"
"""Stands for the address by which other hosts reach this host."""
_ANYWHERE = "192.0.2.1"  # reserved for documentation: no host has it
LOGGED_REFUSALS = 20
"""Refusals that a Router logs one by one; of later ones every thousandth."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def own_address() -> str:
    """The address by which other hosts reach this one: towards Slurm's starter, on the default route, or loopback."""
    for towards in filter(None, (os.environ.get("SLURM_LAUNCH_NODE_IPADDR"), _ANYWHERE)):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # a route is looked up, nothing is sent
            if not is_loopback(address := str(probe.getsockname()[0])):
                return address
    return "127.0.0.1"


def bypass_proxies() -> None:
    """Let this process and its children reach loopback and this host without a proxy."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = [*(known or "").split(","), "localhost", "127.0.0.1", own_address()]
    direct = ",".join(filter(None, dict.fromkeys(hosts)))  # each once, however often this is called
    os.environ |= {"no_proxy": direct, "NO_PROXY": direct}


def _configure(sock: Socket, options: Options) -> None:
    defaults: Options = {zmq.LINGER: 0, zmq.HANDSHAKE_IVL: HANDSHAKE_MS}
    for option, value in (defaults | options).items():
        sock.set(option, value)


def keep(frames: Sequence[zmq.Frame]) -> list[Frame]:
    """Received frames in a form to keep: large ones as they are, small ones copied."""
    return [frame if len(frame) >= COPY_BELOW else frame.bytes for frame in frames]


def receive_within(sock: zmq.SyncSocket, timeout: float) -> list[zmq.Frame] | None:
    """The frames of the next message as the socket has them, or None after `timeout` seconds; of too many the first."""
    try:
        frames = [sock.recv(_NOW, copy=False)]
    except zmq.Again:
        if timeout <= 0 or not sock.poll(int(timeout * 1000)):
            return None
        frames = [sock.recv(copy=False)]
    frame, most = frames[-1], wire.MAX_FRAMES + 2  # the routing id, the most of a message, and one to show it
    while frame.more:
        frame = sock.recv(0, False)
        if len(frames) < most:
            frames.append(frame)
    return frames


def send_all(sock: zmq.SyncSocket, frames: Payloads, flags: int = 0) -> None:
    """Queue a message. Received frames are sent on as they are; anything else is copied at once."""
    for frame in frames[:-1]:
        sock.send(frame, _MORE | flags)
    sock.send(frames[-1], flags)


class Router:
    """A bound socket that talks to many peers, each known by its routing id (bytes).

    `keys` see `areal_like.wire.keys`; None: any process that can reach the endpoint may talk. `max_frame`: bytes of the
    largest frame. `unsent` messages may wait for one peer. `as_client`: use an actor's key pair, because the server's
    is not here; `key` is the public key. `refused` counts messages that could not be accepted. Raises BusError,
    KeysError."""

    def __init__(
        self,
        endpoint: str,
        keys: str | None = None,
        *,
        max_frame: int = MAX_FRAME_BYTES,
        unsent: int = UNSENT,
        as_client: bool = False,
    ):
        # The allow-list belongs to a context: one of its own, so that it concerns no other socket of this process.
        self.context: zmq.SyncContext = zmq.Context() if keys else zmq.Context.instance()
        self.context.set(_ZERO_COPY_RECV, 0)
        self._guard = keyring.Guard(self.context, keys) if keys else None
        self.socket = self.context.socket(zmq.ROUTER)
        self.refused = self.unsent = 0
        self.key = ""
        try:
            limits: Options = {zmq.SNDHWM: unsent, zmq.RCVHWM: UNREAD, zmq.MAXMSGSIZE: max_frame}
            # ROUTER_MANDATORY: a full queue is an error here, and no silent loss
            _configure(self.socket, {**limits, zmq.ROUTER_HANDOVER: 1, zmq.ROUTER_MANDATORY: 1})
            if keys:
                public, secret, *_ = keyring.client_pair(keys, "actor") if as_client else keyring.server_pair(keys)
                # ZAP_ENFORCE_DOMAIN: without an allow-list accept nobody; the default accepts all
                curve: Options = {zmq.CURVE_SERVER: 1, zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret}
                _configure(self.socket, {**curve, zmq.ZAP_DOMAIN: keyring.DOMAIN.encode(), zmq.ZAP_ENFORCE_DOMAIN: 1})
                self.key = public.decode()
            self.socket.bind(endpoint)
        except keyring.KeysError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            hint = "in use; choose a free buffer.port, or 0 for any" if error.errno == zmq.EADDRINUSE else str(error)
            raise BusError(f"can't bind to {endpoint}: {hint}") from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout: float) -> tuple[bytes, Received | WireError] | None:
        """The next message and its sender, or None after `timeout` s. A refused message comes as a WireError."""
        parts = receive_within(self.socket, timeout)
        if parts is None:
            return None
        role, _, key = str(parts[-1].get("User-Id")).partition(" ") if self._guard else ("", "", "")
        peer, *frames = keep(parts)
        try:
            received = decode(frames)
            if role:
                wire.check_role(role, received.message)
            return peer, received._replace(owner=key) if role == "actor" else received
        except WireError as error:
            self.refuse(peer, str(error))
            return peer, error

    def refuse(self, peer: bytes, reason: str) -> None:
        self.refused += 1
        self.send(peer, Refused(reason[:1000]))
        if self.refused <= LOGGED_REFUSALS or self.refused % 1000 == 0:
            shown = b":".join(peer.split(b":")[:2])  # the rest is a secret
            log.warning("refused a message of %r: %r (%d in all)", shown, reason[:1000], self.refused)

    def send(self, peer: bytes, message: Message, payloads: Payloads = ()) -> None:
        """Queue a message. A peer that is gone is no error; for one that does not read, `unsent` counts it."""
        try:
            send_all(self.socket, [peer, *encode(message, payloads)], _NOW)
        except zmq.ZMQError as error:
            self.unsent += error.errno == errno.EAGAIN

    def close(self) -> None:
        self.socket.close(linger=200)
        if self._guard:
            self._guard.stop()
            self.context.term()


def routing_id(name: str) -> bytes:
    """A routing id for this socket, over all its connections; a restarted process is another peer. It is random: with
    ROUTER_HANDOVER, a process that guesses it could take over the connection of another role."""
    return f"{name}:{os.getpid()}:{secrets.token_hex(8)}".encode()


def deliver(seconds: float) -> None:
    """Close all sockets of this asyncio process, and wait up to `seconds` until queued messages are sent."""
    zmq.asyncio.Context.instance().destroy(linger=int(seconds * 1000))


class Security(TypedDict, total=False):
    """Of a dealer: seconds until a silent connection counts as broken, the folder of keys (`wire.keys`), the key pair
    there to use, and the public key that the other side must show where it is not the server's."""

    link_timeout: float | None
    keys: str | None
    role: str
    key: str


def _dealer(context: zmq.Context[Socket], endpoint: str, name: str, peer: str, how: Security) -> tuple[Socket, Link]:
    link_timeout, keys, key = how.get("link_timeout"), how.get("keys"), how.get("key", "")
    options: Options = {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.MAXMSGSIZE: MAX_FRAME_BYTES}
    options[zmq.ROUTING_ID] = routing_id(name)
    if keys:
        own, secret, server = keyring.client_pair(keys, how["role"])
        options |= {zmq.CURVE_PUBLICKEY: own, zmq.CURVE_SECRETKEY: secret, zmq.CURVE_SERVERKEY: key.encode() or server}
    if link_timeout:
        ms = max(PINGS_PER_TIMEOUT, int(link_timeout * 1000))
        options |= {zmq.HANDSHAKE_IVL: ms, zmq.HEARTBEAT_TIMEOUT: ms, zmq.HEARTBEAT_IVL: ms // PINGS_PER_TIMEOUT}
    sock = context.socket(zmq.DEALER)
    _configure(sock, options)
    link = Link(sock, endpoint, peer, keys)
    sock.connect(endpoint)
    return sock, link


class Dealer:
    """A connected socket of a blocking process; `peer` names the other side in errors. Raises KeysError.

    The thread that made it receives; others may send as well, in one order for all. A lock guards the socket. The
    receiver waits outside the lock, on the socket's file descriptor, which signals each event once; a thread whose send
    consumed the signal passes it on with `_wake`."""

    def __init__(self, endpoint: str, name: str, peer: str, **how: Unpack[Security]):
        self.socket, self.link = _dealer(zmq.Context.instance(), endpoint, name, peer, {"role": "operator", **how})
        self._lock, self._owner = threading.Lock(), threading.get_ident()
        self._wake = Wake()

    def send(self, message: Message, payloads: Payloads = ()) -> None:
        """Queue a message. Raises BusError if the other side has refused this one: libzmq then has no queue."""
        with self._lock:
            try:
                send_all(self.socket, encode(message, payloads), _NOW)
            except zmq.Again:
                self.link.check()
                raise BusError(f"the {self.link.peer} has closed the connection: nothing can be sent") from None
        if threading.get_ident() != self._owner:
            self._wake.set()

    def receive(self, timeout: float) -> Received | None:
        """The next message, or None after `timeout` seconds. Raises WireError; BusError if this side is refused."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                frames = receive_within(self.socket, 0.0)
                if frames is None:
                    self.link.check()
            if frames is not None:
                return decode(keep(frames), MAX_FRAME_BYTES)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._wake.wait(self.socket.FD, left if self.link.connections else min(left, 0.5))

    def close(self) -> None:
        self.link.close()
        self.socket.close(linger=200)
        self._wake.close()


class AsyncDealer:
    """A connected socket of an asyncio process, like `Dealer`. The receiver must poll `link` to detect reconnects."""

    def __init__(self, endpoint: str, name: str, peer: str, **how: Unpack[Security]):
        self.socket, self.link = _dealer(zmq.asyncio.Context.instance(), endpoint, name, peer, {"role": "actor", **how})

    def send(self, message: Message, payloads: Payloads = ()) -> None:
        """Queue a message. Without a high-water mark the send is done when the call returns, so it is not awaited."""
        self.socket.send_multipart(encode(message, payloads), copy=True)

    async def receive(self) -> Received:
        """The next message. Raises WireError."""
        return decode(keep(await self.socket.recv_multipart(copy=False)), MAX_FRAME_BYTES)

    def close(self) -> None:
        self.link.close()
        self.socket.close(linger=200)
