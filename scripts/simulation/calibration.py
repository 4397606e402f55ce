"""Costs of a run that was made: fitted to what its actors and learner measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from actors.engines import step_costs
from areal_like.config.registry import build, settled
from areal_like.config.run_config import Config, ConfigError, learner_threads, load_resolved, ranks_of
from areal_like.run import samples, spans
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG, summary_of

from .costs import Answers, Costs, Engine, LearnerCost, Sample, Verifier, WeightsCost, of_timed

SKIPPED_STEPS = 2
"""The first train steps warm up, and are left out."""
LEAST_GROUPS = 8
PROMPTS = 64
"""Rows of the task that tell how long a prompt is."""
LEAST_BLOCKS = 30
"""Of steps during train steps, and of others, to compare."""
SCATTERED = 0.1
"""A larger residual of train steps is told of."""
LEAST_SPREAD = 0.05
"""Batches whose tokens differ less say nothing of the cost of a token."""


@dataclass
class Calibrated:
    """`residuals`: name → relative error of the fit, root mean square. `notes`: what could not be measured."""

    costs: Costs
    residuals: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def written(found: Calibrated, short: bool = False) -> str:
    """As a file for `--costs`; `short`, for the screen: without the lengths of all answers."""
    lines = [f"# {name}: the fit is off by {error:.1%} (root mean square)" for name, error in found.residuals.items()]
    lines += [f"# {note}" for note in found.notes]
    costs = msgspec.to_builtins(found.costs)
    if short and found.costs.answers.trace:
        costs["answers"]["trace"] = f"lengths of {len(found.costs.answers.trace)} groups"
    return "\n".join([*lines, yaml.safe_dump(costs, sort_keys=False, default_flow_style=None, width=120)])


def calibrate(run: Path, last: int | None = None) -> Calibrated:
    """From the first `last` train steps of a run (None: all). Raises ConfigError."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: no run folder ({CONFIG} is missing)")
    if (summary_of(run) or {}).get("simulated"):
        raise ConfigError(f"{run} was simulated: calibrate on a run that was made")
    config = load_resolved(run / CONFIG)
    rows = [row for row in MetricsFollower(run / "metrics.jsonl").new_rows() if row["step"] <= (last or math.inf)]
    if len(rows) <= SKIPPED_STEPS:
        raise ConfigError(f"{run} has {len(rows)} train steps: calibration needs more than {SKIPPED_STEPS}")
    before, rows = sum(row["tokens"] for row in rows[:SKIPPED_STEPS]), rows[SKIPPED_STEPS:]
    found = Calibrated(Costs(source=f"{len(rows)} train steps of {run.name}"))
    found.costs.engine = _engine(run, config, rows, found)
    found.costs.learner = _learner(config, rows, found, before)
    found.costs.weights = _weights(rows)
    _samples(run, found)
    found.costs.answers = _answers(run, rows, last, found)
    if config.task.get("length_trace"):  # a prompt's own limit does not count the filler
        found.costs.answers.most = int(max(row["response_length/max"] for row in rows))
    if seconds := [row["rewards/seconds_p50"] for row in rows if row.get("rewards/seconds_p50")]:
        found.costs.verifier = Verifier(float(np.median(seconds)))
        _scatter(found, "verifier", seconds)
    return found


def nonnegative(products: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients (those that would be are left out), from the sums of products of the
    columns [n, n] and of columns and values [n]."""
    kept = list(range(len(values)))
    while True:
        solved = np.linalg.lstsq(products[np.ix_(kept, kept)], values[kept], rcond=1e-12)[0]
        if (solved >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(np.argmin(solved)))
    found = np.zeros(len(values))
    found[kept] = np.maximum(solved, 0.0)
    return found


def _engine(run: Path, config: Config, rows: Sequence[dict[str, Any]], found: Calibrated) -> Engine:
    if config.engine.name == "timed":
        return of_timed(config).engine
    counted = step_costs.read(run)
    if not counted.decode:
        found.notes.append(f"engine={config.engine.name} does not say what its decode steps cost: defaults")
        return Engine()
    classes = list(counted.decode.values())
    firsts = np.array([each[0] for each in classes])  # steps, sequences, tokens, seconds
    # Each class counts by its seconds, and an error by its share of the class's mean step.
    whole = sum(each * steps / seconds for each, (steps, _, _, seconds) in zip(classes, firsts, strict=True))
    fit = nonnegative(*_halves(whole + _alone(counted)))
    errors = firsts[:, :3] @ fit / firsts[:, 3] - 1.0
    if len(classes) == 1 and counted.largest not in counted.alone:
        mean = firsts[0, 1] / firsts[0, 0]
        found.notes.append(
            f"all decode steps had about {mean:.0f} sequences: what fewer cost is a guess (mode=sync has all)"
        )
    found.residuals["decode step"] = math.sqrt(float((firsts[:, 3] * errors**2).sum() / firsts[:, 3].sum()))
    level, beside = _beside(run, counted, fit) if len(counted.cores) == 1 else (1.0, 1.0)
    prefill, fresh = _prefill(run, config, counted)
    if counted.prefills[0] and counted.prefill[1]:
        found.residuals["prefill"] = _prefill_residual(counted)
    knobs = settled("engine", config.engine)
    apply = [row["rollout/update_pause_seconds"] for row in rows if row.get("rollout/update_pause_seconds")]
    return Engine(
        level * float(fit[0]),
        level * float(fit[1]),
        level * float(fit[2]),
        level * prefill,
        float(apply[-1]) if apply else 0.0,
        knobs.get("kv_policy", "recompute") == "recompute",
        knobs["slots"] or 64,
        knobs.get("kv_tokens"),
        knobs.get("interruptible", True),
        min(1.0, counted.busy / max(1e-9, counted.prefill[1] + counted.again[1] + float(firsts[:, 3].sum()))),
        fresh,
        beside,
    )


def _scatter(found: Calibrated, name: str, values: Sequence[float]) -> None:
    """How far the rows' values lie from what is taken for all of them, their median."""
    if values and (middle := float(np.median(values))):
        found.residuals[name] = float(np.sqrt(np.mean((np.array(values) / middle - 1.0) ** 2)))


def _halves(products: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `nonnegative` takes them."""
    return products[:3, :3], products[:3, 3]


def _alone(counted: step_costs.StepCosts) -> np.ndarray:
    """Products of the steps that were measured alone, of sizes that the run did not have. They say how steps compare:
    their seconds are those of the run, by the size that both have. Together they weigh as much as the run's."""
    total = sum(sums[0, 3] for sums in counted.decode.values())
    found = np.zeros((step_costs.VALUES, step_costs.VALUES))
    if counted.largest not in counted.alone:
        return found
    (steps, _, _, seconds), (alone, _, _, took) = (
        classes[counted.largest][0] for classes in (counted.decode, counted.alone)
    )
    scale = np.ones(step_costs.VALUES)
    scale[3] = (seconds / steps) / (took / alone)
    for sums in counted.alone.values():
        scaled = sums * scale[:, None] * scale
        found += scaled * scaled[0, 0] / scaled[0, 3] ** 2 * total / len(counted.alone)
    return found


def _beside(run: Path, counted: step_costs.StepCosts, fit: np.ndarray) -> tuple[float, float]:
    """By how much the fit has to be multiplied to be that of steps while the learner did not train, and by how much
    that takes longer while it did. (1, 1) where the blocks do not say."""
    trains = [(span.begin, span.end) for span in spans.read(run).get("learner", []) if span.name in ("train", "take")]
    blocks = np.array(counted.blocks).reshape(-1, 6)
    begins, ends = np.array(trains).reshape(-1, 2).T
    before = np.searchsorted(begins, blocks[:, 0], "right")  # steps that began no later
    inside = (before > 0) & (blocks[:, 1] <= np.append(-np.inf, ends)[before])
    outside = (np.append(-np.inf, ends)[before] <= blocks[:, 0]) & (blocks[:, 1] <= np.append(begins, np.inf)[before])
    if min(inside.sum(), outside.sum()) < LEAST_BLOCKS:
        return 1.0, 1.0
    expected, seconds = blocks[:, 2:5] @ fit, blocks[:, 5]
    alone = seconds[outside].sum() / expected[outside].sum()
    beside = seconds[inside].sum() / expected[inside].sum() / alone
    if beside <= 1.0:
        return 1.0, 1.0
    return float(alone * expected.sum() / seconds.sum()), float(beside)


def _prefill(run: Path, config: Config, counted: step_costs.StepCosts) -> tuple[float, float]:
    """Seconds per computed token, and how many are computed per token of a prompt when a sequence joins."""
    (computed, joined), (held, again) = counted.prefill, counted.again
    each = again / held if held and again else joined / max(1.0, computed)
    begun = counted.begun or counted.handled[0]  # of an older run: samples that have ended
    if not each or not begun:
        return each, 1.0
    task = build("task", config.task, config.run.seed)
    rows = np.linspace(0, task.size("train") - 1, min(PROMPTS, task.size("train"))).astype(int).tolist()
    prompt = float(np.mean([len(task.prompt("train", row).tokens) for row in rows]))
    return each, joined / (each * begun * max(1.0, prompt))


def _prefill_residual(counted: step_costs.StepCosts) -> float:
    """How far single prefills lie from the mean cost of a token, over the mean prefill (root mean square)."""
    (tokens, took), (count, squares, products, seconds) = counted.prefill, counted.prefills
    each = took / tokens
    missed = max(0.0, seconds - 2 * each * products + each * each * squares)
    return math.sqrt(missed / count) / (took / count)


def _samples(run: Path, found: Calibrated) -> None:
    """What a finished sample costs actors and buffer: processor time of their threads, all else they do included."""
    counted = step_costs.read(run)
    samples, seconds = counted.handled
    taken, buffer_seconds = counted.buffer
    if not samples or not taken:
        found.notes.append("what a finished sample costs actors and buffer was not measured: nothing")
        return
    shared = next(iter(counted.cores.values())) if len(counted.cores) == 1 else None
    found.costs.sample = Sample(actor=seconds / samples, buffer=buffer_seconds / taken, cores=shared)
    found.costs.buffer = 0.0  # the buffer's messages are in its seconds per sample


def _learner(config: Config, rows: Sequence[dict[str, Any]], found: Calibrated, before: float) -> LearnerCost:
    if config.learner.name == "timed":
        return of_timed(config).learner
    seconds = np.array([row["train/step_seconds"] for row in rows])
    tokens = np.array([row["tokens"] for row in rows], np.float64)
    columns = np.stack([np.ones(len(rows)), tokens], 1)
    varies = tokens.std() > LEAST_SPREAD * tokens.mean()
    fit = nonnegative(columns.T @ columns, columns.T @ seconds) if varies else np.array([seconds.mean(), 0.0])
    found.residuals["train step"] = float(np.sqrt(np.mean((columns @ fit / seconds - 1.0) ** 2)))
    if found.residuals["train step"] > SCATTERED:
        found.notes.append(
            f"train steps took {found.residuals['train step']:.0%} more or less than the fit says, and no prediction "
            "can be better: make the run again, with nothing else running"
        )
    publish = [row["publish/seconds"] for row in rows if "publish/seconds" in row]
    each = float(np.mean(publish)) if publish else 0.0
    ranks = ranks_of(config)
    threads = ranks * learner_threads(config)
    return LearnerCost(float(fit[0]), 0.0, float(fit[1]), each, _after(rows, before), gpus=ranks, cores=threads)


def _after(rows: Sequence[dict[str, Any]], before: float) -> float:
    """What a learner does beside its train steps, publishing and waiting, in seconds per step. `before`: tokens that
    it had trained before the first of `rows`."""
    if len(rows) < 2 or any("train/tokens_per_second" not in row for row in rows):
        return 0.0
    trained = before + np.cumsum([row["tokens"] for row in rows])
    elapsed = trained / np.array([row["train/tokens_per_second"] for row in rows])
    busy = elapsed * (1.0 - np.array([row["train/idle_share"] for row in rows]))
    named = ("train/step_seconds", "publish/seconds", "stream/seconds")
    known = np.mean([sum(row.get(name, 0.0) for name in named) for row in rows[1:]])
    return max(0.0, float((busy[-1] - busy[0]) / (len(rows) - 1) - known))


def _weights(rows: Sequence[dict[str, Any]]) -> WeightsCost:
    def mean(name: str) -> float:
        values = [row[name] for row in rows if name in row]
        return float(np.mean(values)) if values else 0.0

    fetch = mean("rollout/update_fetch_seconds") + mean("rollout/update_replica_seconds")
    return WeightsCost(mean("publish/encode_seconds"), fetch)


def _answers(run: Path, rows: Sequence[dict[str, Any]], last: int | None, found: Calibrated) -> Answers:
    """Lengths as actors have counted them, in the whole run. Where they have not, or for its first steps, the spread
    within prompts is that of kept samples, as far as there are; the rest comes from the metrics."""
    right = float(np.clip(np.mean([row["reward/mean"] for row in rows]), 0.0, 1.0))
    if last is None and len(counted := list(step_costs.read(run).lengths)) >= LEAST_GROUPS:
        return Answers(float(np.median(np.concatenate(counted))), trace=list(counted), right=right)
    groups = defaultdict[tuple[int, int], list[int]](list)
    for kept in samples.read(run, [samples.TRAINED]):
        groups[kept.step, kept.group].append(len(kept.response))
    lengths = [np.log(each) for each in groups.values() if len(each) > 1]
    if len(lengths) < LEAST_GROUPS:
        found.notes.append(f"{len(lengths)} groups of kept samples: the spread within prompts is not known (noise 0.3)")
        median = float(np.median([row["response_length/p50"] for row in rows]))
        high = float(np.median([row["response_length/p95"] for row in rows]))
        whole = math.log(max(high / median, 1.0)) / 1.645
        return Answers(median, math.sqrt(max(0.0, whole**2 - 0.3**2)), min(0.3, whole), right=right)
    within = float(np.sqrt(np.mean([each.var(ddof=1) for each in lengths])))
    between = np.var([each.mean() for each in lengths], ddof=1) - within**2 / np.mean([len(e) for e in lengths])
    return Answers(
        float(np.exp(np.median(np.concatenate(lengths)))),
        math.sqrt(max(0.0, float(between))),
        within,
        right=right,
    )
