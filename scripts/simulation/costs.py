"""What things cost in a simulated run, in seconds: of engines, the learner, weights, verifiers and the wire."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import msgspec

from actors.engines.decode_clock import DecodeCost
from actors.engines.lengths import Lengths
from areal_like.config import Config, ConfigError
from areal_like.registry import settled

LEARNER_PER_SAMPLE, ENCODE = 3.0e-5, 5.0e-3
"""What the real processes around a timed learner take, in seconds of processor time: per finished sample, and per
published version. Of one run on two cores (docs/dev-log.md)."""


class Engine(msgspec.Struct, forbid_unknown_fields=True):
    """A server's: see `actors.engines.decode_clock.DecodeCost`, and `TimedEngine` for the others. `busy`: the share of
    a step's time in which the engine itself is at work, as idle shares count it. Where the config's engine has knobs of
    these names (`recompute`: `kv_policy`), those count (`roofline.known`)."""

    base: float = 0.02
    per_sequence: float = 0.0
    per_token: float = 0.0
    prefill: float = 0.0
    apply: float = 0.0
    recompute: bool = True
    slots: int = 64
    kv_tokens: float | None = None
    interruptible: bool = True
    busy: float = 1.0
    fresh: float = 1.0

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

    least: int = 1
    most: int = 1
    tool: float = 1.0
    sigma: float = 1.0
    tokens: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"answers.turns: least={self.least}, most={self.most}: 1 <= least <= most")


class Answers(msgspec.Struct, forbid_unknown_fields=True):
    """Lengths of answers in tokens (`actors.engines.lengths`), at most `most` (None: as the config or task says).
    `drift`: by which factor the median grows per version. `right`: the share of right answers; a prompt's own share is
    uniform around it. `preset`: lengths of PRESETS, in the place of the first seven figures."""

    median: float = 200.0
    sigma: float = 1.0
    noise: float = 0.3
    seed: int = 0
    trace: str | list[int | list[int]] | None = None
    most: int | None = None
    prompt: int | None = None
    drift: float = 1.0
    right: float = 0.5
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
    def lengths(self) -> Lengths:
        return Lengths(self.median, self.sigma, self.noise, self.seed, self.trace)


class LearnerCost(msgspec.Struct, forbid_unknown_fields=True):
    """A train step on `gpus` GPUs: `base` + `per_sample` · samples + `per_token` · trained tokens. Before the next one
    training waits for `publish`, if weights were published, for `after` (metrics, kept samples) and for `checkpoint`
    (every `checkpoint.every` steps). `least`: GPUs without which the model does not fit. `learner.stream` is the
    config's."""

    base: float = 0.0
    per_sample: float = 0.0
    per_token: float = 0.0
    publish: float = 0.0
    after: float = 0.0
    checkpoint: float = 0.0
    gpus: int = 1
    least: int = 1


class WeightsCost(msgspec.Struct, forbid_unknown_fields=True):
    """`encode`: from a train step's end to the announcement. `fetch`: of an actor, and `hop` of each relay above it, in
    seconds. `size`: bytes of an update (a delta is smaller than the weights), and `link`: bytes per second that a
    source sends in all: each rank of the learner, and each relay, serves `weights.fanout` actors at once."""

    encode: float = 0.0
    fetch: float = 0.0
    hop: float = 0.0
    size: float = 0.0
    link: float | None = None

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

    begin: float = 0.0
    actor: float = 0.0
    buffer: float = 0.0
    cores: int | None = None
    jitter: float = 0.0
    wake: float = 0.0

    def __post_init__(self) -> None:
        if min(self.begin, self.actor, self.buffer, self.jitter, self.wake) < 0:
            raise ValueError("sample: begin, actor, buffer, jitter and wake must be 0 or more")
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"sample.cores: {self.cores}: 1 or more, or null for a core of each actor's own")

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

    median: float = 0.0
    sigma: float = 0.0


class Failures(msgspec.Struct, forbid_unknown_fields=True):
    """Times between failures are exponential, with these means in seconds (None: never).

    mtbf            of an actor. It dies, which its starter sees at once; or, of `silent` failures (a share), the
                    buffer must miss its heartbeats; or, of `hangs` (a share), it lives on without a token, until the
                    buffer tells it to quit. Another one is there `restart` seconds later
    spot            until an actor's node is taken from it, for `away` seconds. With `warning` seconds of notice the
                    actor hands its groups back, and leaves
    learner         of the learner. The run ends, as in production, and is resumed `learner_restart` seconds later from
                    the newest checkpoint and the journal

    An actor says every `heartbeat` seconds that it lives, if some are silent or hang."""

    mtbf: float | None = None
    restart: float = 60.0
    seed: int = 0
    silent: float = 0.0
    hangs: float = 0.0
    spot: float | None = None
    warning: float = 30.0
    away: float = 600.0
    learner: float | None = None
    learner_restart: float = 300.0
    heartbeat: float = 5.0

    def __post_init__(self) -> None:
        means = {"mtbf": self.mtbf, "spot": self.spot, "learner": self.learner, "heartbeat": self.heartbeat}
        for name, mean in means.items():
            if mean is not None and not mean > 0:
                raise ValueError(f"failures.{name}: {mean:g} seconds: a mean time above 0, or null for never")
        if min(self.silent, self.hangs) < 0 or self.silent + self.hangs > 1:
            raise ValueError(f"failures: silent={self.silent:g} and hangs={self.hangs:g} are shares of all failures")


class JournalCost(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds of a write of the journal: `write` and, every `every` seconds on average (None: never), a `stall` more,
    as a shared file system has them. With buffer.journal=memory the buffer waits for a write, with fsync only the
    messages that rest on it."""

    write: float = 0.0
    stall: float = 0.0
    every: float | None = None

    def __post_init__(self) -> None:
        if self.every is not None and not self.every > 0:
            raise ValueError(f"journal.every: {self.every:g} seconds: a mean time above 0, or null for never")


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
    latency: float = 0.0003
    buffer: float = 0.00012
    source: str = ""


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
        found = msgspec.yaml.decode(path.read_bytes(), type=Costs)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    found.source = found.source or path.name
    return found


def check(config: Config, costs: Costs) -> None:
    """Raises ConfigError for failures that a run of this config cannot have."""
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
