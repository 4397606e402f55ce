"""Square matrices of numbers in [−1, 1]: cosines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .canvas import SMALL, WIDTH, canvas, name_panel
from .plot import Plot


def plot_matrix(path: Path, title: str, panels: Mapping[str, np.ndarray], labels: Sequence[str]) -> None:
    """A panel per title, one below the other; NaN stays blank."""
    figure = canvas(Plot("rows", title, {}), (WIDTH - 0.6) * len(panels))
    axes = figure.subplots(len(panels), squeeze=False).flatten().tolist()
    for axis, (name, matrix) in zip(axes, panels.items(), strict=True):
        axis.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu")
        for (row, column), value in np.ndenumerate(matrix):
            if not math.isnan(value):
                colour = "white" if abs(value) > 0.7 else "black"
                place = {"ha": "center", "va": "center", "fontsize": 6 if len(labels) > 8 else SMALL}
                axis.text(column, row, f"{value:.2f}", color=colour, **place)
        name_panel(axis, name)
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=SMALL)
        axis.set_yticks(range(len(labels)), labels, fontsize=SMALL)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
