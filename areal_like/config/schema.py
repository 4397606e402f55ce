"""The shape of a config: its sections and their keys, with types and ranges (`areal_like.config.annotations`). Times
are in seconds, 1e7 at most: clocks and sockets take no more."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from areal_like.config.annotations import type_and_range

if TYPE_CHECKING:
    import omegaconf

    Spec = omegaconf.DictConfig
    Free = object
else:
    Spec, Free = dict[str, Any], Any
"""A component's name and knobs, which are free here (`areal_like.config.registry`); a value of any form."""
Knobs = dict[str, Any]
"""Knob → value, as plain data."""


@dataclass
class Run:
    dir: str
    name: str | None
    seed: Annotated[int, "[0, 18446744073709551615]"]
    steps: Annotated[int, "[0, inf)"]
    max_seconds: Annotated[float, "[0, inf]"] | None
    target_reward: Annotated[float, "[-inf, inf]"] | None
    early_stop: Annotated[int, "[1, inf)"] | None
    max_untrainable: Annotated[int, "[1, inf)"]
    max_nonfinite: Annotated[int, "[1, inf)"]
    max_mismatch: Annotated[float, "(0, inf)"] | None
    changed_data: Literal["refuse", "allow"]
    samples_bytes: Annotated[int, "[0, inf)"]
    trackers: list[str]
    project: str


@dataclass
class Sampling:
    temperature: Annotated[float, "[0, inf)"]
    max_new_tokens: Annotated[int, "[1, inf)"] | None
    stop: list[str]
    stop_ids: list[int]
    keep_stop: bool


@dataclass
class Eval:
    every: Annotated[int, "[0, inf)"]
    prompts: Annotated[int, "[0, inf)"]
    samples: Annotated[int, "[1, inf)"]
    temperature: Annotated[float, "[0, inf)"]
    k: list[int] | None
    right: Annotated[float, "[-inf, inf]"]
    workflow: Spec
    sets: Spec


@dataclass
class Actors:
    count: Annotated[int, "[1, inf)"] | None
    max_restarts: Annotated[int, "[0, inf)"]
    restart_window: Annotated[float, "[0, inf]"]
    threads: Annotated[int, "[1, inf)"] | None


@dataclass
class Rewards:
    workers: Annotated[int, "[0, inf)"]
    timeout: Annotated[float, "[0.01, 1e7]"]
    on_error: Literal["zero", "redraw", "drop"]
    max_unverified: Annotated[float, "(0, 1]"] | None
    memory_limit: Annotated[int, "[67108864, inf)"] | None


@dataclass
class Buffer:
    transport: Literal["auto", "ipc", "tcp"]
    host: str
    port: Annotated[int, "[0, 65535]"]
    max_bytes: Annotated[int, "[1, inf)"]
    heartbeat_timeout: Annotated[float, "[2, 1e7]"]
    lease_timeout: Annotated[float, "[0, 1e7]"]
    journal: Literal["off", "memory", "fsync"]
    keep_journal: bool


@dataclass
class Weights:
    block_bytes: Annotated[int, "[4096, inf)"]
    keep: Annotated[int, "[1, inf)"]
    snapshot_every: Annotated[int, "[1, inf)"]
    sweep_every: Annotated[int, "[1, inf)"]
    probe_every: Annotated[int, "[0, inf)"]
    probe_error: Annotated[float, "(0, inf]"] | None
    overlap: bool
    fanout: Annotated[int, "[0, inf)"] | None


@dataclass
class Security:
    key_folder: str | None


@dataclass
class Checkpoint:
    every: Annotated[int, "[0, inf)"]
    keep: Annotated[int, "[1, inf)"]
    best: str | None


@dataclass
class Config:
    """The tree; the components' specs are free here. At run time it is OmegaConf's DictConfig of this shape."""

    mode: str
    run: Run
    resume: str | None
    replay: str | None
    groups_per_batch: Annotated[int, "[1, 65535]"]
    weight_sync_interval: Annotated[int, "[1, inf)"]
    staleness_policy: Literal["wait", "drop", "requeue", "mask_tokens"]
    inject_staleness: Annotated[int, "[0, inf)"] | None
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

_SHAPES = (Run, Sampling, Eval, Actors, Rewards, Buffer, Weights, Security, Checkpoint)
SECTIONS: dict[str, type] = {shape.__name__.lower(): shape for shape in _SHAPES}

_TYPES = {
    f"{name}.{field.name}".strip("."): str(field.type)
    for name, shape in {"": Config, **SECTIONS}.items()
    for field in dataclasses.fields(shape)
}
RANGES = {key: limits for key, kind in _TYPES.items() if (limits := type_and_range(kind)[1])}
"""Key → the interval of its number (`areal_like.config.annotations`); of knobs see their component."""
TEXTS = {key for key, kind in _TYPES.items() if kind in ("str", "str | None") or kind.startswith("Literal")}
"""Keys of texts: `run.name=0123` is no number, and `buffer.journal=off` no truth value."""
