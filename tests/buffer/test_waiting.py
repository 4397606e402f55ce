"""Payloads wait, the journal is rotated, the buffer is killed and started again: a small `scripts.bench.waiting`."""

from pathlib import Path

import pytest

from scripts.bench import waiting


def test_what_waits_survives_rotations_and_kills_and_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real buffer process, past the page cache. Without payloads one takes 80 MiB."""
    monkeypatch.setattr(waiting, "MOST_RESIDENT", 160 << 20)
    lives = waiting.measure(0.25, "fsync", tmp_path)
    assert waiting.check(lives) == []
    assert lives[0].most_resident > 1.5 * waiting.MOST_RESIDENT and lives[0].ledger["active"] > 100
    assert lives[-1].journal_bytes < 1.1 * lives[0].journal_bytes, "a rotation copies no payloads"
