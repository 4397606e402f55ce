"""Measures of a finished run: one number per measure, and a curve, from `summary.json` and `metrics.jsonl`.

docs/ablations.md shows how a study writes them. `*_to` is of the first evaluation with that held-out reward, `at_*` of
the last one by then. Tuning prefers low values with `better: lower`, the default of `*_to`. A run that never reaches a
target, or has no such key, has no number.
"""

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from areal_like.config.run_config import Config, ConfigError
from areal_like.run.metrics import MetricsFollower

AXES = ("steps", "samples", "seconds")
SOURCES = ("summary", "metric", *(f"{axis}_to" for axis in AXES), *(f"at_{axis}" for axis in AXES))


class Measure(NamedTuple):
    """`source`: one of `SOURCES`; `key`: of the summary or the metrics, the target of `*_to`, the place of `at_*`."""

    source: str
    key: Any
    higher_is_better: bool


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`y`: a key of metrics.jsonl; eval/reward is that of the evaluations."""

    y: str = "eval/reward"
    x: Literal["samples", "steps", "seconds"] = "samples"


def read_measure(name: str, spec: Any) -> Measure:
    """Raises ConfigError."""
    key = f"measure.{name}"
    sources = [source for source in SOURCES if isinstance(spec, dict) and source in spec]
    if len(sources) != 1 or set(spec) - {sources[0], "better"}:
        raise ConfigError(f"{key}: got {spec!r}, expected one of {', '.join(SOURCES)}, and perhaps better", key)
    source = sources[0]
    better = spec.get("better", "lower" if source.endswith("_to") else "higher")
    if better not in ("higher", "lower"):
        raise ConfigError(f"{key}.better: got {better!r}, expected higher or lower", key)
    if source not in ("summary", "metric") and not isinstance(spec[source], int | float):
        raise ConfigError(f"{key}.{source}: got {spec[source]!r}, expected a number", key)
    return Measure(source, spec[source], better == "higher")


class Outcome:
    """A finished run: its summary, and its metrics, which are read on demand."""

    def __init__(self, folder: Path, config: Config):
        self.folder, self.config = folder, config
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return MetricsFollower(self.folder / "metrics.jsonl").new_rows()

    def measure(self, measure: Measure) -> float | None:
        if measure.source == "summary":
            return _finite(self.summary.get(measure.key))
        if measure.source == "metric":
            values = [number for row in self.rows if (number := _finite(row.get(measure.key))) is not None]
            return sum(values) / len(values) if values else None
        axis: Any = measure.source.removeprefix("at_").removesuffix("_to")  # one of `AXES`
        points = list(zip(*self.curve(Curve(x=axis)), strict=True))
        if measure.source.startswith("at_"):
            return next((y for x, y in reversed(points) if x <= measure.key), None)
        return next((x for x, y in points if y >= measure.key), None)

    def curve(self, curve: Curve) -> tuple[list[float], list[float]]:
        """(x, y) in the order of x. An evaluation counts at the step that made its weights."""
        rows, key, config, scale = self.rows, curve.y, self.config, 1
        if key == "eval/reward":
            interval, steps, key = config.weight_sync_interval, self.summary["steps"], "reward"
            rows = [{**row, "step": min(row["version"] * interval, steps)} for row in self.summary["evaluations"]]
        if curve.x == "samples":
            scale = config.groups_per_batch * config.sizing["group_size"]
        place = "seconds" if curve.x == "seconds" else "step"
        known = sorted((float(scale * row[place]), y) for row in rows if (y := _finite(row.get(key))) is not None)
        return [x for x, _ in known], [y for _, y in known]


def _finite(value: Any) -> float | None:
    """A number as it is, a bool as 0 or 1; None for everything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
