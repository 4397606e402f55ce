"""Runs for tests, and the files that they leave."""

import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def published(run: Path) -> list[str]:
    """`VERSION DIGEST` of each published version, once."""
    return list(dict.fromkeys((run / "published.log").read_text().splitlines()))


def summary(run: Path) -> dict:
    """The summary, by whose ledger no group is lost."""
    found = json.loads((run / "summary.json").read_text())
    if ledger := found.get("ledger"):
        left = sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
        assert ledger["admitted"] == ledger["trained"] + left + ledger["active"]
    return found
