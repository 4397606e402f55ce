"""Serves the page of a live run: on loopback, at an address with a secret token.

    GET /TOKEN/            the page
    GET /TOKEN/data?have=N the data, or 204 if version N is the newest

Other requests get 404. The `Host` must name loopback, so that no other site's page can ask under its own name. The
run's files are read when a page asks. After each read it waits `REST` times the seconds that the read took, so watching
does not slow the run down.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .page import as_json, page

LOOPBACK = "127.0.0.1"
LEAST_SECONDS = 2.0
REST = 20.0


class Newest:
    """The newest data, numbered. `read` returns it; threads share what one has read."""

    def __init__(self, read: Callable[[], dict[str, Any]]):
        self._read, self._lock = read, threading.Lock()
        self._data: dict[str, Any] = {}
        self._text, self._again_at, self.number = "", 0.0, 0

    def get(self) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if time.monotonic() >= self._again_at:
                began = time.monotonic()
                data = self._read()
                text = as_json(data)
                self._again_at = time.monotonic() + max(LEAST_SECONDS, REST * (time.monotonic() - began))
                if text != self._text:
                    self.number += 1
                    self._data, self._text = data, text
            return self.number, self._data | {"number": self.number}


class Server(ThreadingHTTPServer):
    """Listens when it is made; `address` is what to open. Port 0: any free one. Raises OSError."""

    daemon_threads = True

    def __init__(self, read: Callable[[], dict[str, Any]], title: str, port: int = 0):
        super().__init__((LOOPBACK, port), Handler)
        self.newest, self.title, self.token = Newest(read), title, secrets.token_urlsafe(16)
        self.address = f"http://{LOOPBACK}:{self.server_port}/{self.token}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        token, _, name = asked.path.removeprefix("/").partition("/")
        if host not in (LOOPBACK, "localhost") or not secrets.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            return self._send(404, "text/plain", b"not found\n")
        if name == "":
            number, data = self.server.newest.get()
            return self._send(200, "text/html; charset=utf-8", page(data, self.server.title).encode())
        if name == "data":
            number, data = self.server.newest.get()
            if parse_qs(asked.query).get("have") == [str(number)]:
                return self._send(204, "text/plain", b"")
            return self._send(200, "application/json", as_json(data).encode())
        return self._send(404, "text/plain", b"not found\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal is the user's."""
