"""What things cost in a simulated run, in seconds: of engines, the learner, weights, verifiers and the wire.

Each number states its range beside its type; `read` checks a file against them (`areal_like.config.ranges`)."""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from actors.engines.decode_clock import DecodeCost
from areal_like.config.annotations import misfit
from areal_like.config.registry import settled
from areal_like.config.run_config import Config, ConfigError
from areal_like.config.supervision import is_supervised

from .draws import Dealt

LEARNER_PER_SAMPLE, ENCODE = 3.0e-5, 5.0e-3
"""What the real processes around a timed learner take, in seconds of processor time: per finished sample, and per
published version. Of one run on two cores (docs/dev-log.md)."""


class Engine(msgspec.Struct, forbid_unknown_fields=True):
    """A server's: see `actors.engines.decode_clock.DecodeCost`, and `TimedEngine` for the others. `busy`: the share of
    a step's time in which the engine itself is at work, as idle shares count it. `beside`: how many times as long all
    that it computes takes while the learner trains, as on a machine that they share. `kv_tokens` None: no limit. Where
    the config's engine has knobs of these names (`recompute`: `kv_policy`), those count (`roofline.known`)."""

    base: Annotated[float, "[0, inf)"] = 0.02
    per_sequence: Annotated[float, "[0, inf)"] = 0.0
    per_token: Annotated[float, "[0, inf)"] = 0.0
    prefill: Annotated[float, "[0, inf)"] = 0.0
    apply: Annotated[float, "[0, inf)"] = 0.0
    recompute: bool = True
    slots: Annotated[int, "[1, inf)"] = 64
    kv_tokens: Annotated[float, "[1, inf]"] | None = None
    interruptible: bool = True
    busy: Annotated[float, "[0, 1]"] = 1.0
    fresh: Annotated[float, "[0, inf)"] = 1.0
    beside: Annotated[float, "[1, inf)"] = 1.0

    def __post_init__(self) -> None:
        if not (self.base or self.per_sequence or self.per_token):
            raise ValueError("engine: base, per_sequence or per_token must be above 0: decode steps take time")

    @property
    def cost(self) -> DecodeCost:
        shared = (getattr(self, name) for name in DecodeCost.__dataclass_fields__)
        return DecodeCost(*shared)


PRESETS: dict[str, dict[str, Any]] = {
    f"rollpacker_{most // 1024}k": {"median": most / 16, "sigma": sigma, "noise": 0.5, "prompt": 512, "most": most}
    for most, sigma in ((8192, 0.586), (16384, 0.8015), (32768, 0.9441))
}
"""Lengths in the place of RollPacker's (arXiv 2509.21009): its caps of 8k, 16k and 32k tokens and groups. The paper
shows lengths only in plots. So the medians (1/16 of the cap) and p99 / p50 of 6, 9 and 12 are assumed, as in
`scripts.bench.stragglers`: sigma² + noise² = (ln(p99 / p50) / 2.326)²."""


class Turns(msgspec.Struct, forbid_unknown_fields=True):
    """Turns of an answer, uniform from `least` to `most`; its tokens are shared out equally. Between two, a tool takes
    log-normal(`tool`, `sigma`) seconds and adds `tokens` to the context. Meanwhile the answer has no place in the
    engine, but keeps its lease; its next turn prefills all that stands before."""

    least: Annotated[int, "[1, inf)"] = 1
    most: Annotated[int, "[1, inf)"] = 1
    tool: Annotated[float, "[0, inf)"] = 1.0
    sigma: Annotated[float, "[0, 10]"] = 1.0
    tokens: Annotated[int, "[0, inf)"] = 0

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"answers.turns: least={self.least}, most={self.most}: least <= most")


class Answers(msgspec.Struct, forbid_unknown_fields=True):
    """Lengths of answers in tokens (`actors.engines.lengths`), at most `most` (None: as the config or task says).
    `drift`: by which factor the median grows per version. `right`: the share of right answers; a prompt's own share is
    uniform around it. `preset`: lengths of PRESETS, in the place of the first seven figures."""

    median: Annotated[float, "(0, inf)"] = 200.0
    sigma: Annotated[float, "[0, 10]"] = 1.0
    noise: Annotated[float, "[0, 10]"] = 0.3
    seed: Annotated[int, "[0, inf)"] = 0
    trace: str | list[int | list[int]] | None = None
    most: Annotated[int, "[1, inf)"] | None = None
    prompt: Annotated[int, "[1, inf)"] | None = None
    drift: Annotated[float, "(0, 2]"] = 1.0
    right: Annotated[float, "[0, 1]"] = 0.5
    turns: Turns = msgspec.field(default_factory=Turns)
    preset: str | None = None

    def __post_init__(self) -> None:
        if self.preset is None:
            return
        if self.preset not in PRESETS:
            raise ValueError(f"answers.preset: {self.preset!r} is none of {', '.join(PRESETS)}")
        for name, value in PRESETS[self.preset].items():
            setattr(self, name, value)

    @property
    def lengths(self) -> Dealt:
        return Dealt(self.median, self.sigma, self.noise, self.seed, self.trace)

    def drifted(self, whole: int, version: int) -> int:
        """A length, as it is at this version. It grows by e^50 at most: more would be no number."""
        return max(1, round(whole * math.exp(min(50.0, max(0, version) * math.log(self.drift)))))


class LearnerCost(msgspec.Struct, forbid_unknown_fields=True):
    """A train step on `gpus` GPUs: `base` + `per_sample` · samples + `per_token` · trained tokens. Before the next one
    training waits for `publish`, if weights were published, for `after` (metrics, kept samples) and for `checkpoint`
    (every `checkpoint.every` steps). `least`: GPUs without which the model does not fit. `cores`: how many of
    `sample.cores` it keeps busy meanwhile. `learner.stream` is the config's."""

    base: Annotated[float, "[0, inf)"] = 0.0
    per_sample: Annotated[float, "[0, inf)"] = 0.0
    per_token: Annotated[float, "[0, inf)"] = 0.0
    publish: Annotated[float, "[0, inf)"] = 0.0
    after: Annotated[float, "[0, inf)"] = 0.0
    checkpoint: Annotated[float, "[0, inf)"] = 0.0
    gpus: Annotated[int, "[1, inf)"] = 1
    least: Annotated[int, "[1, inf)"] = 1
    cores: Annotated[int, "[0, inf)"] = 0


class WeightsCost(msgspec.Struct, forbid_unknown_fields=True):
    """`encode`: from a train step's end to the announcement. `fetch`: of an actor, and `hop` of each relay above it, in
    seconds. `size`: bytes of an update (a delta is smaller than the weights), and `link`: bytes per second that a
    source sends in all: each rank of the learner, and each relay, serves `weights.fanout` actors at once."""

    encode: Annotated[float, "[0, inf)"] = 0.0
    fetch: Annotated[float, "[0, inf)"] = 0.0
    hop: Annotated[float, "[0, inf)"] = 0.0
    size: Annotated[float, "[0, inf)"] = 0.0
    link: Annotated[float, "(0, inf]"] | None = None

    def seconds(self, place: int, actors: int, fanout: int | None, ranks: int = 1) -> float:
        """Of the update of the actor at this place of the tree (`buffer.relays`). Each of the learner's ranks sends its
        part over its own link; a relay begins when it has all."""
        served, levels = min(fanout or actors, actors), 0
        while fanout and (place := place // fanout - 1) >= 0:
            levels += 1
        sent = served * self.size / self.link if self.link else 0.0
        return self.fetch + self.hop * levels + sent * (1.0 / ranks + levels)


class Sample(msgspec.Struct, forbid_unknown_fields=True):
    """What each sample costs beside its tokens: its actor's process to `begin` it and, once it has ended, the `actor`
    and the `buffer`. Actors work in turns of their loop (`scripts.simulation.cores`), on the `cores` of the machine
    that all share (None: each has its own). `jitter`: relative standard deviation of what a turn takes. `wake`: seconds
    until a process that slept begins its turn."""

    begin: Annotated[float, "[0, inf)"] = 0.0
    actor: Annotated[float, "[0, inf)"] = 0.0
    buffer: Annotated[float, "[0, inf)"] = 0.0
    cores: Annotated[int, "[1, inf)"] | None = None
    jitter: Annotated[float, "[0, 10]"] = 0.0
    wake: Annotated[float, "[0, inf)"] = 0.0

    @property
    def takes_turns(self) -> bool:
        """Do turns of an actor's loop take any time?"""
        return bool(self.begin or self.actor or self.wake)


TIMED = Sample(begin=4.0e-5, actor=1.1e-4, buffer=5.0e-5, jitter=1.0, wake=1.0e-3)
"""Of actors and buffer around a timed engine. From logs of real actors: .1 ms for a sample that has ended, .025 to .045
ms from its lease to the engine."""


class Verifier(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds of a verification: log-normal(`median`, `sigma`). One that takes more than the config's `rewards.timeout`
    ends then, and its answer earns 0 (the limit that follows the slowest right answer is not modelled)."""

    median: Annotated[float, "[0, inf)"] = 0.0
    sigma: Annotated[float, "[0, 10]"] = 0.0


def _or_never(mean: float | None) -> float | None:
    """A mean time; None if it has no end."""
    return None if mean == math.inf else mean


class Failures(msgspec.Struct, forbid_unknown_fields=True):
    """Times between failures are exponential, with these means in seconds (None or inf: never).

    mtbf            of an actor. It dies, which its starter sees at once; or, of `silent` failures (a share), the
                    buffer must miss its heartbeats; or, of `hangs` (a share), it lives on without a token, until the
                    buffer tells it to quit. Another one is there `restart` seconds later
    spot            until an actor's node is taken from it, for `away` seconds. With `warning` seconds of notice the
                    actor hands its groups back, and leaves
    learner         of the learner. The run ends, as in production, and is resumed `learner_restart` seconds later from
                    the newest checkpoint and the journal

    An actor says every `heartbeat` seconds that it lives, if some are silent or hang."""

    mtbf: Annotated[float, "(0, inf]"] | None = None
    restart: Annotated[float, "[0, inf)"] = 60.0
    seed: Annotated[int, "[0, inf)"] = 0
    silent: Annotated[float, "[0, 1]"] = 0.0
    hangs: Annotated[float, "[0, 1]"] = 0.0
    spot: Annotated[float, "(0, inf]"] | None = None
    warning: Annotated[float, "[0, inf)"] = 30.0
    away: Annotated[float, "[0, inf)"] = 600.0
    learner: Annotated[float, "(0, inf]"] | None = None
    learner_restart: Annotated[float, "[0, inf)"] = 300.0
    heartbeat: Annotated[float, "(0, inf)"] = 5.0

    def __post_init__(self) -> None:
        self.mtbf, self.spot, self.learner = map(_or_never, (self.mtbf, self.spot, self.learner))
        if self.silent + self.hangs > 1:
            raise ValueError(f"failures: silent={self.silent:g} and hangs={self.hangs:g} are shares of all failures")


class JournalCost(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds of a write of the journal: `write` and, every `every` seconds on average (None or inf: never), a `stall`
    more, as a shared file system has them. With buffer.journal=memory the buffer waits for a write, with fsync only the
    messages that rest on it."""

    write: Annotated[float, "[0, inf)"] = 0.0
    stall: Annotated[float, "[0, inf)"] = 0.0
    every: Annotated[float, "(0, inf]"] | None = None

    def __post_init__(self) -> None:
        self.every = _or_never(self.every)


class Costs(msgspec.Struct, forbid_unknown_fields=True):
    """`latency`: of a message. `buffer`: seconds of the buffer per message. `source`: where the figures come from."""

    engine: Engine = msgspec.field(default_factory=Engine)
    answers: Answers = msgspec.field(default_factory=Answers)
    learner: LearnerCost = msgspec.field(default_factory=LearnerCost)
    weights: WeightsCost = msgspec.field(default_factory=WeightsCost)
    sample: Sample = msgspec.field(default_factory=Sample)
    verifier: Verifier = msgspec.field(default_factory=Verifier)
    failures: Failures = msgspec.field(default_factory=Failures)
    journal: JournalCost = msgspec.field(default_factory=JournalCost)
    latency: Annotated[float, "[0, inf)"] = 0.0003
    buffer: Annotated[float, "[0, inf)"] = 0.00012
    source: str = ""


def on_its_own(costs: Costs) -> None:
    """Actors and learner on machines of their own, whatever they shared where the costs were measured."""
    costs.sample.cores, costs.learner.cores, costs.engine.beside = None, 0, 1.0


EFFICIENCY = 0.95
"""Of a learner: each doubling of its GPUs makes it 2 · EFFICIENCY times as fast."""


def scaled(costs: Costs, learner_gpus: int, efficiency: float = EFFICIENCY) -> Costs:
    """Costs with a learner of so many GPUs: each doubling makes its steps `2 · efficiency` times as fast."""
    found = copy.deepcopy(costs)
    faster = (learner_gpus / costs.learner.gpus) * efficiency ** math.log2(learner_gpus / costs.learner.gpus)
    learner = found.learner
    learner.base, learner.per_sample = learner.base / faster, learner.per_sample / faster
    learner.per_token, learner.gpus = learner.per_token / faster, learner_gpus
    return found


def of_timed(config: Config) -> Costs:
    """Of a run whose engine and learner are timed. Raises ConfigError for others."""
    if config.engine.name != "timed" or config.learner.name != "timed":
        raise ConfigError(
            f"engine={config.engine.name} and learner={config.learner.name}: what they cost is not known. Name a file "
            "with --costs (`areal-like calibrate RUN` makes one of a short run), or set engine=timed learner=timed"
        )
    engine, learner = settled("engine", config.engine), settled("learner", config.learner)
    return Costs(
        Engine(
            engine["base"],
            engine["per_sequence"],
            engine["per_token"],
            engine["prefill"],
            engine["apply"],
            engine["kv_policy"] == "recompute",
            engine["slots"],
            engine["kv_tokens"],
            engine["interruptible"],
        ),
        Answers(engine["median"], engine["sigma"], engine["noise"], engine["seed"], engine["trace"]),
        LearnerCost(learner["base"], learner["per_sample"] + LEARNER_PER_SAMPLE, learner["per_token"]),
        WeightsCost(encode=ENCODE, fetch=0.003),
        msgspec.structs.replace(TIMED),
        source="the config's timed engine and learner",
    )


def read(path: Path) -> Costs:
    """Costs from a YAML file. Raises ConfigError."""
    try:
        given = msgspec.yaml.decode(path.read_bytes())
        if problem := _outside(Costs, given):
            raise ValueError(problem)
        found = msgspec.convert(given, Costs)
        _check_trace(found.answers)
    except (OSError, ValueError) as error:  # those of msgspec, too
        raise ConfigError(f"{path}: {error}") from None
    found.source = found.source or path.name
    return found


def _outside(part: type[msgspec.Struct], given: object, at: str = "") -> str:
    """What of the given values lies outside its range, in words; "" if nothing does. Other types than those of numbers,
    and names that there are not, are left to msgspec."""
    values = given if isinstance(given, Mapping) else {}
    for name, annotation in part.__annotations__.items():
        if name not in values:
            continue
        if inner := _PARTS.get(annotation):
            problem = _outside(inner, values[name], f"{at}{name}.")
        else:
            problem = misfit(values[name], _numbers(annotation))
            problem = f"{at}{name}: {problem}{_hint(values[name])}" if problem else ""
        if problem:
            return problem
    return ""


def _hint(value: object) -> str:
    """YAML takes 2e-5 for text, as it has no point."""
    parts = value.lower().split("e") if isinstance(value, str) else []
    return (
        f" (write {parts[0]}.0e{parts[1]})"
        if len(parts) == 2 and all(each.lstrip("+-").isdecimal() for each in parts)
        else ""
    )


_PARTS: dict[str, type[msgspec.Struct]] = {
    each.__name__: each
    for each in (Engine, Answers, Turns, LearnerCost, WeightsCost, Sample, Verifier, Failures, JournalCost)
}
"""By the annotations of their fields."""


def _numbers(annotation: str) -> ast.expr | None:
    """The annotation of a number with its range; None of anything else, which `misfit` lets pass."""
    return ast.Constant(annotation) if annotation.startswith("Annotated") else None


def _check_trace(answers: Answers) -> None:
    """Raises ValueError for lengths that cannot be drawn from."""
    if answers.trace is None:
        return
    if not answers.trace:
        raise ValueError("answers.trace: no lengths in it; leave it out, or null, to draw them from log-normals")
    try:
        _ = answers.lengths
    except OSError as error:
        raise ValueError(f"answers.trace: {error}") from None
    except ValueError as error:  # which names the trace
        raise ValueError(f"answers.{error}") from None


def check_rollouts(config: Config) -> None:
    """Raises ConfigError for a run without rollouts, of which nothing can be simulated."""
    if is_supervised(config):
        raise ConfigError(
            f"loss={config.loss['name']}: the learner trains alone on demonstrations, without actors or a buffer: "
            "there is nothing to simulate"
        )
    if config.replay:
        raise ConfigError(f"replay={config.replay}: a replay has no actors: there is nothing to simulate")


def check(config: Config, costs: Costs) -> None:
    """Raises ConfigError for a run that is not simulated, and for failures that a run of this config cannot have."""
    check_rollouts(config)
    if config.resume:
        raise ConfigError(f"resume={config.resume}: a simulated run begins with its first train step. Set resume=null")
    failures, journal = costs.failures, costs.journal
    if failures.learner and (config.buffer.journal == "off" or not config.checkpoint.every):
        raise ConfigError(
            f"failures.learner with buffer.journal={config.buffer.journal} and checkpoint.every="
            f"{config.checkpoint.every}: a run resumes from its journal and a checkpoint. Set both"
        )
    if (journal.write or journal.every) and config.buffer.journal == "off":
        raise ConfigError("journal: buffer.journal=off writes none. Set buffer.journal=fsync, or leave journal out")
    if failures.hangs and not config.buffer.lease_timeout:
        raise ConfigError("failures.hangs: with buffer.lease_timeout=0 the buffer waits for a hung actor for ever")
