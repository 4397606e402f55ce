"""Estimates what a run needs, from its config alone: memory by role, tokens by step, bytes by message.

    areal-like train CONFIG --dry-run

Builds the model without memory (torch's meta device) from its knobs or its folder's config.json; reads no weights and
no prompts. Formulas are of Llama-like models. Weights, optimizer and payloads are exact. Activations count the tensors
that autograd keeps: within a tenth of what the allocator shows on a CPU (tests); in half precision they were only
counted. Activations, logits and caches assume the longest answers that the config allows; the learner computes a
group's prompt once (`learners.prefixes`). `scripts.starting.devices` adds the runtime's own memory, device by device.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from omegaconf import OmegaConf

from areal_like.config.defaults import SLOTS
from areal_like.config.registry import ConfigError, build, with_defaults
from areal_like.models.model_folder import read_config
from areal_like.weights.state import BITS

Figures = dict[str, float]
FLOAT, HALF = 4, 2
LOGIT_COPIES = 4
"""Logits, logprobs, probabilities and one product of them are alive at once."""


class Lengths(NamedTuple):
    """Tokens of the longest prompt and response."""

    prompt: int
    response: int

    @property
    def whole(self) -> int:
        return self.prompt + self.response

    def group(self, size: int) -> int:
        """Of a group whose samples share their prompt."""
        return self.prompt + size * self.response


class Sizes:
    """Of a model: layers, widths, and parameters in all (`count`), of one layer, and outside of layers."""

    def __init__(self, model: Any):
        shape = model.config
        heads = shape.num_attention_heads
        dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        self.layers, self.hidden, self.inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        self.queries = heads * dim
        self.keys = (getattr(shape, "num_key_value_heads", None) or heads) * dim
        self.vocabulary = shape.vocab_size
        self.count = numbers(model)
        self.layer = max(map(numbers, model.get_decoder().layers))

    @property
    def outside(self) -> int:
        """Parameters of embedding, head and last norm."""
        return self.count - self.layers * self.layer

    def kv(self, width: int) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.keys * width


def numbers(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def estimate(config: Any, model: Any = None) -> dict[str, Figures]:
    """Section → name → number; names end with their unit in brackets, bytes where there is none. Raises ConfigError
    where model.path has no config.json, ValueError for a config that torch or peft refuse."""
    plain = plain_of(config)
    longest = lengths_of(plain)
    sections = {"step": step_of(plain, longest), "buffer": buffer_of(plain, longest)}
    model = model or model_of(plain)
    if model is not None:
        count = numbers(model)
        sections["model"] = {"parameters (n)": count, "weight update, per actor": update_bytes(plain, count)}
        if plain["engine"]["name"] == "torch":
            sections["actor"] = actor_of(plain, Sizes(model), longest)
        if plain["learner"]["name"] == "torch":
            sections["learner"] = learner_of(plain, model, longest)
    return sections


def plain_of(config: Any) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config))


def knobs_of(plain: dict[str, Any], kind: str) -> dict[str, Any]:
    """All knobs of a component, defaults included."""
    return with_defaults(kind, plain[kind])


def lengths_of(plain: dict[str, Any]) -> Lengths:
    """From the task's knobs, or from a prompt if the task states no lengths of prompts (it makes them)."""
    known, response = knobs_of(plain, "task"), plain["sampling"]["max_new_tokens"]
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
        try:
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except AssertionError as error:  # e.g. a vocab_size below the id of padding
            key = "model.path"
            raise ConfigError(f"{key}: torch refuses the model of {spec['path']}/config.json: {error}", key) from None


def update_bytes(plain: dict[str, Any], count: int) -> int:
    dtype = knobs_of(plain, "learner").get("publish_dtype", "bfloat16")
    return count * np.dtype(BITS[dtype]).itemsize


def group_size(plain: dict[str, Any]) -> int:
    return knobs_of(plain, "sizing").get("group_size", 1)


def step_of(plain: dict[str, Any], longest: Lengths) -> Figures:
    groups, size, known = plain["groups_per_batch"], group_size(plain), knobs_of(plain, "learner")
    figures: Figures = {
        "groups (n)": groups,
        "samples (n)": groups * size,
        "longest sequence (tokens)": longest.whole,
        "tokens at most (tokens)": groups * size * longest.whole,
        "of these with each prompt once (tokens)": groups * longest.group(size),
    }
    if "micro_batch_tokens" in known:
        figures["optimizer steps (n)"] = known["num_minibatches"] * known["num_minibatch_epochs"]
    return figures


def buffer_of(plain: dict[str, Any], longest: Lengths) -> Figures:
    """A payload has 4 bytes per token, and 5 more per token of the response (`areal_like.wire.groups`)."""
    group = group_size(plain) * (4 * longest.whole + 5 * longest.response)
    batch = plain["groups_per_batch"] * group
    admitted = (knobs_of(plain, "scheduler").get("max_staleness", 0) + 1) * plain["weight_sync_interval"]
    return {
        "group at most": group,
        "batch at most": batch,
        "batches that the bound admits (n)": admitted,
        "all of them at most": admitted * batch,
        "buffer.max_bytes": plain["buffer"]["max_bytes"],
    }


def actor_of(plain: dict[str, Any], sizes: Sizes, longest: Lengths) -> Figures:
    """Of the embedded engine: matrices of layers in its compute_dtype, the rest in float32."""
    engine = knobs_of(plain, "engine")
    slots, width = engine["slots"] or SLOTS, HALF if engine["compute_dtype"] == "bfloat16" else FLOAT
    token, weights = sizes.kv(width), width * sizes.layers * sizes.layer + FLOAT * sizes.outside
    cache = token * min(engine["kv_tokens"] or math.inf, longest.whole * slots)
    return {
        "weights": weights,
        "KV cache, per token": token,
        "KV cache, per longest sequence": token * longest.whole,
        f"KV cache, {slots} such sequences": cache,
        "sum": weights + cache,
    }


def learner_of(plain: dict[str, Any], model: Any, longest: Lengths) -> Figures:
    """Of one rank."""
    known, sizes, size = knobs_of(plain, "learner"), Sizes(model), group_size(plain)
    ranks, precision = known["ranks"], Precision.of(known)
    trained, frozen = (sizes.count, 0) if known["lora"] is None else (_adapted(model, known["lora"]), sizes.count)
    wants_reference = known.get("kl_loss") or known.get("kl_reward")
    groups = math.ceil(plain["groups_per_batch"] / known["num_minibatches"])
    read = longest.group(size) - size  # the last token of a sample predicts nothing
    row = min(max(known["micro_batch_tokens"], longest.whole), math.ceil(groups * read / ranks))
    paths = math.ceil(groups * size * longest.whole / ranks)
    copied = paths if row < paths <= known["micro_batch_tokens"] else 0  # else they are not kept (`learners.attention`)
    logits = round(row * size * longest.response / longest.group(size)) * sizes.vocabulary
    lean = known["checkpoint_activations"]
    parts = {
        **training_state(trained, frozen, ranks, precision),
        "reference": precision.weight * sizes.count // ranks if wants_reference and not frozen else 0,
        "weights and gradients of layers": whole_layers(sizes, trained, ranks, precision, lean),
        f"activations of {row} tokens": activations(sizes, row, copied, precision, lean),
        "logits at once": LOGIT_COPIES * FLOAT * min(logits, max(known["max_logits"], sizes.vocabulary)),
    }
    counts = {"ranks, of which one needs (n)": ranks, "trained parameters (n)": trained}
    host = {"published versions (host)": 2 * update_bytes(plain, sizes.count)}
    return counts | parts | host | {"sum": sum(parts.values())}


def _adapted(model: Any, spec: dict[str, Any]) -> int:
    """Parameters of a model's adapters."""
    from learners.adapters import Adapters

    model = copy.deepcopy(model)
    with torch.device("meta"):  # they need no memory
        Adapters(model, 0, torch.float32, **spec)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class Precision(NamedTuple):
    """How a learner computes: all in float32; under autocast, with float32 weights; or `held`, with weights and states
    between layers in bfloat16 (`learners.sharding.hold_in`). `weight`: bytes of one while its layer computes."""

    autocast: bool
    held: bool
    weight: int

    @classmethod
    def of(cls, known: dict[str, Any]) -> Precision:
        """From a learner's knobs."""
        half = known.get("compute_dtype") == "bfloat16"
        lossless = half and known.get("publish_dtype") == "bfloat16" and known.get("lora") is None
        wanted = known.get("param_dtype") or ("bfloat16" if known.get("device") == "cuda" else "float32")
        held = lossless and "param_dtype" in known and wanted == "bfloat16"
        return cls(half and not held, held, HALF if held else FLOAT)


def training_state(trained: int, frozen: int, ranks: int, precision: Precision) -> Figures:
    """Of one rank, between steps: `trained` and `frozen` parameters (adapters and the rest, with LoRA). FSDP owns its
    shards of weights and gradients in float32, the optimizer a flat copy of each (`learners.optim`)."""
    copies, weight = (1, precision.weight) if ranks == 1 else (2, FLOAT)
    return {
        "weights": (weight * copies * trained + FLOAT * frozen) // ranks,
        "master weights": FLOAT * trained // ranks,
        "Adam's moments": 2 * FLOAT * trained // ranks,
        "gradient": FLOAT * copies * trained // ranks,
    }


def whole_layers(sizes: Sizes, trained: int, ranks: int, precision: Precision, checkpointing: bool) -> float:
    """Of one rank, while it computes: weights beyond its shard, and gradients that are not yet summed. FSDP gathers the
    rest of the model for the whole pass, and two layers at a time; gradients are summed in float32. Autocast
    keeps a half copy of each weight for the backward pass."""
    two, every = sizes.outside + 2 * sizes.layer, trained == sizes.count
    gathered = precision.weight * two if ranks > 1 else 0
    cast = HALF * (two if checkpointing else sizes.count) if precision.autocast else 0
    head = sizes.vocabulary * sizes.hidden if every and precision.held else 0
    moved = head * (FLOAT + HALF)  # the head's gradient, before it is added to the buffer
    unsummed = (FLOAT + precision.weight) * (sizes.outside + sizes.layer) if ranks > 1 and every else 0
    return gathered + cast + max(moved, unsummed)


def activations(sizes: Sizes, row: int, copied: int, precision: Precision, checkpointing: bool) -> float:
    """Kept for the backward pass of `row` tokens, and the widest gradients of one layer (of the MLP, as measured). Both
    norms keep input, normalised and scaled value; attention keeps queries, keys, values and its output, and that again
    in the row's order; the MLP keeps gate, up, the activated gate and their product. Of sequences that share prefixes,
    the keys and values of all `copied` tokens are kept instead (0: they are not, see `learners.attention`)."""
    narrow = HALF if precision.autocast or precision.held else FLOAT
    norms = 2 * sizes.hidden * ((FLOAT + HALF if precision.held else 2 * FLOAT) + narrow)
    rest = narrow * (sizes.hidden + 2 * sizes.queries + 4 * sizes.inner)
    layer = row * (norms + rest) + (copied or row) * 2 * sizes.keys * narrow
    once = row * (3 * FLOAT * sizes.hidden + round(1.5 * narrow * sizes.inner))
    between = row * precision.weight * sizes.layers * sizes.hidden  # states between layers
    return once + (layer + between if checkpointing else layer * sizes.layers)


def describe(sections: dict[str, Figures]) -> str:
    """A table of all figures."""
    lines = []
    for section, figures in sections.items():
        lines += [f"\n{section}", *(f"  {name:<40}{shown(name, value):>16}" for name, value in figures.items())]
    buffer = sections["buffer"]
    if buffer["buffer.max_bytes"] < buffer["batch at most"]:
        lines.append("\nA batch of longest answers is larger than buffer.max_bytes: rollouts would wait. Raise it.")
    return "\n".join(lines)


def shown(name: str, value: float) -> str:
    if name.endswith(("(n)", "(tokens)")):
        return f"{value:,.0f}"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"
