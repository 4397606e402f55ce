"""Processes of a test, forked from the fork server of the test session, so that none imports torch again."""

import contextlib
import json
import os
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from areal_like.launch.forks import Forked
from areal_like.launch.group import environment

PATIENCE = 240.0
"""Seconds until an event that is awaited counts as missed; it comes within one or two."""


def until(what: str, event: Callable[[], Any]) -> Any:
    """The first true result of `event`. Raises AssertionError that names `what`."""
    deadline = time.monotonic() + PATIENCE
    while not (result := event()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
    return result


@contextlib.contextmanager
def forked(module: str, arguments: Sequence[Sequence[str]], folder: Path) -> Iterator[list[Forked]]:
    """Run one process per list of arguments, each as `python -m module arguments`; all end with the context."""
    (folder / "logs").mkdir()
    processes = [
        Forked(module, each, environment(1), folder / "logs" / f"{number}.log") for number, each in enumerate(arguments)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.end(signal.SIGKILL)
            process.wait()


class Command:
    """`python -m MODULE ARGUMENTS` (the `words`), as `subprocess.Popen` would run it: a fork, unless `wrapper` starts
    it or `fresh` asks for a new interpreter. Its output is appended to a file."""

    def __init__(
        self, words: Sequence[str], output: Path, wrapper: Sequence[str] = (), fresh: bool = False, **variables: str
    ):
        self.returncode: int | None = None
        self._output, self._begin = output, output.stat().st_size if output.exists() else 0
        self._process: Forked | subprocess.Popen[bytes]
        with mock.patch.dict(os.environ, variables):
            own = environment(1)
        if wrapper or fresh:
            with output.open("ab") as file:
                command = [*wrapper, sys.executable, "-m", *words]
                self._process = subprocess.Popen(command, stdout=file, stderr=file, env=own)
        else:
            self._process = Forked(words[0], words[1:], own, output)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self.returncode = self._process.wait(timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self.text(), None

    def text(self) -> str:
        """The output so far."""
        return self._output.read_bytes()[self._begin :].decode(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


PYTHON = """#!%s -IS
import json, os, socket, sys
if sys.argv[1] != "-m":
    os.execv("%s", ["%s", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect("%s")
    asked.sendall(json.dumps([sys.argv[2:], dict(os.environ)]).encode() + b"\\n")
    sys.exit(int(asked.recv(9)))
"""


@contextlib.contextmanager
def forking_python(path: Path, output: Path) -> Iterator[None]:
    """Write a Python to `path` whose modules are forks, which need no seconds to import torch; they write to
    `output`."""

    class Forks(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            words, variables = json.loads(self.rfile.readline())
            self.wfile.write(str(Command(words, output, **variables).wait(PATIENCE)).encode())

    with tempfile.TemporaryDirectory(prefix="forks-", dir="/tmp") as place:
        path.write_text(PYTHON % (*[sys.executable] * 3, f"{place}/asked"))
        path.chmod(0o755)
        with socketserver.UnixStreamServer(f"{place}/asked", Forks) as forks:
            threading.Thread(target=forks.serve_forever, daemon=True).start()
            yield
            forks.shutdown()


def said(folder: Path) -> str:
    """The output of the processes in a folder."""
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted((folder / "logs").iterdir()))
