"""Settings that contradict one another, though each is valid in isolation: refused before any process starts."""

import math
from collections.abc import Iterator, Mapping

from areal_like.config.defaults import optimizer_steps
from areal_like.config.placement import KEY as PLACEMENT
from areal_like.config.placement import needs_of, place
from areal_like.config.registry import (
    COMPONENTS,
    PARTS,
    ConfigError,
    as_spec,
    check_knobs,
    correction_of,
    knobs,
    marks,
    with_defaults,
)
from areal_like.config.schema import Config, Knobs
from areal_like.hub import named
from areal_like.models.model_folder import ROUTED, read_config

Problem = tuple[str, str]
"""A key and its fault."""
AGES, BOUND = "inject_staleness", "scheduler.max_staleness"


def refuse_conflicts(config: Config) -> None:
    """Raises ConfigError for the first one."""
    known = {
        kind: with_defaults(kind, getattr(config, kind)) for kind in COMPONENTS.keys() & Config.__annotations__.keys()
    }
    for check in _CHECKS:
        for key, problem in check(config, known):
            raise ConfigError(f"{key}: {problem}", key)


def _of_sections(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    if config.weights.block_bytes % 4096:
        yield "weights.block_bytes", f"got {config.weights.block_bytes}, expected a multiple of 4096"
    age, sizing, scheduler = config.inject_staleness, known["sizing"]["name"], known["scheduler"]
    if age is None:
        return
    if age != (bound := scheduler.get("max_staleness", 0)):
        yield AGES, f"got {age}, expected the bound of {bound} ({BOUND}, mode)"
    if known["batch_policy"]["name"] != "in_order":
        yield AGES, "it gives each batch its own groups: it needs batch_policy=in_order"
    if sizing != "fixed" or scheduler.get("oversample_prompts", 1) != 1:
        yield AGES, "it needs sizing=fixed and no scheduler.oversample_prompts: all places are set"


def _of_transport(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    buffer, key = config.buffer, "buffer.transport"
    asked = [f"buffer.port={buffer.port}"] if buffer.port else []
    asked += [] if buffer.host in ("127.0.0.1", "localhost", "::1") else [f"buffer.host={buffer.host}"]
    if asked and buffer.transport == "ipc":
        yield key, f"ipc has no use for {' and '.join(asked)}: leave that out, or set {key}=tcp"


def _of_devices(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    placed = place(config.placement, needs_of(config), None) if config.actors.count else None  # None: not known yet
    if not placed or not placed.shared:
        return
    name = known["launcher"]["name"]
    if "ACROSS_HOSTS" in marks("launcher", name):
        yield f"{PLACEMENT}.share", f"launcher={name} gives each process devices of its own; launcher=local shares them"
    if "server" in known["engine"] and "mem-fraction-static" not in (known["engine"]["server"] or {}):
        hint = "set engine.server={mem-fraction-static: 0.4}, or take engine=torch"
        yield "engine.server", f"a server would take nearly all memory of a device that it shares: {hint}"


def _of_model(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    model = known["model"]
    hidden, heads, kv_heads = map(model.get, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if hidden and heads and hidden % (2 * heads):
        yield "model.hidden_size", f"got {hidden}, expected a multiple of 2 * model.num_attention_heads={2 * heads}"
    if kv_heads and heads and heads % kv_heads:
        yield "model.num_key_value_heads", f"got {kv_heads}, expected a divisor of model.num_attention_heads={heads}"


def _of_texts(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    calls = known["workflow"].get("call_marks") or ("", "")
    if config.workflow["name"] == "agent" and (len(calls) != 2 or not all(calls)):
        yield "workflow.call_marks", f"got {list(calls)}, expected two texts, neither of them empty"


def _of_learner(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    learner, loss, key = known["learner"], config.loss["name"], "learner.teacher"
    teacher = learner.get("teacher")
    distils = "needs_teacher" in marks("advantage", known["advantage"]["name"])
    for part in ("lora", "teacher"):
        if learner.get(part) is not None:
            check_knobs(PARTS[f"learner.{part}"], f"learner.{part}", learner[part])
    if distils and (teacher is None or teacher.get("path") is None):
        yield f"{key}.path", "got null, expected the folder of a model"
    if teacher is not None and not distils:
        yield key, "it has nothing to do: set advantage=distill"
    if learner.get("num_minibatch_epochs", 1) > 1 and "single_pass" in marks("loss", loss):
        yield "learner.num_minibatch_epochs", f"loss={loss} diverges with more than 1"
    if learner.get("schedule", "constant") != "constant" and learner.get("schedule_steps") is not None:
        steps, warmup = optimizer_steps(learner), learner["warmup_steps"] or 0
        if steps <= warmup:
            yield "learner.warmup_steps", f"got {warmup}, expected fewer than the {steps} steps of learner.schedule"


def _of_advantage(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    learner, name = known["learner"], known["advantage"]["name"]
    for knob in ("kl_reward", "overlong_penalty"):
        if name == "maxrl" and learner.get(knob):
            yield f"learner.{knob}", "advantage=maxrl takes no negative rewards, which this would cause"
    alone = known["sizing"]["name"] == "fixed" and known["sizing"]["group_size"] == 1
    if alone and "compares_samples" in marks("advantage", name) and "teacher" in learner:
        problem = f"advantage={name} compares the samples of one prompt, so all advantages would be 0 with 1 sample"
        yield "sizing.group_size", f"{problem}: take larger groups, or advantage=batch"


def _of_corrections(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    found, own = marks("loss", config.loss["name"]), None
    if "wants_proximal" in found and known["loss"].get("proximal", "recompute") is not None:
        own = "proximal_current"
    elif "ratio_to_behaviour" in found:
        own = "behaviour_current"
    path, spec = "loss.correction", correction_of(config.loss)
    while spec["name"] != "none":
        chosen = with_defaults("correction", spec)
        if "weight" not in chosen:  # one of the user's own
            return
        for knob, problem in problems_of_correction(chosen, own):
            yield f"{path}.{knob}", problem
        path, spec = f"{path}.correction", as_spec(chosen["correction"])


def problems_of_correction(knobs: Knobs, own_ratio: str | None) -> Iterator[Problem]:
    """Contradictions within the knobs of a correction, all of them given, and with the ratio that a loss has already
    (`own_ratio`: behaviour_current, proximal_current, None)."""
    weighs, what, low, high = knobs["weight"] != "none", knobs["reject"], knobs["low"], knobs["high"]
    for knob, unset in {"weight_low": 0.0, "weight_high": math.inf}.items():
        if not weighs and knobs[knob] != unset:
            yield knob, "there is no weight that it could bound: set weight to token, sequence or geometric"
    if what == "none":
        for knob, off in {"low": None, "high": None, "over": "token"}.items():
            if knobs[knob] != off:
                yield knob, "nothing is rejected: set reject to ratio, k1, k2, k3 or k3_reverse"
        if not weighs:
            yield "weight", "it neither weighs nor rejects: set weight or reject, or leave the correction out"
    else:
        yield from _problems_of_bounds(what, low, high)
    if weighs and own_ratio == "behaviour_current":
        yield "weight", "the loss has the whole ratio to the behaviour policy itself: only reject, with weight=none"
    if weighs and own_ratio and knobs["pair"] not in (None, "behaviour_proximal"):
        yield "pair", "the loss has current/proximal itself, which would count twice: weigh by behaviour_proximal"


def _problems_of_bounds(what: str, low: float | None, high: float | None) -> Iterator[Problem]:
    agree = 1.0 if what == "ratio" else 0.0
    enclose = f"the bounds must enclose {agree:g}, which is {what} where the policies agree, got {low} and {high}"
    if low is None and high is None:
        yield "high", f"reject={what} needs a bound: set high, low, or both"
    if low is not None and what in ("k2", "k3", "k3_reverse"):
        yield "low", f"{what} is never negative, and small where the policies agree: it has no lower bound"
    if low is not None and low > agree:
        yield "low", enclose
    if high is not None and high < agree:
        yield "high", enclose


def _of_engine(config: Config, known: Mapping[str, Knobs]) -> Iterator[Problem]:
    """Router replay needs a model that has experts, and an engine that returns them."""
    learner, engine, model, key = known["learner"], known["engine"], known["model"], "learner.router_replay"
    if config.engine.get("return_experts"):
        yield "engine.return_experts", f"{key} says whether experts come back: leave this out"
    if not learner.get("router_replay"):
        return
    if learner.get("compile"):
        yield key, "it does not go with learner.compile: leave one of them out"
    if "return_experts" not in knobs("engine", engine["name"]):
        yield key, f"engine={engine['name']} does not return the experts that its model chooses: leave it out"
    path = None if named(model.get("path")) else model.get("path")
    kind = read_config(path)["model_type"] if path else model["name"]
    if kind not in ROUTED and (path or kind == "qwen2"):
        yield key, f"a model of {kind} has no experts that can be replayed (those of {', '.join(sorted(ROUTED))} have)"


_CHECKS = (
    _of_sections,
    _of_transport,
    _of_devices,
    _of_model,
    _of_learner,
    _of_advantage,
    _of_corrections,
    _of_engine,
    _of_texts,
)
