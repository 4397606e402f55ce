"""Words that the docs avoid: verbs of people for software, free relative clauses, numbers without their zero.

Software receives, reports, exits, requires; a noun replaces a clause that stands for one; 0.95, not .95.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNED = (
    r"\b(?:is|are|was|were|be|been) told\b|\btells?\b|\bhears?\b|\blives (?:in|on|at)\b|\bdies\b|\bsays\b|\bsaid\b",
    r"\b(?:whoever|whatever|that which|what was|who waits|who works|who reads)\b",
    r"\bfor ever\b|\bas ever\b|\bof its own accord\b|\bit is that\b",
    r"(?<![\w.\])/*-])\.\d",
)
PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in BANNED), re.IGNORECASE)
EXEMPT = {"CHANGELOG.md", "docs/config.md"}
FILES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def findings(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers and the avoided word, outside of code."""
    found, code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code and (match := PATTERN.search(re.sub(r"`[^`]*`", "``", line))):
            found.append((number, match[0]))
    return found


@pytest.mark.parametrize("path", sorted({*FILES} - EXEMPT))
def test_pages_avoid_these_words(path: str) -> None:
    assert not findings((ROOT / path).read_text(encoding="utf-8"))


def test_the_checker_finds_each_kind() -> None:
    text = "It dies here.\n`it dies`\n```\nsays\n```\nwhatever\nfor ever\n.95 is low, v0.5 is not\n"
    assert findings(text) == [(1, "dies"), (6, "whatever"), (7, "for ever"), (8, ".9")]
