"""Measures of a finished run: one number per measure, and a curve. Reads `summary.json` and `metrics.jsonl`.

    {summary: reward_after}                         a key of the summary
    {metric: loss/clip_share, take: mean}           a key of metrics.jsonl: its mean | max | min | last over the run
    {steps_to: 0.9}, {samples_to: 0.9}, {seconds_to: 0.9}      to the first evaluation with this held-out reward
    {at_steps: 100}, {at_samples: 12800}, {at_seconds: 10}     held-out reward of the last evaluation by then, so that
                                                               runs are compared at equal samples or equal time
    {final: 512}                                    held-out reward of the final model over so many prompts, asked anew:
                                                    of the learner's own weights. With `engine.inject_mismatch` actors
                                                    have others, and evaluations during the run are of those

Runs of a supervised loss have no rewards: measure `{summary: loss_after, better: lower}`; their curve is `eval/loss`.

For its plot a measure, and the curve, may have `label` (of the axis, with the unit) and `title` (the finding).

With `better: lower` tuning prefers low values (the default of `*_to`). A run that never reaches a target, or has no
such key, has no number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.config.registry import nearest
from areal_like.config.run_config import Config, ConfigError
from areal_like.config.supervision import is_supervised
from areal_like.run.metrics import MetricsFollower

from . import final

TAKES: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}
AXES = ("steps", "samples", "seconds")
HELDOUT = {"eval/reward": "held-out reward", "eval/loss": "held-out loss, in nats"}
"""Keys of curves that mean the evaluations → their labels."""
SOURCES = ("summary", "metric", "final", *(f"{axis}_to" for axis in AXES), *(f"at_{axis}" for axis in AXES))


@dataclass(frozen=True)
class Measure:
    """`source` says where `key` (of `*_to` the target, of `at_*` the place) is looked up; `take` reduces a metric."""

    name: str
    source: str
    key: Any
    take: str
    higher_is_better: bool
    label: str = ""
    title: str = ""

    @property
    def of_rewards(self) -> bool:
        """Is it of rewards during a run?"""
        known = {("summary", "reward_before"), ("summary", "reward_after"), ("metric", "eval/reward")}
        return self.source.startswith("at_") or self.source.endswith("_to") or (self.source, self.key) in known


@dataclass(frozen=True)
class Curve:
    """`y` is a key of metrics.jsonl; those of `HELDOUT` mean the evaluations. `x` is one of `AXES`."""

    y: str
    x: str
    label: str = ""
    title: str = ""


def read_measure(name: str, spec: Any) -> Measure:
    """Raises ConfigError."""
    sources = [key for key in SOURCES if isinstance(spec, dict) and key in spec]
    if len(sources) != 1:
        raise ConfigError(f"measure.{name}: expected one of {', '.join(SOURCES)}; got {spec!r}")
    source = sources[0]
    take, better = spec.get("take", "mean"), spec.get("better", "lower" if source.endswith("_to") else "higher")
    unknown = set(spec) - {source, "better", "label", "title", *(["take"] if source == "metric" else [])}
    if unknown or take not in TAKES or better not in ("higher", "lower"):
        raise ConfigError(f"measure.{name}: {spec!r}: take is {' | '.join(TAKES)}, better is higher | lower")
    if source == "final" and not (type(spec[source]) is int and spec[source] > 0):
        raise ConfigError(f"measure.{name}.final: expected a number of prompts, got {spec[source]!r}")
    if source not in ("summary", "metric") and not isinstance(spec[source], int | float):
        wanted = "a reward" if source.endswith("_to") else f"a number of {source.removeprefix('at_')}"
        raise ConfigError(f"measure.{name}.{source}: expected {wanted}, got {spec[source]!r}")
    return Measure(name, source, spec[source], take, better == "higher", spec.get("label", name), spec.get("title", ""))


def read_curve(spec: Any) -> Curve:
    """Raises ConfigError."""
    known = {"x", "y", "label", "title"}
    if not isinstance(spec, dict) or set(spec) - known or spec.get("x", "samples") not in AXES:
        raise ConfigError(
            f"curve: expected y (a key of metrics.jsonl), x ({' | '.join(AXES)}), label and title; got {spec!r}"
        )
    y = str(spec.get("y", "eval/reward"))
    label = str(spec.get("label", HELDOUT.get(y, y)))
    return Curve(y, spec.get("x", "samples"), label, str(spec.get("title", "")))


class Outcome:
    """A finished run: its summary, and its metrics, which are read on demand."""

    def __init__(self, folder: Path, config: Config):
        self.folder, self.config = folder, config
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        self._rows: list[dict[str, Any]] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        if self._rows is None:
            self._rows = MetricsFollower(self.folder / "metrics.jsonl").new_rows()
        return self._rows

    def measure(self, measure: Measure) -> float | None:
        if measure.source == "summary":
            return _finite(self.summary.get(measure.key))
        if measure.source == "final":
            return final.kept(self.folder, measure.key)  # `scripts.ablate` asks after each stage
        if measure.source == "metric":
            values = [number for row in self.rows if (number := _finite(row.get(measure.key))) is not None]
            return TAKES[measure.take](values) if values else None
        if measure.source.startswith("at_"):
            axis = measure.source.removeprefix("at_")
            _, rewards = self.curve(Curve("eval/reward", axis), until=measure.key)
            return rewards[-1] if rewards else None
        reached = (result for result in self.summary["evaluations"] if result.get("reward", -math.inf) >= measure.key)
        first = next(reached, None)
        return None if first is None else self._place(measure.source.removesuffix("_to"), self._of_evaluation(first))

    def unknown(self, measures: Iterable[Measure], curve: Curve) -> dict[str, str]:
        """Name of what a study asks for → what to say of its key, which this run has nowhere. It may be misspelt."""
        asked = [(f"measure.{each.name}", each.source, each.key) for each in measures]
        asked += [] if curve.y in HELDOUT else [("curve.y", "metric", curve.y)]
        in_rows = set[str]().union(*self.rows) if "metric" in {source for _, source, _ in asked} else set[str]()
        files = {"summary": ("summary.json", set(self.summary)), "metric": ("metrics.jsonl", in_rows)}
        found = [(name, key, *files[source]) for name, source, key in asked if source in files]
        return {
            name: f"{name}: {self.folder / file} has no {key!r}.{nearest(str(key), known)}"
            for name, key, file, known in found
            if key not in known
        }

    def curve(self, curve: Curve, until: float = math.inf) -> tuple[list[float], list[float]]:
        """(x, y) in the order of x, up to there. An evaluation counts at the step that made its weights."""
        points: Iterable[tuple[dict[str, Any], float | None]]
        if curve.y in HELDOUT:
            key, evaluations = curve.y.removeprefix("eval/"), self.summary["evaluations"]
            points = ((self._of_evaluation(result), result.get(key)) for result in evaluations)
        else:
            points = ((row, _finite(row.get(curve.y))) for row in self.rows)
        known = sorted((self._place(curve.x, place), y) for place, y in points if y is not None)
        known = [(x, y) for x, y in known if x <= until]
        return [x for x, _ in known], [y for _, y in known]

    def _of_evaluation(self, result: dict[str, Any]) -> dict[str, Any]:
        steps = min(result["version"] * self.config.weight_sync_interval, self.summary["steps"])
        return {"step": steps, "seconds": result["seconds"]}

    def _place(self, axis: str, row: dict[str, Any]) -> float:
        """A row's position on an axis: train steps, samples trained by then, or seconds since the first lease."""
        if axis == "seconds":
            return float(row["seconds"])
        if axis == "steps":
            return float(row["step"])
        size = 1 if is_supervised(self.config) else self.config.sizing["group_size"]
        return float(row["step"] * self.config.groups_per_batch * size)


def _finite(value: Any) -> float | None:
    """A number as it is, a bool as 0 or 1; None for everything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
