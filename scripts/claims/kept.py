"""`results.csv` of a study: a row per run. The tables of the documentation are made from the published ones.

`docs/data/off_policy` has those of `off_policy`, `docs/data/claims` those of the others (`publish`).
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.places import REPOSITORY

PUBLISHED = Path("docs/data/claims")
WHOLE = ("seed",)
"""Columns of whole numbers."""


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """These columns of each row; floats with four figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([f"{v:.4g}" if isinstance(v, float) else v for v in (row[name] for name in columns)])


def read(path: Path, columns: Sequence[str], texts: Container[str]) -> list[dict[str, Any]]:
    """All columns but `texts` are numbers. Raises OSError, ValueError."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if (names := tuple(reader.fieldnames or ())) != tuple(columns):
            raise ValueError(f"{path}: expected the columns {', '.join(columns)}; got {', '.join(names)}")
        return [{name: _value(name, text, texts) for name, text in row.items()} for row in reader]


def _value(name: str, text: str, texts: Container[str]) -> str | int | float:
    if name in texts:
        return text
    return int(text) if name in WHOLE else float(text)


def publish(results: Path, study: str, root: Path = REPOSITORY) -> None:
    """Keep a study's `results.csv` for the documentation."""
    (root / PUBLISHED).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(results, root / PUBLISHED / f"{study}.csv")
