"""Costs fitted to a run that was made, from its metrics and from what its actors measured (`actors.step_costs`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from actors.engines import step_costs
from areal_like.config.registry import settled
from areal_like.config.run_config import Config, ConfigError, load_resolved, ranks_of
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG

from .costs import Answers, Costs, Engine, LearnerCost, Verifier, WeightsCost, of_timed, processes

LEAST_STEPS, WARMUP_STEPS = 50, 2
"""Train steps that a fit needs: ten of them predicted a mean staleness that was off by 75 %. The first ones warm up."""
LEAST_GROUPS = 8
"""Recorded groups, without which log-normal lengths are fitted to the metrics."""


def written(costs: Costs) -> str:
    """As a file for `--costs`."""
    return yaml.safe_dump(msgspec.to_builtins(costs), sort_keys=False, default_flow_style=None, width=120)


def fitted(run: Path) -> Costs:
    """Costs of a run; `source` has the errors of the fits. Raises ConfigError, ValueError."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: got no {CONFIG}, expected a run's folder")
    config, rows = load_resolved(run / CONFIG), list(MetricsFollower(run / "metrics.jsonl").new_rows())
    if len(rows) < LEAST_STEPS:
        raise ConfigError(f"{run}: got {len(rows)} train steps, expected at least {LEAST_STEPS}: set run.steps")
    after, rows, counted = _after(rows), rows[WARMUP_STEPS:], step_costs.read(run)
    found = Costs(answers=_answers(rows, counted), sample=processes())
    if config.engine.name == "timed":
        found.engine, words = of_timed(config).engine, []
    else:
        found.engine, words = _engine(config, rows, counted)
    found.learner, error = _learner(config, rows)
    found.learner.after = after
    fetch = _mean(rows, "rollout/update_fetch_seconds") + _mean(rows, "rollout/update_replica_seconds")
    found.weights = WeightsCost(_mean(rows, "publish/encode_seconds"), fetch)
    found.verifier = Verifier(_mean(rows, "rewards/seconds_p50"))
    words.append(f"train step {error:.0%}")
    found.source = f"{len(rows)} train steps of {run.name} (errors of the fits: {', '.join(words)})"
    return found


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


def _engine(config: Config, rows: Sequence[dict[str, Any]], counted: step_costs.StepCosts) -> tuple[Engine, list[str]]:
    """Raises ConfigError for an engine that counts no decode steps."""
    if not counted.steps.any():
        raise ConfigError(f"engine: got {config.engine.name}, which measures no decode steps; write a file for --costs")
    (base, per_sequence, per_token), error = fit(counted.steps)
    tokens, seconds = counted.prefill.tolist()
    knobs = settled("engine", config.engine)
    engine = Engine(
        base,
        per_sequence,
        per_token,
        seconds / max(1.0, tokens),
        _mean(rows, "rollout/update_pause_seconds"),
        knobs.get("kv_policy", "recompute") == "recompute",
        knobs["slots"] or 64,
        knobs.get("interruptible", True),
    )
    return engine, [f"decode step {error:.0%}"]


def _learner(config: Config, rows: Sequence[dict[str, Any]]) -> tuple[LearnerCost, float]:
    tokens, seconds = (np.array([row[name] for row in rows], float) for name in ("tokens", "train/step_seconds"))
    columns = np.stack([np.ones(len(rows)), tokens, seconds])
    (base, per_token), error = fit(columns @ columns.T)
    return LearnerCost(base, 0.0, per_token, _mean(rows, "publish/seconds"), gpus=ranks_of(config)), error


def _after(rows: Sequence[dict[str, Any]]) -> float:
    """Seconds per step in which the learner neither trains, publishes nor waits. `rows`: of all steps."""
    trained = np.cumsum([row["tokens"] for row in rows])
    elapsed = trained / np.array([row["train/tokens_per_second"] for row in rows])
    busy = (elapsed * (1.0 - np.array([row["train/idle_share"] for row in rows])))[WARMUP_STEPS:]
    named = ("train/step_seconds", "publish/seconds", "stream/seconds")
    known = np.mean([sum(row.get(name, 0.0) for name in named) for row in rows[WARMUP_STEPS + 1 :]])
    return max(0.0, float((busy[-1] - busy[0]) / (len(busy) - 1) - known))


def _answers(rows: Sequence[dict[str, Any]], counted: step_costs.StepCosts) -> Answers:
    """Recorded lengths; else log-normals, with a third of the variance within prompts."""
    right = float(np.clip(_mean(rows, "reward/mean"), 0.0, 1.0))
    if len(counted.lengths) >= LEAST_GROUPS:
        return Answers(trace=list(counted.lengths), right=right)
    median, high = _mean(rows, "response_length/p50"), _mean(rows, "response_length/p95")
    spread = math.log(max(1.0, high / median)) / 1.645
    return Answers(median, spread * math.sqrt(2 / 3), spread * math.sqrt(1 / 3), right=right)
