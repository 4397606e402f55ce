"""Estimates what a run needs, from its config alone: memory by role, tokens by step, bytes by message.

    python -m scripts.train CONFIG --dry-run

Builds the model without memory (torch's meta device) from its knobs or its folder's config.json; reads no weights and
no prompts. Weights, optimizer and payloads are exact. Activations, logits and caches assume the longest answers that
the config allows; the learner computes a group's prompt once (`learners.prefixes`). Activations count the large tensors
that autograd keeps (tests: within a factor of 1.5 of the measured size). The runtime's own memory (CUDA, allocator) is
not included.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf

from areal_like.defaults import SLOTS
from areal_like.model_folder import read_config
from areal_like.registry import build, knobs
from areal_like.weights.state import BITS

FLOAT = 4
"""Bytes of a number in the learner and in the embedded engine."""
LOGIT_COPIES = 4
"""Logits, logprobs, probabilities and one product of them are alive at once."""

Figures = dict[str, float]


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


def estimate(config: Any) -> dict[str, Figures]:
    """Section → name → number; names end with their unit in brackets, bytes where there is none.

    Raises ConfigError where model.path has no config.json, ValueError for a config that torch or peft refuse.
    """
    plain = cast(dict[str, Any], OmegaConf.to_container(config))
    longest = lengths_of(plain)
    sections = {"step": step_of(plain, longest), "buffer": buffer_of(plain, longest)}
    model = model_of(plain)
    if model is not None:
        count = sum(p.numel() for p in model.parameters())
        sections["model"] = {"parameters (n)": count, "weight update, per actor": update_bytes(plain, count)}
        if plain["engine"]["name"] == "torch":
            sections["actor"] = actor_of(plain, model.config, count, longest)
        if plain["learner"]["name"] == "torch":
            sections["learner"] = learner_of(plain, model, longest)
    return sections


def lengths_of(plain: dict[str, Any]) -> Lengths:
    """From the task's knobs, or from a prompt if the task states no lengths of prompts (it makes them)."""
    known = knobs("task", plain["task"]["name"]) | plain["task"]
    response = plain["sampling"]["max_tokens"]
    if "max_prompt_tokens" in known:
        return Lengths(known["max_prompt_tokens"], response or known["max_tokens"])
    prompt = build("task", plain["task"], plain["run"]["seed"]).prompt("train", 0)
    return Lengths(len(prompt.tokens), (response or prompt.max_tokens) + max(prompt.filler, default=0))


def model_of(plain: dict[str, Any]) -> Any:
    """The model on the meta device; None where neither role computes one."""
    if plain["engine"]["name"] != "torch" and plain["learner"]["name"] != "torch":
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
    if "max_tokens" in known:
        fitting = max(1, known["max_tokens"] // longest.whole)
        figures["micro-batches at most (n)"] = math.ceil(samples / fitting)
        figures["optimizer steps (n)"] = known["num_minibatches"] * known["num_minibatch_epochs"]
    return figures


def group_size(plain: dict[str, Any]) -> int:
    return (knobs("sizing", plain["sizing"]["name"]) | plain["sizing"]).get("group_size", 1)


def buffer_of(plain: dict[str, Any], longest: Lengths) -> Figures:
    """A payload has 4 bytes per token, and 5 more per token of the response (`areal_like.groups`)."""
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


def actor_of(plain: dict[str, Any], shape: Any, count: int, longest: Lengths) -> Figures:
    engine = knobs("engine", "torch") | plain["engine"]
    slots, most = engine["slots"] or SLOTS, engine["kv_tokens"]
    held = longest.whole * slots if most is None else min(most, longest.whole * slots)
    heads = shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    kv_heads = getattr(shape, "num_key_value_heads", None) or heads
    width = FLOAT if engine["compute_dtype"] == "float32" else FLOAT // 2
    token = 2 * shape.num_hidden_layers * kv_heads * dim * width
    return summed(
        {
            "weights": FLOAT * count,
            "KV cache, per token": token,
            "KV cache, per longest sequence": token * longest.whole,
            f"KV cache, {slots} such sequences": token * held,
        },
        ("weights", f"KV cache, {slots} such sequences"),
    )


def learner_of(plain: dict[str, Any], model: Any, longest: Lengths) -> Figures:
    known = knobs("learner", "torch") | plain["learner"]
    count = sum(p.numel() for p in model.parameters())
    trained = count
    if known["lora"] is not None:
        from learners.adapters import Adapters

        model = copy.deepcopy(model)
        Adapters(model, 0, torch.float32, **known["lora"])
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = 0 if known["lora"] is None else count
    wants_reference = plain["learner"].get("kl_loss") or plain["learner"].get("kl_reward")
    ranks, copies = (
        known["ranks"],
        1 if known["ranks"] == 1 else 2,
    )  # FSDP owns its parts' memory, the optimizer its own
    groups, size = math.ceil(plain["groups_per_batch"] / known["num_minibatches"]), group_size(plain)
    row = min(max(known["max_tokens"], longest.whole), math.ceil(groups * longest.group(size) / ranks))
    paths = math.ceil(groups * size * longest.whole / ranks)
    copied = paths if row < paths <= known["max_tokens"] else 0  # else they are not kept (`learners.attention`)
    share = size * longest.response / longest.group(size)
    layers, layer = model.config.num_hidden_layers, layer_floats(model.config)
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    figures = {
        "ranks, of which one needs (n)": ranks,
        "trained parameters (n)": trained,
        "weights": FLOAT * copies * (trained + held) // ranks,
        "reference": FLOAT * count // ranks if wants_reference and known["lora"] is None else 0,
        "master weights": FLOAT * trained // ranks,
        "Adam's moments": 2 * FLOAT * trained // ranks,
        "gradient": FLOAT * copies * trained // ranks,
        "published versions (host)": 2 * update_bytes(plain, count),
        f"activations of {row} tokens": FLOAT * layers * (row * layer + copied * 2 * key_floats(model.config)),
        "(with checkpointing)": FLOAT * row * (layers * hidden + layer),
        "logits at once": LOGIT_COPIES
        * FLOAT
        * min(round(row * share) * vocabulary, max(known["max_logits"], vocabulary)),
    }
    kept = f"activations of {row} tokens" if known["checkpoint_activations"] else "(with checkpointing)"
    beside = ("ranks, of which one needs (n)", "trained parameters (n)", "published versions (host)", kept)
    return summed(figures, tuple(name for name in figures if name not in beside))


def layer_floats(shape: Any) -> int:
    """Numbers per token that autograd keeps of one layer of a Llama-like model.

    Both norms keep input, normalised and scaled value; attention keeps query, key and value after rotation, and its
    output; the products of the rotation are short-lived. The MLP keeps gate, up, the activated gate and their product.
    """
    heads = shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return 6 * shape.hidden_size + 2 * heads * dim + 2 * key_floats(shape) + 4 * shape.intermediate_size


def key_floats(shape: Any) -> int:
    """Numbers of a token's keys in one layer, or of its values."""
    heads = shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return (getattr(shape, "num_key_value_heads", None) or heads) * dim


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
