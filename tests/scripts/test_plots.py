"""Plots follow the rules for outside readers: a title that states the finding, units, shared axes, labels at the lines,
seeds, no intervals from a few seeds. The published ones come from the data in the repository."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.text import Text
from PIL import Image

from areal_like.run.spans import Span
from scripts import plots
from scripts.analysis.intervals import CURVE_POINTS, Estimate
from scripts.plotting import canvas, drawing
from scripts.plotting.lines import places
from scripts.plotting.matrix import plot_matrix
from scripts.plotting.plot import Plot, Point, curve, point, read

ROOT = Path(__file__).resolve().parents[2]
DATA = sorted(plots.DATA.glob("*.json"))
PICTURES = {path.stem: path for path in sorted(plots.PICTURES.glob("*.png"))}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITHOUT_DATA = {"report", "report-dark"}
"""Photographs of a page; and curves drawn before data were kept, until their studies run again."""


def seeds(count: int, slope: float = 1.0) -> list:
    return [curve([0, 1, 2], [0.1, 0.1 + slope * 0.2 + 0.01 * seed, 0.9]) for seed in range(count)]


def curves_of(labels: list[str], count: int, panels: tuple[str, ...] = ("",)) -> Plot:
    lines = {label: seeds(count, number) for number, label in enumerate(labels)}
    return Plot("curves", "All end alike", {title: lines for title in panels}, x="train steps", y="reward")


def against(labels: list[str], count: int) -> Plot:
    lines = {
        label: [point(x, [0.5 + 0.01 * seed + number / 10 for seed in range(count)]) for x in (0, 1, 8, 32)]
        for number, label in enumerate(labels)
    }
    return Plot("against", "Staleness costs nothing", {"": lines}, x="staleness, in versions", y="reward")


def rows(count: int) -> Plot:
    def place(name: str, mean: float) -> Point:
        return Point(name, Estimate(mean, mean / 2, mean * 2, count, count))

    first, second = ("clean", "stale"), ("clean", "stale", "broken")
    panel = {"dg": [place(name, 1.0) for name in first], "ppo": [place(n, m) for n, m in zip(second, (2, 38, 9))]}  # noqa: B905
    return Plot("rows", "38 times", {"dg and ppo": panel}, x="error, %", log=True, ratio=10)


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def labels(figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_gid() == canvas.LABEL]


def intervals(figure) -> list:
    return figure.findobj(lambda artist: isinstance(artist, LineCollection | PolyCollection))


# Rules


@pytest.mark.parametrize(
    "plot", [curves_of(["ppo", "dg"], 5), against(["ppo", "dg"], 5), rows(5)], ids=lambda p: p.kind
)
def test_a_plot_says_its_finding_and_what_the_axes_are(plot: Plot) -> None:
    figure = drawing.draw(plot)
    said = words(figure)
    assert plot.title in said and plot.x in said and (not plot.y or plot.y in said)
    assert figure.get_figwidth() * figure.dpi == 1400
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 7.5, "legible at 700 pixels"


def test_a_plot_without_a_title_is_refused() -> None:
    with pytest.raises(ValueError, match="a title that says what it shows"):
        Plot("curves", "", {})
    with pytest.raises(ValueError, match="kind is curves"):
        Plot("pie", "A pie", {})
    with pytest.raises(ValueError, match="nothing to draw"):
        drawing.draw(Plot("curves", "Nothing", {"": {"ppo": []}}))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("make", [curves_of, against])
def test_fewer_than_five_seeds_have_no_interval(make, count: int) -> None:
    figure = drawing.draw(make(["ppo", "dg"], count))
    assert not intervals(figure) and not re.search("interval|range", " ".join(words(figure)))
    enough = drawing.draw(make(["ppo", "dg"], 5))
    assert len(intervals(enough)) == 2
    assert any("95 % interval" in text for text in words(enough))


def test_rows_of_few_seeds_have_no_interval() -> None:
    assert not intervals(drawing.draw(rows(4)))
    assert intervals(drawing.draw(rows(5)))


def test_each_seed_is_a_thin_line() -> None:
    axis = drawing.draw(curves_of(["ppo", "dg"], 3)).axes[0]
    thin = [line for line in axis.lines if line.get_linewidth() < 1]
    assert len(thin) == 6 and len(axis.lines) == 8


def test_lines_that_end_together_have_labels_that_can_be_read() -> None:
    names = ["ppo", "dg", "tis", "m2po", "tpo", "decoupled_ppo"]
    figure = drawing.draw(curves_of(names, 5))
    figure.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(text) for text in labels(figure)), key=lambda box: box.y0)
    assert sorted(text.get_text() for text in labels(figure)) == sorted(names) and not figure.legends
    assert all(low.y1 <= high.y0 + 3 for low, high in pairwise(boxes)), "one text lies on another"
    assert max(box.x1 for box in boxes) <= 1400, "a label leaves the picture"


def test_many_lines_come_together_and_then_each_alone_with_the_others_in_grey() -> None:
    whole, *alone = drawing.draw(against(["ppo", "dg", "tis", "m2po"], 5)).axes
    assert len(whole.lines) == 4 and len(alone) == 4
    assert not whole.collections and all(axis.collections for axis in alone), "intervals are in the panels of one line"
    assert [sum(line.get_color() == canvas.FAINT for line in axis.lines) for axis in alone] == [4] * 4
    assert len({axis.get_ylim() for axis in (whole, *alone)}) == 1 == len({axis.get_xlim() for axis in alone})


def test_panels_share_their_axes() -> None:
    plot = curves_of(["ppo", "dg"], 2, ("η = 0", "η = 1", "η = 8", "η = 32"))
    higher = {**plot.panels, "η = 64": {"ppo": [curve([0, 9], [0.0, 3.0])]}}
    axes = drawing.draw(Plot("curves", "Shared", higher, x="train steps", y="reward")).axes
    assert len({(axis.get_xlim(), axis.get_ylim()) for axis in axes}) == 1
    assert [axis.get_title(loc="left") for axis in axes] == list(higher)


def test_the_same_loss_has_the_same_colour_everywhere() -> None:
    one, other = canvas.colours(["mine", "ppo", "dg"]), canvas.colours(["dg", "yours", "ppo", "tpo"])
    assert one["dg"] == other["dg"] and one["ppo"] == other["ppo"]
    assert len(set(other.values())) == 4 and len(set(canvas.colours(map(str, range(7))).values())) == 7


def test_labels_are_spread_no_further_than_they_must() -> None:
    assert canvas.spread([5.0, 1.0, 9.0], 2.0) == pytest.approx([5.0, 1.0, 9.0])
    assert canvas.spread([5.0, 5.0, 5.0], 2.0) == pytest.approx([3.0, 5.0, 7.0])
    assert canvas.spread([0.0, 0.1, 9.9, 10.0], 2.0, 0.0, 10.0) == pytest.approx([0.0, 2.0, 8.0, 10.0])
    assert canvas.spread([], 1.0) == []


def test_titles_are_broken_into_lines_of_equal_length() -> None:
    assert canvas.balanced("one two three four five six", 20) == ["one two three", "four five six"]
    assert canvas.balanced("one; two three four five", 20) == ["one;", "two three four five"]


def test_places_of_numbers_on_an_axis() -> None:
    assert places([0, 1, 2, 32]) == {0: -1.0, 1: 0.0, 2: 1.0, 32: 5.0}, "logarithms, and room for 0"
    assert places([7, 8, 9]) == {7: 7, 8: 8, 9: 9}
    assert places([0.1, 0.99, 0.5], even=True) == {0.1: 0.0, 0.5: 1.0, 0.99: 2.0}
    assert places([-1, 100]) == {-1: -1, 100: 100}


def test_rows_mark_what_is_many_times_the_first() -> None:
    said = words(drawing.draw(rows(5)))
    assert "38 ×" in said and not {"2 ×", "9 ×"} & set(said)
    assert [text.get_text() for text in labels(drawing.draw(rows(5)))] == ["dg", "ppo"]


def test_cells_say_mean_and_interval_and_mark_what_reaches_the_best() -> None:
    panel = {"ppo": [point(0, [0.9] * 5), point(32, [0.1] * 5)], "dg": [point(0, [0.7, 0.8, 0.9, 1.0, 0.95])]}
    figure = drawing.draw(Plot("cells", "Old batches cost most", {"exact": panel, "int8": panel}, x="age"))
    texts = [text for axis in figure.axes for text in axis.texts]
    bold = {text.get_text() for text in texts if text.get_fontweight() == "bold"}
    assert bold >= {".90", ".87", ".10"} and ".90–.90" in {text.get_text() for text in texts}
    worse = Plot("cells", "Worse", {"": {"a": [point(0, [0.9] * 5)], "b": [point(0, [0.2] * 5)]}})
    found = {text.get_text(): text.get_fontweight() for axis in drawing.draw(worse).axes for text in axis.texts}
    assert (found[".90"], found[".20"]) == ("bold", "normal")


def test_numbers_that_are_missing_are_left_out() -> None:
    plot = against(["ppo"], 3)
    gaps = [*plot.panels[""]["ppo"], point(64, [None, math.nan])]
    (axis,) = drawing.draw(Plot("against", "Gaps", {"": {"ppo": gaps}})).axes
    assert len(axis.lines[0].get_xdata()) == 4


def test_a_matrix_is_a_picture_also_where_numbers_are_missing(tmp_path: Path) -> None:
    plot_matrix(tmp_path / "new" / "a.png", "Cosines", {"all": np.array([[1, math.nan], [math.nan, 1]])}, ["a", "b"])
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


# Data


def timelines() -> Plot:
    lines = {"actor-0": [Span("generate", 0.0, 1.23456)], "learner": [Span("train", 1.3, 2.0), Span("take", 0.2, 0.3)]}
    return Plot("timelines", "Async waits less", {"sync": lines, "async 4": lines}, x="seconds")


@pytest.mark.parametrize(
    "plot", [curves_of(["ppo"], 2), against(["ppo"], 5), rows(5), timelines()], ids=lambda plot: plot.kind
)
def test_a_plot_comes_back_from_its_file(plot: Plot, tmp_path: Path) -> None:
    drawing.keep(plot, tmp_path / "kept.png")
    again = read(tmp_path / "kept.json")
    assert again.as_json() == plot.as_json() and again.title == plot.title
    assert plots.main([str(tmp_path), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "kept.png").read_bytes() == (tmp_path / "kept.png").read_bytes()


def test_a_long_curve_is_kept_as_short_as_a_picture_needs() -> None:
    x, y = curve(np.arange(10_000.0), np.arange(10_000.0) / 3)
    assert len(x) == len(y) == CURVE_POINTS and (x[-1], y[-1]) == (9999, 3333)


def test_a_missing_seed_is_counted_after_reading(tmp_path: Path) -> None:
    drawing.keep(Plot("against", "One failed", {"": {"dg": [point(1, [1.0, None, 3.0])]}}), tmp_path / "a.png")
    (found,) = read(tmp_path / "a.json").panels[""]["dg"]
    assert (found.estimate.mean, found.estimate.count, found.estimate.asked) == (2.0, 2, 3)


@pytest.mark.parametrize("text", ["{", "{}", '{"kind": "rows", "panels": {"": {"a": [{"y": 1}]}}}', "[]"])
def test_a_file_that_is_no_plot_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        plots.main([str(tmp_path)])
    assert ended.value.code == 2 and "bad.json: no data of a plot" in capsys.readouterr().err


# What is published


@pytest.mark.parametrize("data", DATA, ids=lambda path: path.stem)
def test_a_published_picture_shows_its_data(data: Path) -> None:
    picture = Image.open(PICTURES[data.stem])
    told = "draw it again: python -m scripts.plots"
    assert picture.info.get(drawing.DIGEST) == drawing.digest(read(data)), told
    assert picture.width == 1400


@pytest.mark.parametrize("data", DATA, ids=lambda path: path.stem)
def test_published_data_are_the_numbers_of_the_results(data: Path) -> None:
    """If single seeds are not known, each mean stands in a table with its interval; profiles are of `results.csv`."""
    if data.stem.endswith("-profiles"):
        return
    text = re.sub(r"(?<=\d),(?=\d)", "", (ROOT / "docs" / "results.md").read_text())
    told = {
        tuple(map(float, triple))
        for triple in re.findall(r"(-?[\d.]\S*) \[([^],]+), ([^],]+)\]", text)
        if _numbers(triple)
    }
    for panel in read(data).panels.values():
        for each in (p for items in panel.values() for p in items if isinstance(p, Point) and not p.values):
            assert (each.estimate.mean, each.estimate.low, each.estimate.high) in told, each


def _numbers(texts: tuple[str, ...]) -> bool:
    return all(re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", text) for text in texts)


def test_every_picture_has_data_or_a_reason() -> None:
    assert {path.stem for path in DATA} | WITHOUT_DATA == set(PICTURES)
    assert not {path.stem for path in DATA} & WITHOUT_DATA


def test_every_picture_stands_where_it_is_spoken_of() -> None:
    shown = {Path(t).name for page in PAGES for t in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())}
    linked = {
        Path(t).name for page in PAGES for t in re.findall(r"\[[^\]]+\]\(((?:docs/)?plots/[^)]+)\)", page.read_text())
    }
    assert shown >= {path.name for path in PICTURES.values()} - {"report-dark.png"}
    assert "report-dark.png" in linked, "the same page in the dark"


def test_the_final_reward_against_staleness_has_a_line_per_loss() -> None:
    plot = read(plots.DATA / "staleness-reward.json")
    assert plot.lines() == ["ppo", "decoupled_ppo", "dg", "tis", "m2po"]
    assert all([p.x for p in line] == [0, 1, 2, 4, 8, 16, 32] for line in plot.panels[""].values())
