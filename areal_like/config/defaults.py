"""Defaults that depend on the model and the machine, filled in when a config is loaded, for knobs that are not set.

    learner.lr             random weights: 2e-3; pretrained: 1e-5; adapters of pretrained (LoRA): 1e-4
    learner.warmup_steps   pretrained: 10 optimizer steps, or half of a shorter schedule's; else 0
    learner.schedule_steps train steps until a `linear` or `cosine` schedule ends: run.steps

    of a large model that is computed on this machine's CPU:
    learner.threads        async: the cores that the actors leave; rounds, in which one side waits for the other: all
    actors.count, .threads one actor with a quarter of the cores; in rounds with all of them. Small models, or others'
                           machines: two actors of one thread; on GPUs as many as `placement` names devices for, or one
    engine.slots           64 per thread of an actor, where the bound lets so many sequences run; 64 at least
    compute_dtype          of learner and engine: bfloat16 for a large pretrained model on CUDA, or a CPU that has it;
                           else float32, on a CPU also for losses whose clip range is finer than its rounding (gspo).
                           An engine on CUDA computes any large model in bfloat16, unless the learner has float32
    loss.proximal          of gspo, unless learner and engine compute in float32: recompute, as in verl

A resume or a replay has the same values, except for defaults of learning that its own settings change."""

import math
from collections.abc import Mapping

from areal_like.config.placement import actors_on
from areal_like.config.registry import marks, with_defaults
from areal_like.config.schema import Config, Knobs
from areal_like.models.model_folder import weight_bytes

RANDOM_LR = 2e-3
PRETRAINED_LR = 1e-5
LORA_LR = 10 * PRETRAINED_LR
"""LoRA needs ten times the rate of full training ("LoRA Without Regret", Thinking Machines, 2025)."""
WARMUP_STEPS = 10


def is_pretrained(config: Config) -> bool:
    return "pretrained" in marks("model", config.model["name"])


LEARNING = ("lr", "warmup_steps", "schedule_steps")


def learning_defaults(config: Config) -> dict[str, object]:
    """Dotted key → value, for knobs that the learner has and that are not set."""
    known = with_defaults("learner", config.learner)
    pretrained, lora = is_pretrained(config), known.get("lora") is not None
    warmup = WARMUP_STEPS if pretrained else 0
    filled: dict[str, object] = {
        "lr": (LORA_LR if lora else PRETRAINED_LR) if pretrained else RANDOM_LR,
        "warmup_steps": warmup,
    }
    if known.get("schedule", "constant") != "constant":
        steps = config.run.steps if known.get("schedule_steps") is None else known["schedule_steps"]
        filled["schedule_steps"] = steps
        filled["warmup_steps"] = min(warmup, optimizer_steps(known | {"schedule_steps": steps}) // 2)
    return {f"learner.{knob}": value for knob, value in filled.items() if known.get(knob, "") is None}


SIZES = tuple(f"learner.{knob}" for knob in ("micro_batch_tokens", "max_logits", "compile", "checkpoint_activations"))
"""The learner measures them on a GPU (`learners.sizing`); a resume or a replay inherits them."""
SLOTS = 64
"""Sequences that one thread decodes at once: with fewer, a decode step costs nearly as much."""
LARGE_PARAMETERS = 20_000_000
"""From here on a model's matrices are large enough for several threads, and for bfloat16, to pay."""


def is_large(config: Config) -> bool:
    """By the size of its files (two bytes per parameter), or by its knobs."""
    known = with_defaults("model", config.model)
    if isinstance(path := known.get("path"), str):
        return weight_bytes(path) >= 2 * LARGE_PARAMETERS
    match [known.get(knob) for knob in ("num_hidden_layers", "hidden_size", "intermediate_size")]:
        case [int(layers), int(hidden), int(inner)]:
            return layers * hidden * (4 * hidden + 3 * inner) >= LARGE_PARAMETERS
    return False


def machine_defaults(config: Config, cores: int, bfloat16: bool, gpu: bool = False) -> dict[str, object]:
    """Dotted key → value, for knobs that exist and are not set, on a machine with `cores` cores. `bfloat16`: they
    multiply faster in it. `gpu`: there is a GPU, on which an engine computes by default."""
    known: dict[str, Knobs] = {
        kind: with_defaults(kind, getattr(config, kind)) for kind in ("learner", "engine", "scheduler", "loss")
    }
    if known["engine"].get("device") == "auto":
        known["engine"]["device"] = "cuda" if gpu else "cpu"
    launcher, large = marks("launcher", config.launcher["name"]), is_large(config)
    here = "ACROSS_HOSTS" not in launcher
    learns, acts = (here and large and _on_cpu(kind, known[kind]) for kind in ("learner", "engine"))
    embedded = {"needs_model", "needs_folder"} & marks("engine", config.engine["name"]) == {"needs_model"}  # no servers
    decodes_on_gpu = embedded and _on_cuda(known["engine"])
    quarter, rounds = cores // 4, known["scheduler"].get("max_staleness") == 0
    shared = learns and acts and not rounds
    actors = config.actors
    few = 1 if acts else actors_on(config.placement, known["engine"]) or (1 if large and decodes_on_gpu else 2)
    count = actors.count or few
    threads = actors.threads or max(1, (quarter if shared else cores) // count if acts else 1)
    found: dict[str, object] = {"actors.count": count, "actors.threads": threads}
    if learns:
        left = max(1, cores - count * threads) if shared and quarter else cores
        found["learner.threads"] = max(1, left // known["learner"].get("ranks", 1))
    found["engine.slots"] = _slots(config, threads, count)
    exact = "clips_finely" in marks("loss", config.loss["name"])
    half = large and is_pretrained(config)
    for kind in ("learner", "engine"):
        half = half and (_on_cuda(known[kind]) or (here and bfloat16 and not exact))
        if kind == "engine" and large and decodes_on_gpu:
            half = known["learner"].get("compute_dtype") != "float32"
        chosen = found[f"{kind}.compute_dtype"] = "bfloat16" if half else "float32"
        half = (known[kind].get("compute_dtype") or chosen) == "bfloat16"  # an engine rounds as its learner does
    if exact and any(_rounds(known[kind], found[f"{kind}.compute_dtype"]) for kind in ("learner", "engine")):
        found["loss.proximal"] = "recompute"
    if _on_cuda(known["learner"]):
        found |= dict.fromkeys(SIZES)
    known["actors"] = {"count": actors.count, "threads": actors.threads}
    places = {key: key.split(".") for key in found}
    return {key: found[key] for key, (kind, knob) in places.items() if known[kind].get(knob, "") is None}


def _slots(config: Config, threads: int, actors: int) -> int:
    size = int(with_defaults("sizing", config.sizing).get("group_size", 1))
    versions: float = 1 + with_defaults("scheduler", config.scheduler).get("max_staleness", 0)  # may be infinite
    allowed = config.groups_per_batch * size * versions / actors
    return max(SLOTS, math.ceil(min(SLOTS * threads, allowed)))


def _on_cpu(kind: str, known: Mapping[str, str]) -> bool:
    return "needs_model" in marks(kind, known["name"]) and known.get("device", "cpu") == "cpu"


def _on_cuda(known: Mapping[str, str]) -> bool:
    return (known.get("device") or "").startswith("cuda")


def _rounds(known: Knobs, chosen: object) -> bool:
    """Whether a learner or an engine computes in less than float32; `chosen` unless a dtype is set."""
    if "dtype" in known:  # of servers: their device chooses
        chosen = "float32" if known["device"] == "cpu" else "bfloat16"
    return (known.get("dtype") or known.get("compute_dtype") or chosen) != "float32"


SHOWN = (
    *("learner.lr", "learner.schedule", "learner.warmup_steps", "learner.threads", "learner.compute_dtype"),
    *("engine.compute_dtype", "engine.slots", "actors.count", "actors.threads", "loss.proximal"),
)
"""Keys with such defaults that `describe_defaults` shows."""


def describe_defaults(config: Config) -> str:
    """A line for people: the values of these defaults."""
    values = [(key, getattr(config, kind).get(knob)) for key in SHOWN for kind, _, knob in [key.partition(".")]]
    return "defaults: " + ", ".join(f"{key}={value}" for key, value in values if value is not None)


def optimizer_steps(known: Mapping[str, int]) -> int:
    """Optimizer steps within a schedule's train steps, from the learner's knobs."""
    per_batch = known.get("num_minibatches", 1) * known.get("num_minibatch_epochs", 1)
    return int(known["schedule_steps"] * per_batch)
