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
from areal_like.config.run_config import Config, ConfigError, load_resolved, ranks_of
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG

from .costs import Answers, Costs, Engine, LearnerCost, Verifier, WeightsCost, processes

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
    engine, engine_error = _engine(config, rows, counted)
    learner, learner_error = _learner(config, rows)
    errors = f"errors of the fits: decode step {engine_error:.0%}, train step {learner_error:.0%}"
    trace = [lengths for each in counted for lengths in each["lengths"]]
    fetch = _mean(rows, "rollout/update_fetch_seconds") + _mean(rows, "rollout/update_replica_seconds")
    return Costs(
        engine,
        Answers(trace=trace, right=min(1.0, max(0.0, _mean(rows, "reward/mean")))),
        learner,
        WeightsCost(_mean(rows, "publish/encode_seconds"), fetch),
        processes(),
        Verifier(_mean(rows, "rewards/seconds_p50")),
        source=f"{len(rows)} train steps of {run.name} ({errors})",
    )


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(values)) if values else 0.0


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


def _engine(config: Config, rows: Sequence[dict[str, Any]], counted: Sequence[dict[str, Any]]) -> tuple[Engine, float]:
    (base, per_sequence, per_token), error = fit(np.sum([each["steps"] for each in counted], axis=0))
    tokens, seconds = np.sum([each["prefill"] for each in counted], axis=0).tolist()
    knobs = with_defaults("engine", config.engine)
    pause = _mean(rows, "rollout/update_pause_seconds")
    prefill, recompute = seconds / max(1.0, tokens), knobs["kv_policy"] == "recompute"
    return Engine(base, per_sequence, per_token, prefill, pause, recompute, knobs["slots"] or 64), error


def _learner(config: Config, rows: Sequence[dict[str, Any]]) -> tuple[LearnerCost, float]:
    """`rows`: of all train steps. All time of the learner that is not spent waiting or publishing is a step's."""
    tokens, rate, idle = (
        np.array([row[name] for row in rows]) for name in ("tokens", "train/tokens_per_second", "train/idle_share")
    )
    publish = np.array([row.get("publish/seconds", 0.0) for row in rows])
    busy = np.cumsum(tokens) / rate * (1.0 - idle)  # seconds since the first batch
    seconds = (np.diff(busy) - publish[1:])[WARMUP_STEPS:]
    columns = np.stack([np.ones(len(seconds)), tokens[WARMUP_STEPS + 1 :], seconds])
    (base, per_token), error = fit(columns @ columns.T)
    return LearnerCost(base, 0.0, per_token, _mean(rows, "publish/seconds"), gpus=ranks_of(config)), error
