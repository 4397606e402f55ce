"""CURVE keys: who may connect, in which role, and proof that the other side is the right buffer.

    FOLDER/server.key, server.key_secret    the key pair of processes that bind: the buffer and the publisher
    FOLDER/ROLE.key_secret                  the key pair of clients in ROLE: learner, actor, operator
    FOLDER/clients/NAME.key                 the allow-list: public keys of permitted clients, each with its role

Files are ZeroMQ certificates (`zmq.auth`). A secret file that others can read is refused, as ssh does. A machine that
only connects needs `server.key` and its own `client.key_secret`. Remove a file from `clients/` to shut that client out
from its next connection on. Keys never go into an environment, an argument or a log."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from areal_like.errors import UserError
from areal_like.wire.messages import SENDS

log = logging.getLogger(__name__)
DOMAIN = "areal_like"
"""Domain name for the authentication protocol (ZAP); it has no other meaning."""
ROLES = ("learner", "actor", "operator")
"""Roles for which `make` makes keys."""
_ROLE = re.compile(r"^\s*role\s*=\s*(\S+)\s*$", re.MULTILINE)
TELL_SECONDS = 10.0
"""Minimum seconds between log lines about rejected clients."""


class Listed(NamedTuple):
    """A client of an allow-list: its public key, and its role."""

    key: bytes
    role: str


class KeysError(UserError):
    """Keys are missing, unsafe, or in the way; the text has the remedy."""


def make(folder: Path) -> None:
    """Make a server pair, a pair for each role, and their allow-list. Raises KeysError rather than overwrite."""
    secrets = [f"{name}.key_secret" for name in ("server", *ROLES, "client")]
    for path in (folder / name for name in ("server.key", *secrets, "clients")):
        if path.exists():
            raise KeysError(f"{path} exists: nothing was changed; choose another folder, or remove the old keys")
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
    if role not in SENDS:
        raise KeysError(f"{role!r} is no role: {', '.join(SENDS)}")
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
    public.write_bytes(public.read_bytes().replace(b"metadata\n", f"metadata\n    role = {role}\n".encode()))
    public.rename(listed)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Files made meanwhile can be read by their owner only, from the first moment."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def server_pair(folder: str | Path) -> tuple[bytes, bytes]:
    return _secret(Path(folder) / "server.key_secret")


def client_pair(folder: str | Path, role: str) -> tuple[bytes, bytes, bytes]:
    """(public, secret, the server's public key) of a client in `role`. Raises KeysError."""
    own, only = Path(folder) / f"{role}.key_secret", Path(folder) / "client.key_secret"
    return (*_secret(only if only.exists() and not own.exists() else own), _load(Path(folder) / "server.key")[0])


def listed(folder: Path, known: Mapping[Path, Listed]) -> dict[Path, Listed]:
    """The files of an allow-list, with their content. One that cannot be read now counts as it is `known`; one with
    other content than a key and a role counts for nothing."""
    found = {}
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ".key"]
    except OSError as error:
        log.error("can't read the allow-list %s, which counts as it was: %s", folder, error)
        return dict(known)
    for path in paths:
        try:
            found[path] = _listed(path)
        except FileNotFoundError:
            pass  # removed just now
        except OSError as error:
            log.error("can't read %s, which counts as it was: %s", path, error)
            found |= {path: known[path]} if path in known else {}
        except (KeysError, ValueError) as error:
            log.error("its client is not let in: %s", error)
    return found


def _listed(path: Path) -> Listed:
    role = _ROLE.search(path.read_text(encoding="utf-8"))
    if not role or role[1] not in SENDS:
        raise KeysError(f"{path}: got role {role and role[1][:40]!r}, expected one of {', '.join(SENDS)}")
    return Listed(load_certificate(path)[0], role[1])


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


class Guard(ThreadAuthenticator):
    """Lets only clients of the allow-list of `folder`, read again for each connection, connect to the CURVE servers of
    `context`, until `stop()`. Messages of an accepted client carry its role and public key as `User-Id`."""

    def __init__(self, context: zmq.SyncContext, folder: str | Path):
        super().__init__(context)
        self.folder, self._logged_at = Path(folder) / "clients", -TELL_SECONDS
        if not self.folder.is_dir():
            raise KeysError(f"{self.folder} is missing: it holds the public key of every client that may connect")
        self._roles: dict[bytes, str] = {}
        self._listed = listed(self.folder, {})
        self.configure_curve_callback(DOMAIN, self)
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator's thread. Raises nothing: an exception would end the thread."""
        self._listed = listed(self.folder, self._listed)
        self._roles = {each.key: each.role for each in self._listed.values()}
        now = time.monotonic()
        if key not in self._roles and now - self._logged_at >= TELL_SECONDS:
            self._logged_at = now
            log.warning("refused a connection: its key is not in %s", self.folder)
        return key in self._roles

    def curve_user_id(self, client_public_key: bytes) -> str:
        key = z85.encode(client_public_key)
        return f"{self._roles[key]} {key.decode()}"
