"""What a plan comes to, for people and as figures, and the config that it recommends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from areal_like.config.registry import knobs
from areal_like.config.run_config import Config

from ..console.output import table
from . import results
from .planning import Choice, Plan
from .run import Outcome
from .traffic import UNKNOWN, Traffic, amount_of

COLUMNS = ("", "GPUs", "setting", "samples/s", "age", "p95", "max", "idle")
MOST_AGES = 9
"""Shares of ages that are printed; --json has all."""


def figures(made: Plan, config: Config, traffic: Traffic | None, price: float | None) -> dict[str, Any]:
    """`config`: the one that was planned."""
    choice, interval = made.choice, made.choice.interval or config.weight_sync_interval
    found: dict[str, Any] = {
        "actors": choice.actors,
        "learner_gpus": choice.learner,
        "gpus": choice.gpus,
        "mode": choice.mode,
        "samples_per_second": made.rate,
        "tokens_per_second": made.tokens_per_second,
        "closed_form": made.predicted.throughput,
        "closed_form_staleness": made.predicted.staleness if math.isfinite(made.predicted.staleness) else None,
        "staleness_mean": made.outcome.staleness_mean,
        "staleness_p50": made.staleness_at(0.5),
        "staleness_p95": made.staleness_at(0.95),
        "staleness_max": made.staleness_at(1.0),
        "staleness_shares": {str(age): part for age, part in made.staleness_shares.items()},
        "actor_idle_share": made.outcome.actor_idle,
        "learner_idle_share": made.outcome.learner_idle,
        **(traffic.figures(choice.actors, interval) if traffic else UNKNOWN),
        "gpu_hours_per_million_samples": made.gpu_hours,
        "binds": made.binds,
    }
    return found | ({} if price is None else {"cost_per_million_samples": made.gpu_hours * price})


def rows(title: str, plans: Sequence[Plan]) -> Table:
    """A row per plan, in 80 columns."""
    made = table(title, *COLUMNS)
    setting = made.columns[COLUMNS.index("setting")]
    setting.no_wrap, setting.justify = False, "left"
    for number, plan in enumerate(plans, 1):
        outcome = plan.outcome
        made.add_row(
            str(number),
            plan.choice.split,
            plan.choice.mode,
            rate(plan.rate),
            f"{outcome.staleness_mean:.2f}",
            str(plan.staleness_at(0.95)),
            str(plan.staleness_at(1.0)),
            f"{outcome.actor_idle:.0%}, {outcome.learner_idle:.0%}",
        )
    return made


def details(number: int, made: Plan, found: dict[str, Any]) -> Iterator[str]:
    """Lines below the table. `found`: the plan's `figures`."""
    yield f"{number}  {made.choice.split}, {made.choice.mode}"
    yield f"   what holds it up: {made.binds}"
    yield f"   age: {', '.join(shares(made.staleness_shares))}"
    expected = made.predicted
    yield f"   closed form: {rate(expected.throughput)} samples/s, mean age {expected.staleness:.2g}"
    price = f", cost {found['cost_per_million_samples']:,.2f}" if "cost_per_million_samples" in found else ""
    yield f"   a million samples: {made.gpu_hours:,.2f} GPU-hours{price}"
    if found["weight_bytes_per_version"] is not None:
        version, step = (amount_of(found[f"weight_bytes_per_{each}"]) for each in ("version", "step"))
        yield f"   weights to all actors: {version} per version, {step} per train step"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def shares(of: dict[int, float]) -> Iterator[str]:
    """Age → share, in words; of many ages the last are one."""
    shown = sorted(of)[: MOST_AGES if len(of) <= MOST_AGES else MOST_AGES - 1]
    yield from (f"{age}: {of[age]:.0%}" for age in shown)
    if len(shown) < len(of):
        yield f"more: {sum(part for age, part in of.items() if age > shown[-1]):.0%}"


def ranges(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
    """Figure → its least and its largest value."""
    all_figures = [results.figures(each) for each in outcomes]
    names = [name for name in all_figures[0] if name != "seconds"]
    return {name: (min(each[name] for each in all_figures), max(each[name] for each in all_figures)) for name in names}


def told(found: dict[str, tuple[float, float]]) -> str:
    pairs = {name: [results.shown(name, value) for value in both] for name, both in found.items()}
    return ", ".join(f"{name.replace('_', ' ')} {low} to {high}" for name, (low, high) in pairs.items())


def recommended(base: str, overrides: Sequence[str], choice: Choice, config: Config) -> str:
    """A config that extends the one that was planned."""
    from omegaconf import OmegaConf

    name = str(Path(base).resolve()) if Path(base).suffix else base
    ranks = [f"learner.ranks={choice.learner}"] if "ranks" in knobs("learner", config.learner.name) else []
    keys = OmegaConf.from_dotlist([*overrides, *choice.overrides(), *ranks])
    return f"extends: {name}\n{OmegaConf.to_yaml(keys)}"
