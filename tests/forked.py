"""Processes of a test that need torch, forked from the tests' common fork server, so that none imports it again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_like.launch import forks
from areal_like.launch.forks import Forked, Forks
from areal_like.launch.group import Group, spawn
from areal_like.launch.outcome import nothing


@contextlib.contextmanager
def forked(module: str, arguments: Sequence[Sequence[str]], folder: Path) -> Iterator[list[Forked] | list[Group]]:
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


def said(folder: Path) -> str:
    """The output of the processes in a folder."""
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted((folder / "logs").iterdir()))
