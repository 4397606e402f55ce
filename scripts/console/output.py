"""Output of commands: a console, tables, JSON files."""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import category

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 120
"""Columns if there is no terminal."""
BARS = "▁▂▃▄▅▆▇█"


def console() -> Console:
    """Prints text unchanged to standard output: as wide as the terminal, or `WIDTH` columns if there is none."""
    wide = None if sys.stdout.isatty() else WIDTH
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=wide)


def visible(text: str) -> str:
    """Control characters, which could command the terminal, and those that hide or reorder text, as escapes."""
    plain = {each for each in {*text} if each.isprintable() or each in "\n\t\u200c\u200d" or category(each) == "Zs"}
    return "".join(each if each in plain else repr(each)[1:-1] for each in text)


def shortened(text: str, widest: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= widest else line[: widest - 1] + "…"


def table(title: str, *columns: str) -> Table:
    """An empty table of numbers: the first column names the row and is aligned left, the others right."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left", no_wrap=True)
    return made


def facts(found: Mapping[str, str]) -> Table:
    """A row per name and text; empty texts are left out."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in found.items():
        if text:
            made.add_row(name, Text(text))
    return made


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The values as at most `width` bars, from the least to the greatest; each bar is the mean of its part of them."""
    finite = [value for value in values if abs(value) < float("inf")]
    count = min(width, len(finite))
    cuts = [len(finite) * n // count for n in range(count + 1)] if count else []
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, spread = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(BARS[round((mean - low) / spread * (len(BARS) - 1)) if spread else 0] for mean in means)


def write_json(file: Path | None, found: Any) -> None:
    """Write `found` to `file`, if one was asked for; `-` is standard output."""
    if file == Path("-"):
        print(json.dumps(found, indent=2))
    elif file:
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
