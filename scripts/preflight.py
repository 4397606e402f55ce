"""What can be found out before any process is started: each error here would otherwise show seconds later, in a log."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_like import keys
from areal_like.bus import NODE
from areal_like.config import Config, ConfigError
from areal_like.interfaces import Task
from areal_like.launch.plan import limits
from areal_like.registry import build, knobs
from buffer.sizing import check_sizes


def preflight(config: Config) -> str:
    """Returns what a person should be told before the run begins (empty: nothing). Raises ConfigError, ValueError,
    OSError."""
    build("launcher", config.launcher, Path(config.run.dir), limits(config))
    sizing = build("sizing", config.sizing)
    scheduler = build("scheduler", config.scheduler, sizing)
    check_sizes(sizing, config.groups_per_batch)
    if len(sizing.sizes) > 1 and config.policy["name"] != "in_order":
        raise ConfigError("sizing: a batch of groups of its own size needs policy=in_order", "sizing")
    if config.learner["name"] == "torch" and config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature: greedy rollouts (0) can't be trained on; evaluation may be greedy")
    if config.learner.get("lora") is not None and find_spec("peft") is None:
        raise ConfigError("learner.lora needs peft: pip install 'areal_like[lora]'")
    path = config.model.get("path")
    if path is not None and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path: no Hugging Face model in {path!r} (config.json is missing)")
    if config.security.key_folder:
        keys.server_pair(config.security.key_folder)
        for role in keys.ROLES:
            keys.client_pair(config.security.key_folder, role)
    if config.buffer.transport == "tcp" and config.buffer.port and config.buffer.host != NODE:
        check_port(config.buffer.host, config.buffer.port)
    task = build("task", config.task, config.run.seed)
    if config.engine["name"] == "torch":
        check_lengths(task, config)
    return scheduler.warning() if config.partial_rollout == "resume" else ""


def check_lengths(task: Task, config: Config) -> None:
    """One prompt of each split can be made and, with its longest response, fits the model."""
    positions = positions_of(config.model)
    for split in ("train", "heldout"):
        prompt = task.prompt(split, 0)
        response = config.sampling.max_tokens or prompt.max_tokens
        filler = max(prompt.filler, default=0) if split == "train" else 0
        needed = len(prompt.tokens) + response + filler
        room = config.engine.get("kv_tokens")
        if room is not None and needed > room:
            raise ConfigError(
                f"a {split} prompt with its response needs {needed} tokens: more than engine.kv_tokens={room}"
            )
        if positions is not None and needed > positions:
            raise ConfigError(
                f"a {split} prompt of {len(prompt.tokens)} tokens with a response of up to {response + filler} needs "
                f"{needed} positions; the model has {positions}: lower sampling.max_tokens (or task.max_tokens)"
            )


def positions_of(model: dict[str, Any]) -> int | None:
    """How long a sequence the model can take, from its knobs or its folder; None where that is not said."""
    if model.get("path") is not None:
        return json.loads((Path(model["path"]) / "config.json").read_text()).get("max_position_embeddings")
    known = knobs("model", model["name"]) | dict(model)
    return known.get("max_position_embeddings")


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing can be bound there now. (The buffer has the last word, some seconds later.)"""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a port is at most 65535"
        raise ConfigError(
            f"buffer.port={port}: can't bind to {host}:{port} ({reason}); choose a free port, or 0 for any"
        ) from None
