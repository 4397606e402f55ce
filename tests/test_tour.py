"""`docs/tour.md` names files and functions that exist, and is short enough for an evening."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES, MOST_LINES = 25, 4000


def stops() -> list[tuple[str, list[str]]]:
    """(file, what to read of it: names, or "all") of each row of the tour's tables."""
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]*) \|", (ROOT / "docs/tour.md").read_text(encoding="utf-8"), re.M)
    return [(path, ["all"] if what == "all" else re.findall(r"`([\w.]+)`", what)) for path, what in rows]


def spans(path: str) -> dict[str, range]:
    """Function, class or Class.method → its lines; "all" → all lines."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {"all": range(len(text.splitlines()))}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = range(node.lineno - 1, node.end_lineno or 0)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[f"{node.name}.{inner.name}"] = range(inner.lineno - 1, inner.end_lineno or 0)
    return found


def test_the_tour_names_what_exists_and_fits_into_an_evening() -> None:
    lines: dict[str, set[int]] = {}
    for path, names in stops():
        known = spans(path)
        assert names and set(names) <= known.keys(), f"{path} has no {set(names) - known.keys()}"
        lines.setdefault(path, set()).update(*(known[name] for name in names))
    total = sum(map(len, lines.values()))
    assert len(lines) >= 15, "the tables were not read"
    assert len(lines) <= MOST_FILES and total <= MOST_LINES, f"{len(lines)} files, {total} lines"
