"""CURVE keys: who may connect, in which role, and proof that the other side is the right buffer.

    FOLDER/server.key, server.key_secret    the key pair of processes that bind: the buffer and the publisher
    FOLDER/ROLE.key_secret                  the key pair of clients in ROLE: learner, actor, operator
    FOLDER/clients/NAME.key                 the allow-list: public keys of permitted clients, each with its role

Files are ZeroMQ certificates (`zmq.auth`). A secret file that others can read is refused, as ssh does.
`areal_like.wire.messages` lists the messages that a role may send.
A machine that only connects needs `server.key` and its own `client.key_secret`: `add_client` makes such a folder.
Remove a file from `clients/` to shut that client out from its next connection on; no restart is needed.

`scripts.keys` makes keys; so does the starter of a run that needs keys and has none (`provide`). `wire.bus` reads
them from the folder that the config names. Keys never go into an environment, an argument or a log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from areal_like.errors import UserError
from areal_like.wire.frames import MAY_SAY

log = logging.getLogger(__name__)
DOMAIN = "areal_like"
"""Domain name for the authentication protocol (ZAP); it has no other meaning."""
ROLES = ("learner", "actor", "operator")
"""Roles for which `make` makes keys."""
_ROLE = re.compile(r"^\s*role\s*=\s*(\S+)\s*$", re.MULTILINE)
TELL_SECONDS = 10.0
"""Minimum seconds between log lines about rejected clients."""


class KeysError(UserError):
    """Keys are missing, unsafe, or in the way; the text has the remedy."""


# ---- making ---------------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Make a server pair, a pair for each role, and their allow-list. Raises KeysError rather than overwrite."""
    roles = [f"{role}.key_secret" for role in (*ROLES, "client")]
    for name in ("server.key", "server.key_secret", *roles, "clients"):
        if (folder / name).exists():
            raise KeysError(
                f"{folder / name} exists: nothing was changed; choose another folder, or remove the old keys"
            )
    with _private_files():
        (folder / "clients").mkdir(parents=True)
        create_certificates(folder, "server")
        for role in ROLES:
            create_certificates(folder, role)
            _list(folder / f"{role}.key", folder / "clients" / f"{role}.key", role)


def provide(folder: Path) -> None:
    """Like `make`, whole or not at all; does nothing if keys exist."""
    if folder.exists():
        return
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    make(beside)
    beside.rename(folder)


def add_client(folder: Path, name: str, role: str = "actor") -> Path:
    """Add a client to the allow-list, as `role`; returns a folder with all that its machine needs. Raises KeysError."""
    if not name.replace("-", "").replace("_", "").isalnum() or name == "clients":
        raise KeysError(f"{name!r} can't name a client: use letters, digits, - and _")
    if role not in MAY_SAY:
        raise KeysError(f"{role!r} is no role: {', '.join(MAY_SAY)}")
    server, listed, place = folder / "server.key", folder / "clients" / f"{name}.key", folder / name
    if not server.is_file():
        raise KeysError(f"{folder} holds no server.key: make the keys first, without --client")
    if listed.exists() or place.exists():
        raise KeysError(f"there is a client {name} already: nothing was changed")
    with _private_files():
        place.mkdir()
        create_certificates(place, "client")
        shutil.copy(server, place)
        _list(place / "client.key", listed, role)
    return place


def _list(public: Path, listed: Path, role: str) -> None:
    """Put a public key on the allow-list."""
    public.write_text(public.read_text().replace("metadata\n", f"metadata\n    role = {role}\n"))
    public.rename(listed)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Files made within this context can be read by their owner only, from the first moment."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


# ---- reading --------------------------------------------------------------------------------------------------------


def server_pair(folder: str | Path) -> tuple[bytes, bytes]:
    """(public, secret). Raises KeysError."""
    return _secret(Path(folder) / "server.key_secret")


def client_pair(folder: str | Path, role: str) -> tuple[bytes, bytes, bytes]:
    """(public, secret, the server's public key) of a client in `role`. Raises KeysError."""
    own, only = Path(folder) / f"{role}.key_secret", Path(folder) / "client.key_secret"
    return (*_secret(only if only.exists() and not own.exists() else own), _load(Path(folder) / "server.key")[0])


def listed(folder: Path) -> dict[bytes, str]:
    """Public keys of an allow-list, with their roles. Raises KeysError, OSError."""
    found = {}
    for path in folder.iterdir():
        if path.suffix == ".key":
            role = _ROLE.search(path.read_text())
            if not role or role[1] not in MAY_SAY:
                raise KeysError(f"{path}: got role {role and role[1][:40]!r}, expected one of {', '.join(MAY_SAY)}")
            found[_load(path)[0]] = role[1]
    return found


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
        raise KeysError(f"no key in {path} (security.key_folder): make keys with areal-like keys FOLDER") from None


# ---- letting in -----------------------------------------------------------------------------------------------------


class Guard(ThreadAuthenticator):
    """Accepts a connection if its public key is in `folder`, which is read again for each connection. Messages of an
    accepted client carry its role as `User-Id`."""

    def __init__(self, context: zmq.SyncContext, folder: Path):
        super().__init__(context)
        self.folder, self._told_at = folder, -TELL_SECONDS
        self._roles: dict[bytes, str] = {}
        self.configure_curve_callback(DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator's thread. Raises nothing: an exception would end the thread."""
        try:
            self._roles = listed(self.folder)
        except (OSError, ValueError) as error:
            log.error("can't read the allow-list, so no client is let in: %s", error)
            return False
        now = time.monotonic()
        if key not in self._roles and now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            log.warning("refused a connection: its key is not in %s", self.folder)
        return key in self._roles

    def curve_user_id(self, client_public_key: bytes) -> str:
        """The role of a client that was just accepted."""
        return self._roles[z85.encode(client_public_key)]


def guard(context: zmq.SyncContext, folder: str | Path) -> Guard:
    """Let only clients of the allow-list connect to the CURVE servers of `context`, until `stop()` is called."""
    clients = Path(folder) / "clients"
    if not clients.is_dir():
        raise KeysError(f"{clients} is missing: it holds the public key of every client that may connect")
    authenticator = Guard(context, clients)
    authenticator.start()
    return authenticator
