"""Estimates what a run needs, from its config alone: memory by role, tokens by step, bytes by message.

    python -m scripts.train CONFIG --dry-run

Builds the model without memory (torch's meta device) from its knobs or its folder's config.json; reads no weights and
no prompts. Weights, optimizer and payloads are exact. Activations, logits and caches assume the longest answers that
the config allows; the learner computes a group's prompt once (`learners.prefixes`). What training holds is within a
tenth of the measured size (`scripts.starting.memory`). The runtime's own memory (CUDA, allocator) is not included;
`scripts.starting.devices` adds it, device by device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf

from areal_like.config.defaults import SLOTS
from areal_like.config.registry import build, knobs
from areal_like.models.model_folder import read_config
from areal_like.weights.state import BITS

from .memory import (
    FLOAT,
    HALF,
    LOGIT_COPIES,
    Figures,
    Precision,
    Sizes,
    activations,
    embedded_engine,
    training_state,
    whole_layers,
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the longest prompt and response."""

    prompt: int
    response: int

    @property
    def whole(self) -> int:
        return self.prompt + self.response

    def group(self, size: int) -> int:
        """Of a group whose samples share their prompt."""
        return self.prompt + size * self.response

    def inputs(self, size: int) -> int:
        """Of these, what the learner's model reads: the last token of a sample predicts nothing."""
        return self.prompt + size * (self.response - 1)


def estimate(config: Any, model: Any = None) -> dict[str, Figures]:
    """Section → name → number; names end with their unit in brackets, bytes where there is none.

    Raises ConfigError where model.path has no config.json, ValueError for a config that torch or peft refuse.
    """
    plain = plain_of(config)
    longest = lengths_of(plain)
    sections = {"step": step_of(plain, longest), "buffer": buffer_of(plain, longest)}
    model = model or model_of(plain)
    if model is not None:
        count = sum(p.numel() for p in model.parameters())
        sections["model"] = {"parameters (n)": count, "weight update, per actor": update_bytes(plain, count)}
        if plain["engine"]["name"] == "torch":
            sections["actor"] = actor_of(plain, Sizes.of(model), longest)
        if plain["learner"]["name"] == "torch":
            sections["learner"] = learner_of(plain, model, longest)
    return sections


def plain_of(config: Any) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config))


def lengths_of(plain: dict[str, Any]) -> Lengths:
    """From the task's knobs, or from a prompt if the task states no lengths of prompts (it makes them)."""
    known = knobs("task", plain["task"]["name"]) | plain["task"]
    response = plain["sampling"]["max_new_tokens"]
    if "max_prompt_tokens" in known:
        return Lengths(known["max_prompt_tokens"], response or known["max_tokens"])
    prompt = build("task", plain["task"], plain["run"]["seed"]).prompt("train", 0)
    return Lengths(len(prompt.tokens), (response or prompt.max_tokens) + max(prompt.filler, default=0))


def model_of(plain: dict[str, Any]) -> Any:
    """The model on the meta device; None where no role computes one."""
    if plain["engine"]["name"] not in ("torch", "sglang") and plain["learner"]["name"] != "torch":
        return None
    spec, seed = plain["model"], plain["run"]["seed"]
    with torch.device("meta"):
        if "path" not in spec:
            return build("model", spec, seed, build("task", plain["task"], seed).vocab_size)
        from transformers import AutoConfig, AutoModelForCausalLM

        read_config(spec["path"])
        config = AutoConfig.from_pretrained(spec["path"], local_files_only=True)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def update_bytes(plain: dict[str, Any], count: int) -> int:
    known = knobs("learner", plain["learner"]["name"]) | plain["learner"]
    return count * np.dtype(BITS[known.get("publish_dtype", "bfloat16")]).itemsize


def step_of(plain: dict[str, Any], longest: Lengths) -> Figures:
    samples = plain["groups_per_batch"] * group_size(plain)
    known = knobs("learner", plain["learner"]["name"]) | plain["learner"]
    figures: Figures = {
        "groups (n)": plain["groups_per_batch"],
        "samples (n)": samples,
        "longest sequence (tokens)": longest.whole,
        "tokens at most (tokens)": samples * longest.whole,
        "of these with each prompt once (tokens)": plain["groups_per_batch"] * longest.group(group_size(plain)),
        "trained tokens at most (tokens)": samples * longest.response,
    }
    if "micro_batch_tokens" in known:
        fitting = max(1, known["micro_batch_tokens"] // longest.whole)
        figures["micro-batches at most (n)"] = math.ceil(samples / fitting)
        figures["optimizer steps (n)"] = known["num_minibatches"] * known["num_minibatch_epochs"]
    return figures


def group_size(plain: dict[str, Any]) -> int:
    return (knobs("sizing", plain["sizing"]["name"]) | plain["sizing"]).get("group_size", 1)


def buffer_of(plain: dict[str, Any], longest: Lengths) -> Figures:
    """A payload has 4 bytes per token, and 5 more per token of the response (`areal_like.wire.groups`)."""
    group = group_size(plain) * (4 * longest.whole + 5 * longest.response)
    batch = plain["groups_per_batch"] * group
    known = knobs("scheduler", plain["scheduler"]["name"]) | plain["scheduler"]
    ahead = known.get("max_staleness", 0)
    return {
        "group at most": group,
        "batch at most": batch,
        "batches that the bound admits (n)": (ahead + 1) * plain["weight_sync_interval"],
        "all of them at most": (ahead + 1) * plain["weight_sync_interval"] * batch,
        "buffer.max_bytes": plain["buffer"]["max_bytes"],
    }


def actor_of(plain: dict[str, Any], sizes: Sizes, longest: Lengths) -> Figures:
    engine = knobs("engine", "torch") | plain["engine"]
    slots, half = engine["slots"] or SLOTS, engine["compute_dtype"] == "bfloat16"
    token = sizes.kv(HALF if half else FLOAT)
    held = min(engine["kv_tokens"] or math.inf, longest.whole * slots)
    return summed(
        {
            "weights": embedded_engine(sizes, half),
            "KV cache, per token": token,
            "KV cache, per longest sequence": token * longest.whole,
            f"KV cache, {slots} such sequences": token * held,
        },
        ("weights", f"KV cache, {slots} such sequences"),
    )


def learner_of(plain: dict[str, Any], model: Any, longest: Lengths) -> Figures:
    known = knobs("learner", "torch") | plain["learner"]
    sizes, ranks, precision = Sizes.of(model), known["ranks"], Precision.of(known)
    trained, frozen = trained_of(known, model, sizes)
    wants_reference = plain["learner"].get("kl_loss") or plain["learner"].get("kl_reward")
    groups, size = math.ceil(plain["groups_per_batch"] / known["num_minibatches"]), group_size(plain)
    row = min(max(known["micro_batch_tokens"], longest.whole), math.ceil(groups * longest.inputs(size) / ranks))
    paths = math.ceil(groups * size * longest.whole / ranks)
    copied = paths if row < paths <= known["micro_batch_tokens"] else 0  # else they are not kept (`learners.attention`)
    logits = round(row * size * longest.response / longest.group(size)) * sizes.vocabulary
    lean = known["checkpoint_activations"]
    kept, other = f"activations of {row} tokens", "(without checkpointing)" if lean else "(with checkpointing)"
    figures = {
        "ranks, of which one needs (n)": ranks,
        "trained parameters (n)": trained,
        **training_state(sizes, trained, frozen, ranks, precision),
        "reference": precision.weight * sizes.count // ranks if wants_reference and not frozen else 0,
        "weights and gradients of layers": whole_layers(sizes, trained, ranks, precision, lean),
        kept: activations(sizes, row, copied, precision, lean),
        other: activations(sizes, row, copied, precision, not lean),
        "logits at once": LOGIT_COPIES * FLOAT * min(logits, max(known["max_logits"], sizes.vocabulary)),
        "published versions (host)": 2 * update_bytes(plain, sizes.count),
    }
    beside = ("ranks, of which one needs (n)", "trained parameters (n)", "published versions (host)", other)
    return summed(figures, tuple(name for name in figures if name not in beside))


def trained_of(known: dict[str, Any], model: Any, sizes: Sizes) -> tuple[int, int]:
    """Parameters that are trained, and that are not."""
    return (sizes.count, 0) if known["lora"] is None else (adapted(model, json.dumps(known["lora"])), sizes.count)


@functools.lru_cache(maxsize=8)
def adapted(model: Any, lora: str) -> int:
    """Parameters of a model's adapters. Kept: advice asks often, and a model of 32B takes seconds."""
    from learners.adapters import Adapters

    model, spec = copy.deepcopy(model), json.loads(lora)
    made = contextlib.nullcontext() if spec.get("path") else torch.device("meta")  # new ones need no memory
    with made:
        Adapters(model, 0, torch.float32, **spec)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def summed(figures: Figures, parts: tuple[str, ...]) -> Figures:
    return figures | {"sum": sum(figures[name] for name in parts)}


def describe(sections: dict[str, Figures]) -> str:
    """A table for people."""
    lines = []
    for section, figures in sections.items():
        lines.append(f"\n{section}")
        lines += [f"  {name:<36}{shown(name, value):>16}" for name, value in figures.items()]
    buffer = sections["buffer"]
    if buffer["buffer.max_bytes"] < buffer["batch at most"]:
        lines.append("\nA batch of longest answers is larger than buffer.max_bytes: rollouts would wait. Raise it.")
    return "\n".join(lines)


def shown(name: str, value: float) -> str:
    if name.endswith(")") and name.rpartition("(")[2] in ("n)", "tokens)"):
        return f"{value:,.0f}"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"
