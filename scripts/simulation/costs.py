"""Costs of a simulated run, in seconds: of engines, the learner, weights, verifiers and the wire.

They come from the config's timed parts (`of_timed`), from a file (`read`), or are fitted to a run (`fitted`), from its
metrics and the sums of its actors (`actors.engines.step_costs`)."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import yaml

from actors.engines.decode_clock import AnswerLengths, DecodeCost
from actors.engines.step_costs import COSTS
from areal_like.config.registry import with_defaults
from areal_like.config.run_config import Config, ConfigError, load_resolved, ranks_of
from areal_like.run.metrics import MetricsFollower
from areal_like.run.run_folder import CONFIG

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Spread = Annotated[float, msgspec.Meta(ge=0, le=10)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
LEAST_STEPS, WARMUP_STEPS = 50, 2
"""Train steps that a fit needs: ten of them predicted a mean staleness that was off by 75 %. The first ones warm up."""


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """Fields are keys of the file."""


class Engine(Part):
    """See `actors.engines.decode_clock`. The config's engine knobs of these names take precedence."""

    base: Seconds = 0.02
    per_sequence: Seconds = 0.0
    per_token: Seconds = 0.0
    prefill: Seconds = 0.0
    apply: Seconds = 0.0
    recompute: bool = True
    slots: Count = 64
    interruptible: bool = True

    def __post_init__(self) -> None:
        if not (self.base or self.per_sequence or self.per_token):
            raise ValueError("engine: got a decode step of 0 s, expected base, per_sequence or per_token above 0")

    @property
    def cost(self) -> DecodeCost:
        return DecodeCost(self.base, self.per_sequence, self.per_token, self.prefill, self.apply, self.recompute)


class Answers(Part):
    """Lengths in tokens (`AnswerLengths`) after prompts of `prompt` tokens (None: the task's). `right`: mean share of
    right answers; a prompt's share is uniform around it."""

    median: Positive = 200.0
    sigma: Spread = 1.0
    noise: Spread = 0.3
    seed: int = 0
    trace: list[list[int]] | None = None
    prompt: Count | None = None
    right: Share = 0.5

    def __post_init__(self) -> None:
        _ = self.lengths  # raises ValueError for a trace without lengths

    @property
    def lengths(self) -> AnswerLengths:
        return AnswerLengths(self.median, self.sigma, self.noise, self.seed, self.trace)


class LearnerCost(Part):
    """A train step on `gpus` GPUs: `base` + `per_sample` · samples + `per_token` · trained tokens, then `publish`."""

    base: Seconds = 0.0
    per_sample: Seconds = 0.0
    per_token: Seconds = 0.0
    publish: Seconds = 0.0
    gpus: Count = 1


class WeightsCost(Part):
    """`encode`: from a train step's end to the announcement. `fetch`: of an actor. `size`: bytes of an update; `link`:
    bytes per second that a source (a rank of the learner, or a relay) sends to all its receivers."""

    encode: Seconds = 0.0
    fetch: Seconds = 0.0
    size: Seconds = 0.0
    link: Positive | None = None

    def seconds(self, place: int, actors: int, fanout: int, ranks: int) -> float:
        """Of the update of the actor at this place of the tree (`buffer.fleet`)."""
        levels = 0
        while fanout and (place := place // fanout - 1) >= 0:
            levels += 1
        sent = min(fanout or actors, actors) * self.size / self.link if self.link else 0.0
        return self.fetch + sent * (1.0 / ranks + levels)


class Sample(Part):
    """Beside its tokens: of its actor's process to `begin` it and, once it has ended, of the `actor` and the `buffer`.
    `jitter`: relative standard deviation of a turn of an actor's loop. `wake`: until a sleeping process begins one."""

    begin: Seconds = 0.0
    actor: Seconds = 0.0
    buffer: Seconds = 0.0
    jitter: Spread = 0.0
    wake: Seconds = 0.0


MEASURED = Sample(begin=4.0e-5, actor=1.1e-4, buffer=5.0e-5, jitter=1.0, wake=1.0e-3)
"""Around an engine, on a CPU."""


class Verifier(Part):
    """Seconds of a verification: log-normal(`median`, `sigma`)."""

    median: Seconds = 0.0
    sigma: Spread = 0.0


class Costs(Part):
    """`latency`: of a message. `buffer`: of the buffer per message. `source`: origin of the figures, in words."""

    engine: Engine = msgspec.field(default_factory=Engine)
    answers: Answers = msgspec.field(default_factory=Answers)
    learner: LearnerCost = msgspec.field(default_factory=LearnerCost)
    weights: WeightsCost = msgspec.field(default_factory=WeightsCost)
    sample: Sample = msgspec.field(default_factory=Sample)
    verifier: Verifier = msgspec.field(default_factory=Verifier)
    latency: Seconds = 0.0003
    buffer: Seconds = 0.00012
    source: str = ""


def scaled(costs: Costs, gpus: int) -> Costs:
    """Costs with a learner of so many GPUs: each doubling makes its steps 1.9 times as fast."""
    each = costs.learner
    slower = 1.9 ** -math.log2(gpus / each.gpus)
    step = {name: getattr(each, name) * slower for name in ("base", "per_sample", "per_token")}
    return msgspec.structs.replace(costs, learner=msgspec.structs.replace(each, gpus=gpus, **step))


def of_timed(config: Config) -> Costs:
    """Of a run whose engine and learner are timed. Raises ConfigError for others."""
    if config.engine.name != "timed" or config.learner.name != "timed":
        raise ConfigError(
            f"--costs: got none with engine={config.engine.name} and learner={config.learner.name}, expected a file, "
            "a run to fit them to (--costs-from RUN), or engine=timed learner=timed"
        )
    engine, learner = with_defaults("engine", config.engine), with_defaults("learner", config.learner)
    shared = {name: engine[name] for name in Engine.__struct_fields__ if name in engine}
    return Costs(
        Engine(**shared, recompute=engine["kv_policy"] == "recompute"),
        Answers(engine["median"], engine["sigma"], engine["noise"], engine["seed"]),
        LearnerCost(learner["base"], learner["per_sample"] + 3.0e-5, learner["per_token"]),
        WeightsCost(encode=5.0e-3, fetch=3.0e-3),  # of the processes around a timed learner, as measured
        MEASURED,
        source="the config's timed engine and learner",
    )


def read(path: Path) -> Costs:
    """Costs from a YAML file. Raises ConfigError."""
    try:
        found = msgspec.convert(msgspec.yaml.decode(path.read_bytes()), Costs)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(f"{path}: {error}") from None
    found.source = found.source or path.name
    return found


def as_configured(config: Config, costs: Costs) -> Costs:
    """Costs with the config's knobs of the engine, and a learner of its `learner.ranks` GPUs."""
    knobs = with_defaults("engine", config.engine)
    named = {"slots": config.engine.get("slots") or costs.engine.slots}
    if "interruptible" in knobs:
        named["interruptible"] = knobs["interruptible"]
    if config.engine.name == "torch":
        named["recompute"] = knobs["kv_policy"] == "recompute"
    engine = msgspec.structs.replace(costs.engine, **named)
    return scaled(msgspec.structs.replace(costs, engine=engine), ranks_of(config))


def written(costs: Costs) -> str:
    return yaml.safe_dump(msgspec.to_builtins(costs), sort_keys=False, default_flow_style=None, width=120)


def fitted(run: Path) -> Costs:
    """Costs of a run; `source` has the errors of the fits. Raises ConfigError."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: got no {CONFIG}, expected a run's folder")
    config, rows = load_resolved(run / CONFIG), list(MetricsFollower(run / "metrics.jsonl").new_rows())
    if len(rows) < LEAST_STEPS:
        raise ConfigError(f"{run}: got {len(rows)} train steps, expected at least {LEAST_STEPS}: set run.steps")
    counted = [json.loads(path.read_bytes()) for path in sorted((run / COSTS).glob("*.json"))]
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
