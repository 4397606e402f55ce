"""CURVE keys: who may connect, and that it is the right buffer that one connects to.

    FOLDER/server.key, server.key_secret    the buffer's and the publisher's pair (one for both: they bind)
    FOLDER/client.key_secret                the pair of whoever connects: actors, the learner, the starter
    FOLDER/clients/NAME.key                 the allow-list: public keys of the clients that are let in

Files are ZeroMQ certificates (`zmq.auth`); secret ones can be read by their owner only, or are refused, as ssh does.
A machine that only connects needs `server.key` and a `client.key_secret` of its own: `add_client` makes such a folder.
Taking a file out of `clients/` shuts that client out from its next connection on; nothing has to be restarted.

Keys are made by `scripts.keys` and read by `areal_like.bus` from the folder that the config names; they go into no
environment, no argument and no log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate, load_certificates
from zmq.auth.thread import ThreadAuthenticator

from areal_like.errors import UserError

log = logging.getLogger(__name__)
DOMAIN = "areal_like"
"""Of the authentication protocol (ZAP); a name, nothing more."""
TELL_SECONDS = 10.0
"""A stranger that knocks again and again is told of in the log this often."""


class KeysError(UserError):
    """Keys that are missing, not safe, or in the way; the text says what to do."""


# ---- making ---------------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """A server pair, a client pair, and an allow-list of that one client. Raises KeysError rather than overwrite."""
    for name in ("server.key", "server.key_secret", "client.key_secret", "clients"):
        if (folder / name).exists():
            raise KeysError(
                f"{folder / name} exists: nothing was changed; choose another folder, or remove the old keys"
            )
    with _private_files():
        (folder / "clients").mkdir(parents=True)
        create_certificates(folder, "server")
        create_certificates(folder, "client")
        (folder / "client.key").rename(folder / "clients" / "client.key")


def add_client(folder: Path, name: str) -> Path:
    """Let one more client in; returns a folder with all that its machine needs. Raises KeysError."""
    if not name.replace("-", "").replace("_", "").isalnum() or name == "clients":
        raise KeysError(f"{name!r} can't name a client: use letters, digits, - and _")
    server, listed, place = folder / "server.key", folder / "clients" / f"{name}.key", folder / name
    if not server.is_file():
        raise KeysError(f"{folder} holds no server.key: make the keys first, without --client")
    if listed.exists() or place.exists():
        raise KeysError(f"there is a client {name} already: nothing was changed")
    with _private_files():
        place.mkdir()
        create_certificates(place, "client")
        shutil.copy(server, place)
        (place / "client.key").rename(listed)
    return place


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """What is made here is its owner's alone from the first moment."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


# ---- reading --------------------------------------------------------------------------------------------------------


def server_pair(folder: str | Path) -> tuple[bytes, bytes]:
    """(public, secret). Raises KeysError."""
    return _secret(Path(folder) / "server.key_secret")


def client_pair(folder: str | Path) -> tuple[bytes, bytes, bytes]:
    """(public, secret, the server's public key). Raises KeysError."""
    return (*_secret(Path(folder) / "client.key_secret"), _load(Path(folder) / "server.key")[0])


def _secret(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise KeysError(f"{path} holds no secret key")
    if path.stat().st_mode & 0o077:
        raise KeysError(f"{path} can be read by others than its owner: chmod 600 {path}")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except PermissionError:
        raise KeysError(f"{path} may not be read by this user") from None
    except (OSError, ValueError):
        raise KeysError(
            f"no key in {path} (security.key_folder): make keys with python -m scripts.keys FOLDER"
        ) from None


# ---- letting in -----------------------------------------------------------------------------------------------------


class AllowList:
    """Answers, for each connection that is tried, whether its public key is in `folder`, read anew each time."""

    def __init__(self, folder: Path):
        self.folder, self._told_at = folder, -TELL_SECONDS

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator's thread; an exception would end that, so there is none."""
        try:
            allowed = key in load_certificates(self.folder)
        except (OSError, ValueError) as error:
            log.error("the allow-list can't be read, nobody is let in: %s", error)
            return False
        now = time.monotonic()
        if not allowed and now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            log.warning("refused a connection: its key is not in %s", self.folder)
        return allowed


def guard(context: zmq.Context, folder: str | Path) -> ThreadAuthenticator:
    """Let only clients of the allow-list connect to the CURVE servers of `context`, until `stop()` is called."""
    clients = Path(folder) / "clients"
    if not clients.is_dir():
        raise KeysError(f"{clients} is missing: it holds the public key of every client that may connect")
    authenticator = ThreadAuthenticator(context)
    authenticator.configure_curve_callback(DOMAIN, AllowList(clients))
    authenticator.start()
    return authenticator
