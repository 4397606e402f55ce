"""The shape of a config: its sections and their keys, typed. What each key means stands in `configs/base.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
    dense_above: float
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
