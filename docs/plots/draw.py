"""The pictures of the documentation that come from docs/data: `python docs/plots/draw.py [FOLDER]`.

Other pictures in this folder come from commands:
  stragglers.png   python -m scripts.bench.modes --scenario rounds --plot docs/plots/stragglers.png
  report.png       areal-like train quickstart run.name=a; areal-like report runs/a; a browser window of 1400 pixels
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
BLUE, GREEN, RED, ORANGE, PINK, GREY = "#0072B2", "#00694C", "#D55E00", "#B07800", "#B0508F", "#8A8F98"

WITHOUT_KERNELS = {"waits for the host", "outside the CUDA graph", "gaps between kernels"}


def data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE.parent / "data" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def figure(title: str, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """White, with the message above the panels; 6.6 inches wide, so that its text is legible at 500 pixels."""
    made = Figure(figsize=(6.6, height), dpi=150, layout="constrained", facecolor="white")
    axes = list(made.subplots(panels, squeeze=False).flatten())
    made.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=11)
    return made, axes


def staleness() -> Figure:
    found = data("staleness")
    made, (axis,) = figure("Staleness takes most of ppo's learning,\nlittle of decoupled_ppo's and tis's", 4.4)
    places = range(len(found["staleness"]))
    ends = {"ppo": (BLUE, 0.0), "decoupled_ppo": (GREEN, -0.014), "dg": (RED, 0.012), "tis": (ORANGE, 0.016)}
    for loss, (colour, offset) in {**ends, "m2po": (PINK, -0.012)}.items():
        seeds = np.array(found[loss])
        axis.plot(places, seeds, color=colour, linewidth=0.6, alpha=0.4)
        axis.plot(places, seeds.mean(axis=1), color=colour, linewidth=2.5)
        axis.annotate(loss, (len(places) - 0.9, seeds[-1].mean() + offset), color=colour, fontsize=12, va="center")
    axis.set_xticks(places, found["staleness"])
    axis.set_xlim(0, len(places) + 0.45)
    axis.spines["bottom"].set_bounds(0, len(places) - 1)
    axis.set_ylim(0, 0.75)
    axis.set_xlabel("staleness η, in versions of the weights (thin: five seeds)", fontsize=11, loc="left")
    axis.set_ylabel("held-out reward, mean over the run", fontsize=11)
    return made


def smollm2() -> Figure:
    found = data("smollm2")
    made, (axis,) = figure("One-digit sums: the same reward in less than half of TRL's time", 4.0)
    for name, colour, at in (("areal_like", BLUE, (62, 0.9)), ("TRL 1.16", RED, (165, 0.6))):
        for seconds, reward in found[name]:
            axis.plot(seconds, reward, color=colour, linewidth=0.7, alpha=0.55)
        steps = min(len(reward) for _, reward in found[name])
        seconds, reward = np.mean([(s[:steps], r[:steps]) for s, r in found[name]], axis=0)
        axis.plot(seconds, reward, color=colour, linewidth=3)
        axis.annotate(name, at, color=colour, fontsize=13, ha="right" if colour == BLUE else "left")
    axis.set_xlim(0, 260)
    axis.set_ylim(0, 1.03)
    axis.set_xlabel("seconds of training (thin: three seeds)", fontsize=11)
    axis.set_ylabel("reward of each step's batch", fontsize=11)
    return made


def steps() -> Figure:
    found = data("h200_steps")
    made, axes = figure("0.5B on one H200: for a quarter of a train step\nthe card waits for the host", 5.4, panels=2)
    titles = {"train": "train step, 64 samples", "decode": "decode step, 64 sequences"}
    for axis, (kind, title) in zip(axes, titles.items(), strict=True):
        parts = found[kind]
        begins = np.cumsum([0, *parts.values()])
        colours = [GREY if part in WITHOUT_KERNELS else BLUE for part in parts]
        axis.barh(range(len(parts)), list(parts.values()), left=begins[:-1], color=colours, height=0.8)
        for row, (end, ms) in enumerate(zip(begins[1:], parts.values(), strict=True)):
            axis.annotate(f"{ms:g}", (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=10)
        axis.set_yticks(range(len(parts)), list(parts))
        axis.invert_yaxis()
        axis.set_xlim(0, begins[-1] * 1.08)
        axis.set_title(f"{title}: {begins[-1]:,.4g} ms", loc="left", fontsize=11)
    return made


PICTURES = {"staleness.png": staleness, "smollm2.png": smollm2, "h200-steps.png": steps}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, draw in PICTURES.items():
        draw().savefig(folder / name)
