"""Processes of a test, forked from the tests' common fork server, so that none imports anew what it has."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from areal_like.launch import forks
from areal_like.launch.forks import Forked, Forks
from areal_like.launch.group import ProcessGroup, spawn
from areal_like.launch.outcome import nothing


@contextlib.contextmanager
def forked(
    module: str, arguments: Sequence[Sequence[str]], folder: Path
) -> Iterator[list[Forked] | list[ProcessGroup]]:
    """Run one process per list of arguments, each as `python -m module arguments`; all end with the context."""
    logs = [folder / "logs" / f"{number}.log" for number in range(len(arguments))]
    logs[0].parent.mkdir()
    if not forks.AVAILABLE:
        groups = [
            spawn([sys.executable, "-m", module, *each], 1, log) for each, log in zip(arguments, logs, strict=True)
        ]
        try:
            yield groups
        finally:
            for group in groups:
                group.kill()
                group.wait()
        return
    server = Forks(folder)
    try:
        yield [server.start(module, each, 1, log, nothing) for each, log in zip(arguments, logs, strict=True)]
    finally:
        server.close()


class Command:
    """`python -m MODULE ARGUMENTS` (the `words`) in this folder, as `subprocess.Popen` would run it: a fork where the
    tests share a server, unless another program shall start it. Its output is appended to a file."""

    def __init__(self, words: Sequence[str], output: Path, wrapper: Sequence[str] = (), **environment: str):
        self.returncode: int | None = None
        self._output = output
        self._server: Forks | None = None
        self._process: Forked | subprocess.Popen[bytes]
        with mock.patch.dict(os.environ, environment):
            if forks.AVAILABLE and forks.VARIABLE in os.environ and not wrapper:
                self._server = Forks(Path(tempfile.gettempdir()))  # its title shall name no run
                self._process = self._server.start("tests.command", words, 1, output, nothing)
            else:
                with output.open("ab") as file:
                    command = [*wrapper, sys.executable, "-m", *words]
                    self._process = subprocess.Popen(command, stdout=file, stderr=file)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        if self.returncode is None and (code := self._process.poll()) is not None:
            self.returncode = code
            if self._server:
                self._server.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._process.wait(timeout)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self._output.read_text(), None

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def said(folder: Path) -> str:
    """The output of the processes in a folder."""
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted((folder / "logs").iterdir()))
