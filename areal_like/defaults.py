"""Knobs that nobody has set, where what is right depends on what the run trains: filled in when a config is loaded.

    learner.lr             random weights: 2e-3; pretrained: 1e-5; adapters of pretrained (LoRA): 1e-4
    learner.warmup_steps   pretrained: 10 optimizer steps, or half of a shorter schedule's; else 0
    learner.schedule_steps train steps until a `linear` or `cosine` schedule ends: run.steps

A knob that is set, to whatever value, stays as it is. The values are part of the run's config, so a resume or a replay
of it has the same ones. 1e-5 is the upper end of what is usual for full training of language models by RL (1e-6 in
TRL, 1.7e-5 in AReaL's example for 1.5B): fit for the small models that a CPU can train, and for tens of steps rather
than thousands. LoRA wants ten times the rate of full training, whatever the model ("LoRA Without Regret", Thinking
Machines, 2025). Adam's first steps move every weight by about lr, however small the gradient: hence the warm-up.

Imports no torch. Drivers: `areal_like.config` fills in, `scripts.train` says what came out (`describe_learning`).
"""

from __future__ import annotations

from typing import Any

from areal_like.registry import knobs, marks

RANDOM_LR = 2e-3
PRETRAINED_LR = 1e-5
LORA_LR = 10 * PRETRAINED_LR
WARMUP_STEPS = 10
RUINOUS_LR = 1e-4
"""A rate above which full training of a pretrained model is more likely a mistake than meant."""


def is_pretrained(config: Any) -> bool:
    """Whether the run begins with weights that somebody has trained: its model component is marked so."""
    return "pretrained" in marks("model", config["model"]["name"])


def learning_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Dotted key → value, of the learner's knobs that are there and not set."""
    learner = config["learner"]
    known = knobs("learner", learner["name"]) | learner
    pretrained, lora = is_pretrained(config), known.get("lora") is not None
    warmup = WARMUP_STEPS if pretrained else 0
    filled = {"lr": (LORA_LR if lora else PRETRAINED_LR) if pretrained else RANDOM_LR, "warmup_steps": warmup}
    if known.get("schedule", "constant") != "constant":
        steps = config["run"]["steps"] if known.get("schedule_steps") is None else known["schedule_steps"]
        filled["schedule_steps"] = steps
        filled["warmup_steps"] = min(warmup, optimizer_steps(known | {"schedule_steps": steps}) // 2)
    return {f"learner.{knob}": value for knob, value in filled.items() if known.get(knob, "") is None}


def optimizer_steps(known: dict[str, Any]) -> int:
    """Those of a schedule's train steps, by the learner's knobs."""
    per_batch = known.get("num_minibatches", 1) * known.get("num_minibatch_epochs", 1)
    return int(known["schedule_steps"] * per_batch)


def describe_learning(config: Any) -> str:
    """A line for people: with which rate the run will learn, and how it goes. Empty for learners without a rate."""
    known = knobs("learner", config["learner"]["name"]) | dict(config["learner"])
    if known.get("lr") is None:
        return ""
    of = "a pretrained model" if is_pretrained(config) else "random initial weights"
    adapters = ", adapters (LoRA)" if known.get("lora") is not None else ""
    falls = "" if known.get("schedule", "constant") == "constant" else f" over {known['schedule_steps']} train steps"
    parts = [f"learner.lr={known['lr']:g}", f"{known.get('schedule', 'constant')}{falls}"]
    parts += [f"warm-up {known['warmup_steps']} optimizer steps"] if known.get("warmup_steps") else []
    parts += [f"{knob}={known[knob]:g}" for knob in ("weight_decay", "clip_grad") if knob in known]
    return f"learning: {', '.join(parts)} ({of}{adapters})"


def ruinous_rate(config: Any) -> str:
    """What to say of a rate that is likely to ruin a pretrained model; empty for any other."""
    known = knobs("learner", config["learner"]["name"]) | dict(config["learner"])
    if not is_pretrained(config) or known.get("lora") is not None or (known.get("lr") or 0.0) <= RUINOUS_LR:
        return ""
    return (
        f"learner.lr={known['lr']:g} is likely to ruin a pretrained model: usual are 1e-6 to 5e-5 (unset: "
        f"{PRETRAINED_LR:g} with warm-up)"
    )
