"""Memory that a run needs, device by device, from its config alone: `areal-like train CONFIG --dry-run --devices 8`.

Builds the model without memory (torch's meta device) from its knobs or its folder's config.json. Formulas are of
Llama-like models, for the longest answers that the config allows. Weights and optimizer are exact. Activations count
the tensors that autograd keeps: within a tenth of what torch's allocator gives on a CPU in float32, and gave on a card
in half precision (tests). FSDP and runtimes are not measured.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from areal_like.config.defaults import SLOTS
from areal_like.config.registry import ConfigError, build, with_defaults
from areal_like.config.run_config import Config
from areal_like.launch.plan import RoleSpec
from areal_like.models.model_folder import read_config

Figures = dict[str, float]
"""Bytes by part."""
FLOAT, HALF, GIB = 4, 2, 1 << 30
LOGIT_COPIES = 4
"""Logits, logprobs, probabilities and one product of them are alive at once."""
RUNTIME, SERVER_RUNTIME = 3 << 29, 4 << 30
"""Guesses: CUDA's context, libraries' workspaces, NCCL's buffers and the allocator's gaps of a process on a GPU; that,
activations and CUDA graphs of an SGLang server beside its static memory."""
TOKENS, LOGITS = 16384, 1 << 26
"""Of a learner that is to choose them by free memory; then layers are recomputed, too. It takes more where it can."""
KV_SHARE, SERVER_FRACTION = 0.25, 0.85
"""Shares of a GPU's memory: of the embedded engine for keys and values, of SGLang for its static memory."""


class Lengths(NamedTuple):
    """Tokens of the longest prompt and response."""

    prompt: int
    response: int

    def group(self, size: int) -> int:
        """Of a group whose samples share their prompt."""
        return self.prompt + size * self.response


class Sizes:
    """Of a model: layers, widths, and parameters in all (`count`), of one layer, and outside of layers."""

    def __init__(self, model: Any):
        shape = model.config
        heads = shape.num_attention_heads
        dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        self.layers, self.hidden = shape.num_hidden_layers, shape.hidden_size
        self.inner = getattr(shape, "intermediate_size", 4 * self.hidden)  # GPT-2's
        self.queries = heads * dim
        self.keys = (getattr(shape, "num_key_value_heads", None) or heads) * dim
        self.vocabulary = shape.vocab_size
        from areal_like.models.causal_lm import layers_of

        self.count, self.layer = parameters(model), max(map(parameters, layers_of(model)))
        self.outside = self.count - self.layers * self.layer

    def kv(self, width: int) -> int:
        return 2 * self.layers * self.keys * width


def parameters(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def lengths_of(config: Config) -> Lengths:
    """From the task's knobs, or from a prompt if the task states no lengths of prompts (it makes them)."""
    known, response = with_defaults("task", config.task), config.sampling.max_new_tokens
    if "max_prompt_tokens" in known:
        return Lengths(known["max_prompt_tokens"], response or known["max_tokens"])
    prompt = build("task", config.task, config.run.seed).prompt("train", 0)
    return Lengths(len(prompt.tokens), (response or prompt.max_tokens) + max(prompt.filler, default=0))


def model_of(config: Config) -> Any:
    """The model on the meta device; None where no role computes one. Raises ConfigError."""
    if config.engine["name"] not in ("torch", "sglang") and config.learner["name"] != "torch":
        return None
    spec, seed = config.model, config.run.seed
    with torch.device("meta"):
        if "path" not in spec:
            return build("model", spec, seed, build("task", config.task, seed).vocab_size)
        from transformers import AutoConfig, AutoModelForCausalLM

        read_config(spec["path"])
        shape = AutoConfig.from_pretrained(spec["path"], local_files_only=True)
        try:
            return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        except AssertionError as error:  # e.g. a vocab_size below the id of padding
            key = "model.path"
            raise ConfigError(f"{key}: torch refuses the model of {spec['path']}/config.json: {error}", key) from None


# ---- the learner ----------------------------------------------------------------------------------------------------


def learner_of(config: Config, model: Any) -> Figures:
    known, sizes, longest = with_defaults("learner", config.learner), Sizes(model), lengths_of(config)
    size, ranks = with_defaults("sizing", config.sizing).get("group_size", 1), known["ranks"]
    autocast, halved = _precision(known)
    lora, held = known["lora"], halved and not autocast
    width = HALF if held else FLOAT
    weights = list((model if lora is None else _adapted(model, lora, halved)).parameters())
    trained = sum(p.numel() for p in weights if p.requires_grad)
    frozen = sum(p.nbytes for p in weights if not p.requires_grad)
    wants_reference = (known.get("kl_loss") or known.get("kl_reward")) and not frozen
    groups = math.ceil(config.groups_per_batch / known["num_minibatches"])
    read = longest.group(size) - size  # the last token of a sample predicts nothing
    most = known["micro_batch_tokens"] or TOKENS
    row = min(max(most, sum(longest)), math.ceil(groups * read / ranks))
    paths = math.ceil(groups * size * sum(longest) / ranks)
    copied = paths if row < paths <= most else 0  # else they are not kept (`learners.attention`)
    logits = round(row * size * longest.response / longest.group(size)) * sizes.vocabulary
    copies, owned = (1, width) if ranks == 1 else (2, FLOAT)  # FSDP's shards, and the optimizer's flat copy of each
    lean = known["checkpoint_activations"]
    lean = known["device"] == "cuda" if lean is None else lean
    published = (HALF if known["publish_dtype"] == "bfloat16" else FLOAT) * (known["device"] == "cuda")
    return {
        "weights": (owned * copies * trained + frozen) // ranks,
        "a merged matrix": 3 * FLOAT * sizes.hidden * sizes.inner // ranks if frozen else 0,  # product, update, sum
        "master weights": FLOAT * trained // ranks,
        "Adam's moments": 2 * FLOAT * trained // ranks,
        "gradient": FLOAT * copies * trained // ranks,
        "published bits": published * sizes.count // ranks,
        "reference": width * sizes.count // ranks if wants_reference else 0,
        "weights and gradients of layers": whole_layers(sizes, ranks, not frozen, autocast, halved, lean),
        "activations": activations(sizes, row, copied, autocast, held, lean),
        "logits at once": LOGIT_COPIES * FLOAT * min(logits, max(known["max_logits"] or LOGITS, sizes.vocabulary)),
    }


def _adapted(model: Any, spec: dict[str, Any], halved: bool) -> Any:
    from learners.adapters import Adapters

    model = copy.deepcopy(model)
    with torch.device("meta"):  # they need no memory
        Adapters(model, 0, torch.float32, torch.bfloat16 if halved else None, **spec)
    return model


def _precision(known: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a learner computes under autocast, with states in float32; and whether weights are in bfloat16 while
    layers compute (`learners.sharding.hold_in`), which needs no autocast without adapters."""
    half, lora = known.get("compute_dtype") == "bfloat16", known.get("lora") is not None
    wanted = known.get("param_dtype") or ("bfloat16" if known.get("device") == "cuda" or lora else "float32")
    halved = half and known.get("publish_dtype") == wanted == "bfloat16" and "param_dtype" in known
    return half and (lora or not halved), halved


def whole_layers(sizes: Sizes, ranks: int, every: bool, autocast: bool, halved: bool, lean: bool) -> float:
    """Of one rank, while it computes: weights beyond its shard, and gradients that are not yet summed. FSDP gathers
    two layers at a time and the rest of the model, and sums in float32; autocast keeps a half copy of each weight
    that is not `halved` for the backward pass. `every`: all parameters are trained."""
    two, width = sizes.outside + 2 * sizes.layer, HALF if halved else FLOAT
    gathered = width * two if ranks > 1 else 0
    half = HALF * (two if lean else sizes.count) if autocast and not halved else 0
    moved = (FLOAT + HALF) * sizes.vocabulary * sizes.hidden if every and halved else 0  # the head's gradient
    unsummed = (FLOAT + width) * (sizes.outside + sizes.layer) if ranks > 1 and every else 0
    return gathered + half + max(moved, unsummed)


def activations(sizes: Sizes, row: int, copied: int, autocast: bool, held: bool, lean: bool) -> float:
    """Kept for the backward pass of `row` tokens, and the widest gradients of one layer (of the MLP, as measured). Both
    norms keep input, normalised and scaled value; attention keeps queries, keys, values and its output, and that again
    in the row's order; the MLP keeps gate, up, the activated gate and their product. With shared prefixes, keys and
    values of all `copied` tokens are kept instead (0: not). `lean`: only states between layers are kept."""
    narrow = HALF if autocast or held else FLOAT
    norms = 2 * sizes.hidden * ((FLOAT + HALF if held else 2 * FLOAT) + narrow)
    rest = narrow * (sizes.hidden + 2 * sizes.queries + 4 * sizes.inner)
    layer = row * (norms + rest) + (copied or row) * 2 * sizes.keys * narrow
    once = row * (3 * FLOAT * sizes.hidden + round(1.5 * narrow * sizes.inner))
    between = row * (HALF if held else FLOAT) * sizes.layers * sizes.hidden
    return once + (layer + between if lean else layer * sizes.layers)


# ---- engines --------------------------------------------------------------------------------------------------------


def engine_of(config: Config, model: Any, memory: int) -> Figures:
    """Of an actor's embedded engine, or of one device of its SGLang server, on a device of `memory` bytes (0: unknown);
    with keys and values for one longest sequence at least."""
    longest, known, sizes = sum(lengths_of(config)), with_defaults("engine", config.engine), Sizes(model)
    slots = known["slots"] or SLOTS
    if config.engine["name"] == "sglang":
        width = FLOAT if known["dtype"] == "float32" else HALF
        weights, token = width * sizes.count / known["tp_size"], sizes.kv(width) / known["tp_size"]
        server = {name.replace("_", "-"): value for name, value in (known.get("server") or {}).items()}
        fraction = float(server.get("mem-fraction-static", SERVER_FRACTION))
        cache = fraction * memory - weights if memory else token * slots * longest
        return {"weights": weights, "keys and values": max(cache, token * longest), "runtime": SERVER_RUNTIME}
    narrow = HALF if known["compute_dtype"] == "bfloat16" else FLOAT
    token, tokens = sizes.kv(narrow), min(slots * longest, known["kv_tokens"] or math.inf)
    if known.get("memory") is not None:
        tokens = min(known["kv_tokens"] or math.inf, known["memory"] * GIB // token)
    elif known["kv_tokens"] is None and memory:
        tokens = min(tokens, KV_SHARE * memory // token)
    return {
        "weights": narrow * sizes.layers * sizes.layer + FLOAT * sizes.outside,
        "published bits": HALF * sizes.count if memory else 0,  # of the replica
        "keys and values": token * max(tokens, longest),
        "logits of a step": 3 * FLOAT * slots * sizes.vocabulary,  # and their sum with noise, and logprobs
        "a prefill": 8192 * (4 * FLOAT * sizes.hidden + 3 * narrow * sizes.inner),
        "runtime": RUNTIME,
    }


# ---- the table ------------------------------------------------------------------------------------------------------


def describe(config: Config, roles: Sequence[RoleSpec], model: Any, memory: int) -> str:
    """Devices of `memory` bytes each (0: unknown), the parts of each kind of process, and keys to change where a device
    is too small. Raises ConfigError for a config that peft refuses."""
    uses = dict[bool, Figures]()
    if config.engine["name"] in ("torch", "sglang") and not all(role.essential for role in roles):
        uses[False] = engine_of(config, model, memory)
    if config.learner["name"] == "torch":
        uses[True] = learner_of(config, model) | {"runtime": RUNTIME}
    lines = [f"\nmodel: {parameters(model):,} parameters"]
    on: dict[str, list[RoleSpec]] = {}
    for role in roles:
        unknown = [f"{role.name}.{number}" for number in range(role.gpus)]  # Slurm's or Ray's choice
        for device in unknown if role.devices is None else role.devices:
            on.setdefault(str(device), []).append(role)
    small = list[list[RoleSpec]]()
    if on:
        of = f" of {_size(memory)}" if memory else " (state their size: --device-memory 80GB)"
        lines.append(f"{len(on)} device{'s' * (len(on) > 1)}{of}")
    for device, here in sorted(on.items(), key=lambda item: (item[0].zfill(6), item[0])):
        needed = sum(sum(uses[role.essential].values()) for role in here)
        left = f"{_size(memory - needed)} left" if needed <= memory else f"{_size(needed - memory)} TOO MUCH"
        names = ", ".join(role.name for role in here)
        lines.append(f"  {device:<10}{names:<22}{_size(needed):>10}  {left if memory else ''}")
        small += [here] if needed > memory else []
    for learns, use in uses.items():
        if not on:
            del use["runtime"]  # of a GPU
        parts = ", ".join(f"{name} {_size(value)}" for name, value in use.items() if value)
        whose = "each rank of the learner" if learns else "each device of an actor"
        lines.append(f"{whose}, {_size(sum(use.values()))}: {parts}")
    if on and memory:
        lines += list(_hints(small, config.engine["name"] == "sglang")) or ["it fits"]
    return "\n".join(lines) + "\n"


def _size(value: float) -> str:
    return f"{value / GIB:.1f} GiB" if value >= 0.1 * GIB else f"{value / (1 << 20):.2f} MiB"


def _hints(small: list[list[RoleSpec]], serves: bool) -> Iterator[str]:
    """Keys to change where a device is too `small` for its roles."""
    kinds = {role.essential for roles in small for role in roles}
    if any(len(roles) > 1 for roles in small):
        yield "too small for both: placement={learner: 0, actors: 1} gives learner and actors devices of their own"
    if True in kinds:
        yield (
            "too small for the learner: learner.checkpoint_activations=true, a smaller learner.micro_batch_tokens or "
            "learner.max_logits, more learner.ranks, or learner.lora={rank: 16}"
        )
    if False in kinds:
        yield f"too small for the engine: {'engine.tp_size=2' if serves else 'a smaller engine.kv_tokens'}"
