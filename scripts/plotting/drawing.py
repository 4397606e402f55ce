"""From the data of a plot to its picture."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from . import cells, lines, rows, timelines
from .plot import Plot

DRAWERS = {
    "curves": lines.draw,
    "against": lines.draw,
    "cells": cells.draw,
    "rows": rows.draw,
    "timelines": timelines.draw,
}
DIGEST = "Source"
"""Key of a png's text: the digest of the data that it shows."""


def draw(plot: Plot) -> Any:
    """A matplotlib figure. Raises ValueError if there is nothing to draw."""
    if not any(items for panel in plot.panels.values() for items in panel.values()):
        raise ValueError(f"{plot.source or plot.title}: there is nothing to draw")
    return DRAWERS[plot.kind](plot)


def digest(plot: Plot) -> str:
    return hashlib.sha256(plot.as_json().encode()).hexdigest()


def picture(plot: Plot, path: Path) -> None:
    """Write the picture, and make its folder. Raises ValueError if there is nothing to draw, OSError."""
    figure = draw(plot)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **({"metadata": {DIGEST: digest(plot)}} if path.suffix == ".png" else {}))


def keep(plot: Plot, path: Path) -> None:
    """The picture, and its data beside it as JSON: `scripts.plots` draws it again."""
    picture(plot, path)
    path.with_suffix(".json").write_text(plot.as_json(), encoding="utf-8")
