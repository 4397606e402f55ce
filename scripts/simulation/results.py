"""Figures of a simulated run, and the same of a real one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from areal_like.config.run_config import ConfigError
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import summary_of

from .run import WARMUP_STEPS, Outcome, age_at

SHARES = ("actor_idle_share", "learner_idle_share")


def figures(outcome: Outcome) -> dict[str, float]:
    """What is compared with a real run. Rates leave out the first steps."""
    return {
        "samples_per_second": outcome.samples_per_second,
        "staleness_mean": outcome.staleness_mean,
        "staleness_p95": float(age_at(outcome.staleness, 0.95)),
        "actor_idle_share": outcome.actor_idle,
        "learner_idle_share": outcome.learner_idle,
        "seconds": outcome.seconds,
    }


def of_run(run: Path) -> dict[str, float]:
    """The same figures of a run that has ended. Raises ConfigError."""
    found, rows = summary_of(run), list(MetricsFollower(run / "metrics.jsonl").new_rows())
    if found is None or not rows:
        raise ConfigError(f"{run} is no folder of a run that has ended")
    first = min(WARMUP_STEPS, len(rows) - 1)
    seconds = rows[-1]["seconds"] - (rows[first - 1]["seconds"] if first else 0.0)
    ages = Counter[int]()
    for row in rows:
        ages.update({int(age): count for age, count in row["staleness/histogram"].items()})
    return {
        "samples_per_second": ages.total() / len(rows) * (len(rows) - first) / max(1e-9, seconds),
        "staleness_mean": found["staleness_mean"],
        "staleness_p95": float(age_at(ages, 0.95)),
        "actor_idle_share": found["actor_idle_share"],
        "learner_idle_share": found["learner_idle_share"],
        "seconds": found["seconds"],
    }


def shown(name: str, value: float) -> str:
    if name in SHARES:
        return f"{value:.1%}"
    return f"{value:.0f}" if name == "staleness_p95" else f"{value:.4g}"


def difference(name: str, simulated: float, measured: float) -> float:
    """The error of a prediction: of shares and of ages below 1 the difference itself, else relative to what was
    measured."""
    if name in SHARES or (name.startswith("staleness") and measured < 1.0):
        return simulated - measured
    return simulated / measured - 1.0 if measured else simulated


def error(name: str, simulated: float, measured: float) -> str:
    return f"{difference(name, simulated, measured):+.1%}"


def summary(outcome: Outcome) -> dict[str, Any]:
    """As the learner writes it (`learners.main`), as far as a simulated run has it."""
    report = outcome.report
    evaluations = report["evaluations"]
    return {
        "simulated": True,
        "reward_before": evaluations[0]["reward"] if evaluations else None,
        "reward_after": evaluations[-1]["reward"] if evaluations else None,
        "steps": report["steps"],
        "version": report["version"],
        "seconds": outcome.seconds,
        "seconds_to_target": None,
        "stopped_because": outcome.reason,
        "staleness_mean": outcome.staleness_mean,
        "staleness_max": report["staleness_max"],
        "staleness_bound": report["staleness_bound"],
        "since_step": 0,
        "tokens_per_second": outcome.rolled_out / max(1e-9, outcome.seconds),
        "trained_tokens_per_second": outcome.tokens / max(1e-9, outcome.seconds),
        "actor_idle_share": outcome.actor_idle,
        "learner_idle_share": outcome.learner_idle,
        "ledger": report["ledger"],
        "faults": {},
        "evaluations": evaluations,
    }
