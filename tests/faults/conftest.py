"""Runs that are broken and resumed many times start as forks of the tests' common server."""

import sys
from pathlib import Path

import pytest

from scripts.verify import chaos
from tests.forked import Command


@pytest.fixture(autouse=True)
def starts_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(command: list[str], output: Path) -> Command:
        assert command[:2] == [sys.executable, "-m"]
        return Command(command[2:], output)

    monkeypatch.setattr(chaos, "started", started)
