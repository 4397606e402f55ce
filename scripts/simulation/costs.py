"""What things cost in a simulated run, in seconds: of engines, the learner, weights, verifiers and the wire."""

from __future__ import annotations

from pathlib import Path

import msgspec

from actors.engines.decode_clock import DecodeCost
from actors.engines.lengths import Lengths
from areal_like.config import Config, ConfigError
from areal_like.registry import settled

ACTOR_PER_SAMPLE, BUFFER_PER_SAMPLE, LEARNER_PER_SAMPLE, ENCODE = 2.0e-4, 5.0e-5, 3.0e-5, 5.0e-3
"""What the real processes around a timed engine and a timed learner take, in seconds of processor time: per finished
sample, and per published version. Of one run on two cores (docs/dev-log.md)."""


class Engine(msgspec.Struct, forbid_unknown_fields=True):
    """A server's: see `actors.engines.decode_clock.DecodeCost`, and `TimedEngine` for the others. `busy`: the share of
    a step's time in which the engine itself is at work, as idle shares count it."""

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

    @property
    def cost(self) -> DecodeCost:
        return DecodeCost(self.base, self.per_sequence, self.per_token, self.prefill, self.apply, self.recompute)


class Answers(msgspec.Struct, forbid_unknown_fields=True):
    """Lengths of answers in tokens (`actors.engines.lengths`), at most `most` (None: as the config or task says).
    `drift`: by which factor the median grows per version. `right`: the share of right answers, of a prompt
    Beta(right · 2, (1 - right) · 2). `turns` of each answer, `tool` seconds between two."""

    median: float = 200.0
    sigma: float = 1.0
    noise: float = 0.3
    seed: int = 0
    trace: str | list[int] | None = None
    most: int | None = None
    prompt: int | None = None
    drift: float = 1.0
    right: float = 0.5

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.median, self.sigma, self.noise, self.seed, self.trace)


class LearnerCost(msgspec.Struct, forbid_unknown_fields=True):
    """A train step on `gpus` GPUs: `base` + `per_sample` · samples + `per_token` · trained tokens. `publish`: for which
    training waits after it. `least`: GPUs without which the model does not fit."""

    base: float = 0.0
    per_sample: float = 0.0
    per_token: float = 0.0
    stream: bool = False
    publish: float = 0.0
    gpus: int = 1
    least: int = 1


class WeightsCost(msgspec.Struct, forbid_unknown_fields=True):
    """`encode`: from a train step's end to the announcement. `fetch`: of an actor, and `hop` of each relay above it."""

    encode: float = 0.0
    fetch: float = 0.0
    hop: float = 0.0


class Sample(msgspec.Struct, forbid_unknown_fields=True):
    """What each finished sample costs beside its tokens, one after the other: its `actor`'s process, and the `buffer`.
    `cores`: of the machine on which all actors run (None: each has its own)."""

    actor: float = 0.0
    buffer: float = 0.0
    cores: int | None = None


class Verifier(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds of a verification: log-normal(`median`, `sigma`); at least `timeout` counts as one."""

    median: float = 0.0
    sigma: float = 0.0


class Failures(msgspec.Struct, forbid_unknown_fields=True):
    """An actor dies every `mtbf` seconds on average (None: never; exponential), is noticed at once, and another process
    in its place says hello `restart` seconds later."""

    mtbf: float | None = None
    restart: float = 60.0
    seed: int = 0


class Costs(msgspec.Struct, forbid_unknown_fields=True):
    """`latency`: of a message. `buffer`: seconds of the buffer per message. `source`: where the figures come from."""

    engine: Engine = msgspec.field(default_factory=Engine)
    answers: Answers = msgspec.field(default_factory=Answers)
    learner: LearnerCost = msgspec.field(default_factory=LearnerCost)
    weights: WeightsCost = msgspec.field(default_factory=WeightsCost)
    sample: Sample = msgspec.field(default_factory=Sample)
    verifier: Verifier = msgspec.field(default_factory=Verifier)
    failures: Failures = msgspec.field(default_factory=Failures)
    latency: float = 0.0003
    buffer: float = 0.00012
    source: str = ""


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
        LearnerCost(
            learner["base"], learner["per_sample"] + LEARNER_PER_SAMPLE, learner["per_token"], learner["stream"]
        ),
        WeightsCost(encode=ENCODE, fetch=0.003),
        Sample(ACTOR_PER_SAMPLE, BUFFER_PER_SAMPLE),
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
