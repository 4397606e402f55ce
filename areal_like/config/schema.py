"""The shape of a config: its sections and their keys, typed. What each key means stands in `configs/base.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    import omegaconf

    Spec = omegaconf.DictConfig
    Free = object
else:
    Spec, Free = dict[str, Any], Any
"""A component's name and knobs, which are free here (`areal_like.config.registry`); a value of any form."""


@dataclass
class Run:
    dir: str
    name: str | None
    seed: int
    steps: int
    max_seconds: float | None
    target_reward: float | None
    max_untrainable: int
    max_nonfinite: int
    samples_bytes: int
    trackers: list[str]
    project: str


@dataclass
class Sampling:
    temperature: float
    max_new_tokens: int | None


@dataclass
class Eval:
    every: int
    prompts: int
    samples: int
    temperature: float
    k: list[int] | None
    right: float
    workflow: Spec
    sets: Spec


@dataclass
class Actors:
    count: int | None
    max_restarts: int
    restart_window: float
    min_alive: int
    threads: int | None


@dataclass
class Rewards:
    workers: int
    timeout: float
    min_timeout: float
    slack: float
    max_timeouts: float | None
    memory_limit: int | None


@dataclass
class Buffer:
    transport: Literal["auto", "ipc", "tcp", "inproc"]
    host: str
    port: int
    max_bytes: int
    heartbeat_timeout: float
    lease_timeout: float
    journal: Literal["off", "memory", "fsync"]
    keep_journal: bool


@dataclass
class Weights:
    coding: Literal["delta", "full"]
    block_bytes: int
    keep: int
    snapshot_every: int
    sweep_every: int
    probe_every: int
    probe_error: float | None
    overlap: bool
    fanout: int | None


@dataclass
class Security:
    key_folder: str | None


@dataclass
class Checkpoint:
    every: int
    keep: int


@dataclass
class Config:
    """The tree. What each key means stands in `configs/base.yaml`; the components' specs are free here.

    At run time it is OmegaConf's DictConfig of this shape.
    """

    mode: str
    run: Run
    resume: str | None
    replay: str | None
    groups_per_batch: int
    weight_sync_interval: int
    staleness_policy: Literal["wait", "drop", "requeue", "mask_tokens"]
    partial_rollout: Literal["resume", "restart"]
    inject_staleness: Free
    placement: Free
    gpu: str | None
    algorithm: str | None
    task: Spec
    group_reward: Spec
    model: Spec
    engine: Spec
    workflow: Spec
    scheduler: Spec
    sizing: Spec
    sampler: Spec
    batch_policy: Spec
    filter: Spec
    sampling: Sampling
    advantage: Spec
    loss: Spec
    learner: Spec
    eval: Eval
    actors: Actors
    rewards: Rewards
    buffer: Buffer
    weights: Weights
    security: Security
    checkpoint: Checkpoint
    launcher: Spec


OWN = "heldout"
"""The split of a task that is not trained on, and the name of a single task's own set (`eval.*`)."""

SECTIONS: dict[str, type] = {
    "run": Run,
    "sampling": Sampling,
    "eval": Eval,
    "actors": Actors,
    "rewards": Rewards,
    "buffer": Buffer,
    "weights": Weights,
    "security": Security,
    "checkpoint": Checkpoint,
}

_SECONDS = 10_000_000
"""More than that, clocks and sockets do not take: 115 days."""

RANGES = {
    "run.seed": f"[0, {2**64 - 1}]",
    "run.steps": "[0, inf)",
    "run.max_seconds": "[0, inf]",
    "run.target_reward": "[-inf, inf]",
    "groups_per_batch": "[1, inf)",
    "weight_sync_interval": "[1, inf)",
    "sampling.temperature": "[0, inf)",
    "sampling.max_new_tokens": "[1, inf)",
    "eval.every": "[0, inf)",
    "eval.prompts": "[0, inf)",
    "eval.samples": "[1, inf)",
    "eval.temperature": "[0, inf)",
    "eval.right": "[-inf, inf]",
    "actors.count": "[1, inf)",
    "run.max_untrainable": "[1, inf)",
    "run.max_nonfinite": "[1, inf)",
    "run.samples_bytes": "[0, inf)",
    "actors.max_restarts": "[0, inf)",
    "actors.restart_window": "[0, inf]",
    "actors.min_alive": "[1, inf)",
    "actors.threads": "[1, inf)",
    "learner.threads": "[1, inf)",
    "learner.ranks": "[1, inf)",
    "rewards.workers": "[0, inf)",
    "rewards.timeout": f"[0.01, {_SECONDS}]",
    "rewards.min_timeout": f"[0.01, {_SECONDS}]",
    "rewards.slack": "[1, inf)",
    "rewards.max_timeouts": "(0, 1]",
    "rewards.memory_limit": f"[{1 << 26}, inf)",
    "buffer.port": "[0, 65535]",
    "buffer.max_bytes": "[1, inf)",
    "buffer.heartbeat_timeout": f"[2, {_SECONDS}]",
    "buffer.lease_timeout": f"[0, {_SECONDS}]",
    "weights.block_bytes": "[4096, inf)",
    "weights.keep": "[1, inf)",
    "weights.snapshot_every": "[1, inf)",
    "weights.sweep_every": "[1, inf)",
    "weights.probe_every": "[0, inf)",
    "weights.probe_error": "(0, inf]",
    "weights.fanout": "[0, inf)",
    "checkpoint.every": "[0, inf)",
    "checkpoint.keep": "[1, inf)",
}
"""Key → the interval of its number. Components state the ranges of their knobs themselves (`Annotated`);
these are those of sections and of the top level. See `areal_like.config.annotations`."""


def eval_set(
    *,
    task: object = None,
    prompts: Annotated[int, "[1, inf)"] = 1,
    samples: Annotated[int, "[1, inf)"] = 1,
    temperature: Annotated[float, "[0, inf)"] = 0.0,
    every: Annotated[int, "[0, inf)"] = 0,
    k: list[Annotated[int, "[1, inf)"]] | None = None,
    right: float = 1.0,
    workflow: object = None,
) -> None:
    """The knobs of one of `eval.sets`, read by `conflicts.validate_eval_sets`. A set has the values of the section
    `eval` for those that it leaves out."""
