"""Costs fitted to a run, from its metrics and the sums of its actors (`actors.engines.step_costs`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from actors.engines.step_costs import COSTS
from areal_like.config.registry import with_defaults
from areal_like.config.run_config import ConfigError, load_resolved, ranks_of
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG

from .costs import MEASURED, Answers, Costs, Engine, LearnerCost, Verifier, WeightsCost

LEAST_STEPS, WARMUP_STEPS = 50, 2
"""Train steps that a fit needs: ten of them predicted a mean staleness that was off by 75 %. The first ones warm up."""


def written(costs: Costs) -> str:
    """As a file for `--costs`."""
    return yaml.safe_dump(msgspec.to_builtins(costs), sort_keys=False, default_flow_style=None, width=120)


def fitted(run: Path) -> Costs:
    """Costs of a run; `source` has the errors of the fits. Raises ConfigError."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: got no {CONFIG}, expected a run's folder")
    config, rows = load_resolved(run / CONFIG), list(MetricsFollower(run / "metrics.jsonl").new_rows())
    if len(rows) < LEAST_STEPS:
        raise ConfigError(f"{run}: got {len(rows)} train steps, expected at least {LEAST_STEPS}: set run.steps")
    counted = [json.loads(path.read_text()) for path in sorted((run / COSTS).glob("*.json"))]
    if not counted:
        raise ConfigError(f"{run}: got no costs of decode steps, expected engine=torch; write a file by hand")

    def mean(name: str) -> float:
        values = [row[name] for row in rows if row.get(name) is not None]
        return float(np.mean(values)) if values else 0.0

    (base, per_sequence, per_token), decode_error = fit(np.sum([each["steps"] for each in counted], axis=0))
    tokens, seconds = np.sum([each["prefill"] for each in counted], axis=0).tolist()
    (step, per_trained), train_error = fit(_train_steps(rows))
    fetch = mean("rollout/update_fetch_seconds") + mean("rollout/update_replica_seconds")
    prefill, pause = seconds / max(1.0, tokens), mean("rollout/update_pause_seconds")
    trace = [lengths for each in counted for lengths in each["lengths"]]
    knobs = with_defaults("engine", config.engine)
    return Costs(
        Engine(base, per_sequence, per_token, prefill, pause, knobs["kv_policy"] == "recompute", knobs["slots"] or 64),
        Answers(trace=trace, right=float(np.clip(mean("reward/mean"), 0, 1))),
        LearnerCost(step, 0.0, per_trained, mean("publish/seconds"), gpus=ranks_of(config)),
        WeightsCost(mean("publish/encode_seconds"), fetch),
        MEASURED,
        Verifier(mean("rewards/seconds_p50")),
        source=f"{len(rows)} train steps of {run.name} (errors of the fits: decode step {decode_error:.0%}, "
        f"train step {train_error:.0%})",
    )


def _train_steps(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Sums of products of 1, trained tokens, and seconds per train step: all time without waiting and publishing."""
    names = ("tokens", "train/tokens_per_second", "train/idle_share")
    tokens, rate, idle = (np.array([row[name] for row in rows]) for name in names)
    publish = np.array([row.get("publish/seconds", 0.0) for row in rows])
    busy = np.cumsum(tokens) / rate * (1.0 - idle)  # seconds since the first batch
    seconds = (np.diff(busy) - publish[1:])[WARMUP_STEPS:]
    columns = np.stack([np.ones(len(seconds)), tokens[WARMUP_STEPS + 1 :], seconds])
    return columns @ columns.T


def fit(products: np.ndarray) -> tuple[list[float], float]:
    """Least squares without negative coefficients [n], and the root mean square of its error over that of the values,
    from the sums of products [n + 1, n + 1] of the columns and, last, the values."""
    count, total = len(products) - 1, products[-1, -1]
    kept, found = list(range(count)), np.zeros(count)
    while kept:
        solved = np.linalg.lstsq(products[np.ix_(kept, kept)], products[kept, -1], rcond=1e-12)[0]
        if (solved >= 0).all():
            found[kept] = solved
            break
        kept.pop(int(np.argmin(solved)))
    missed = total - 2 * found @ products[:-1, -1] + found @ products[:-1, :-1] @ found
    return found.tolist(), math.sqrt(max(0.0, missed) / total)
