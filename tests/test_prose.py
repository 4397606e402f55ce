"""Words that docs, docstrings and comments avoid: verbs of people for software, relative clauses for nouns, ".95".

Software receives, reports, exits, requires; a noun replaces a clause that stands for one; 0.95, not .95.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNED = (
    r"\b(?:is|are|was|were|be|been) told\b|\btells?\b|\bhears?\b|\blives (?:in|on|at)\b|\bdies\b|\bsays\b|\bsaid\b",
    r"\b(?:whoever|whatever|that which|what was|who waits|who works|who reads)\b",
    r"\bfor ever\b|\bas ever\b|\bof its own accord\b|\bit is that\b",
    r"(?<![\w.\])/*-])\.\d",
)
PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in BANNED), re.IGNORECASE)
EXEMPT = {"CHANGELOG.md", "tests/test_prose.py"}
ROOMS = ("scripts", "examples", "areal_like", "actors", "buffer", "learners", "tests")
PATHS = ("*.md", *(f"{room}/*.py" for room in ROOMS))
FILES = subprocess.run(["git", "ls-files", *PATHS], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Lines of markdown outside of code, with their numbers."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code:
            yield number, line


def prose_of_module(text: str) -> Iterator[tuple[int, str]]:
    """Lines of docstrings and comments, with their numbers."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)
    if not any(PATTERN.search(line.partition("#")[2]) for line in text.splitlines()):
        return  # no comment can have a finding, and reading all tokens takes long
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def findings(prose: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    """Numbers of lines with an avoided word outside of backticks, and the word."""
    matches = ((number, PATTERN.search(re.sub(r"`[^`]*`", "``", line))) for number, line in prose)
    return [(number, match[0]) for number, match in matches if match]


def test_no_file_has_these_words() -> None:
    found = {}
    for path in {*FILES} - EXEMPT:
        text = (ROOT / path).read_text(encoding="utf-8")
        found[path] = findings(prose_of_module(text) if path.endswith(".py") else prose_of_page(text))
    assert not {path: words for path, words in found.items() if words}


def test_the_checker_finds_each_kind() -> None:
    page = "It dies here.\n`it dies`\n```\nsays\n```\nwhatever\nfor ever\n.95 is low, v0.5 is not\n"
    assert findings(prose_of_page(page)) == [(1, "dies"), (6, "whatever"), (7, "for ever"), (8, ".9")]
    module = '"""Says so."""\nvalue = "says"  # said twice\n'
    assert findings(prose_of_module(module)) == [(1, "Says"), (2, "said")]
