"""Pictures of studies and timelines: the file is there, with the series that it was given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from scripts.analysis.intervals import CURVE_POINTS
from scripts.plotting.drawing import draw, keep
from scripts.plotting.plot import Plot, curve, point


def curves(count: int) -> Plot:
    lines = {
        label: [curve([0, 1, 2], [0.1, n + 0.01 * seed, 0.9]) for seed in range(count)] for n, label in enumerate("ab")
    }
    return Plot("curves", "Curves", {"one": lines, "two": lines}, x="train steps", y="reward")


def against(count: int) -> Plot:
    lines = {"a": [point(x, [0.5 + 0.01 * seed for seed in range(count)]) for x in (0, 1, 8, 32)]}
    return Plot("against", "Against", {"": lines}, x="staleness, in versions", y="reward")


def rows(count: int) -> Plot:
    lines = {label: [point(name, range(1, count + 1)) for name in ("x", "y", "z")] for label in "ab"}
    return Plot("rows", "Rows", {"": lines}, x="error, %", log=True)


def timelines(_: int) -> Plot:
    spans = [("generate", 0.0, 1.0), ("update", 0.5, 0.75)]
    return Plot("timelines", "Timelines", {"sync": {"actor-0": spans, "learner": [("train", 1.0, 2.0)]}}, x="seconds")


@pytest.mark.parametrize("made", [curves, against, rows, timelines])
@pytest.mark.parametrize("count", [1, 5])
def test_a_picture_has_its_series_and_its_data_beside_it(made, count: int, tmp_path: Path) -> None:
    plot = made(count)
    keep(plot, tmp_path / "new" / "kept.png")
    assert (tmp_path / "new" / "kept.png").read_bytes()[:4] == b"\x89PNG"
    data = json.loads((tmp_path / "new" / "kept.json").read_text())
    assert data["kind"] == plot.kind and {t: list(panel) for t, panel in data["panels"].items()} == {
        title: list(panel) for title, panel in plot.panels.items()
    }
    figure = draw(plot)
    shown = {text.get_text() for axis in figure.axes for text in axis.get_yticklabels()}
    named = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert set(plot.lines()) <= shown | named
    if plot.kind == "against":
        (line,) = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 4]
        assert line.get_ydata() == pytest.approx([p.estimate.mean for p in plot.panels[""]["a"]])
        intervals = [each for each in figure.axes[0].collections]
        assert len(intervals) == (4 if count == 5 else 0), "of five seeds or more"


def test_a_missing_seed_is_counted_and_a_long_curve_is_cut(tmp_path: Path) -> None:
    keep(Plot("against", "One failed", {"": {"dg": [point(1, [1.0, None, math.nan, 3.0])]}}), tmp_path / "a.png")
    (found,) = json.loads((tmp_path / "a.json").read_text())["panels"][""]["dg"]
    assert found == {"x": 1, "values": [1.0, 3.0], "missing": 2}
    x, y = curve(np.arange(10_000.0), np.arange(10_000.0) / 3)
    assert len(x) == len(y) == CURVE_POINTS and (x[-1], y[-1]) == (9999, 3333)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(Plot("curves", "Nothing", {"": {}}))
