"""Settings that contradict one another, though each is valid in isolation: refused before any process starts.

The component itself would refuse them, too, but seconds later, when it is built, and in a log.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TypeGuard

from areal_like.config.defaults import optimizer_steps
from areal_like.config.placement import AUTO, needs_of, place
from areal_like.config.placement import KEY as PLACEMENT
from areal_like.config.registry import (
    ConfigError,
    as_spec,
    check,
    check_knobs,
    check_part,
    correction_of,
    is_supervised,
    knobs,
    marks,
    with_defaults,
)
from areal_like.config.schema import OWN, Config
from areal_like.models.model_folder import ROUTED, read_config

_NEVER_NEGATIVE = ("k2", "k3", "k3_reverse", "binary_kl")
Spec = Mapping[str, object]
Problem = tuple[str, str]
"""A knob and its fault."""
_OF_ROLLOUTS = ("critic_lr", "kl_reward", "router_replay", "teacher")
"""Knobs of the learner."""
AGES = "inject_staleness"
_SET_NAME = re.compile(r"[A-Za-z][\w-]*")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def validate_transport(config: Config) -> None:
    """A port, or the address of another interface, needs TCP. Raises ConfigError."""
    buffer, key = config.buffer, "buffer.transport"
    asked = [f"buffer.port={buffer.port}"] if buffer.port else []
    asked += [] if buffer.host in LOOPBACK else [f"buffer.host={buffer.host}"]
    if asked and buffer.transport == "ipc":
        raise ConfigError(f"{key}=ipc has no use for {' and '.join(asked)}: leave that out, or set {key}=tcp", key)


def validate_launcher(config: Config) -> None:
    """Check combinations that can't work in one process, or between several. Raises ConfigError."""
    one_process = "ONE_PROCESS" in marks("launcher", config.launcher["name"])
    if config.buffer.transport == "inproc" and not one_process:
        key = "buffer.transport"
        raise ConfigError(f"{key}=inproc reaches no other process: leave it out, or set launcher=inline", key)
    if not one_process:
        return
    if config.placement != AUTO:
        raise ConfigError(
            f"{PLACEMENT}: launcher=inline has one process, which sees all devices: leave it out", PLACEMENT
        )
    learner, threads = config.learner, config.actors.threads
    if learner.get("ranks", 1) > 1:
        raise ConfigError("learner.ranks: launcher=inline has one process, so 1 rank only", "learner.ranks")
    if (learner.get("threads") or threads) != threads:
        key = "learner.threads"
        raise ConfigError(
            f"{key}: with launcher=inline torch has one number of threads: leave it out, or set {key}={threads}", key
        )


def validate_placement(config: Config) -> None:
    """Devices that the processes can't have on any machine. Raises ConfigError."""
    for spelling in ("base-gpu-id", "base_gpu_id"):
        if spelling in (with_defaults("engine", config.engine).get("server") or {}):
            key = f"engine.server.{spelling}"
            raise ConfigError(f"{key}: {PLACEMENT}.actors says which devices the servers get; leave it out", key)
    if config.actors.count is None:  # not known yet
        return
    placed = place(config.placement, needs_of(config), None)
    if placed and placed.shared and "ACROSS_HOSTS" in marks("launcher", config.launcher["name"]):
        name = config.launcher["name"]
        raise ConfigError(
            f"{PLACEMENT}.share: launcher={name} gives each process devices of its own; share them with launcher=local",
            f"{PLACEMENT}.share",
        )
    known = with_defaults("engine", config.engine)
    room = {str(key).replace("_", "-") for key in known.get("server") or {}} & {"mem-fraction-static"}
    if placed and placed.shared and "server" in known and not room:
        raise ConfigError(
            f"engine.server: a server would take nearly all memory of a device that it shares ({PLACEMENT}.share, "
            "gpu=1x): say how much it may have, such as engine.server={mem-fraction-static: 0.4}, or take engine=torch",
            "engine.server",
        )


def validate_model(config: Config) -> None:
    """Heads share the hidden size and turn pairs of numbers (RoPE); groups of them share keys. Raises ConfigError."""
    known = with_defaults("model", config.model)
    hidden, heads, kv_heads = (
        known.get(knob) for knob in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if isinstance(hidden, int) and isinstance(heads, int) and hidden % (2 * heads):
        key, nearest = "model.hidden_size", 2 * heads * max(1, round(hidden / (2 * heads)))
        why = f"must be a multiple of 2 * model.num_attention_heads={2 * heads}"
        raise ConfigError(f"{key}={hidden}: {why}; the nearest is {nearest}", key)
    if isinstance(kv_heads, int) and isinstance(heads, int) and heads % kv_heads:
        key, fitting = "model.num_key_value_heads", [n for n in range(1, heads + 1) if heads % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - kv_heads))
        why = f"must divide model.num_attention_heads={heads}"
        raise ConfigError(f"{key}={kv_heads}: {why}; the nearest is {nearest}", key)


def validate_words(config: Config) -> None:
    """A judge's address, texts and numbers, the marks of an agent's calls, and a sampler's bounds. Raises
    ConfigError."""
    judge, sampler = with_defaults("group_reward", config.group_reward), with_defaults("sampler", config.sampler)
    if judge["name"] == "judge":
        _validate_judge(judge["compare"], judge["scale"], judge["template"])
        if not str(judge["base_url"]).startswith(("http://", "https://")):
            key = "group_reward.base_url"
            raise ConfigError(f"{key}={judge['base_url']}: want the address of a server, such as http://HOST/v1", key)
    hard, easy = sampler.get("hard_to"), sampler.get("easy_from")
    if isinstance(hard, float) and isinstance(easy, float) and hard >= easy:
        key = "sampler.hard_to"
        raise ConfigError(f"{key}={hard}: a prompt would be hard and easy; want less than easy_from={easy}", key)
    marks_of_calls = config.workflow.get("call_marks") if config.workflow["name"] == "agent" else None
    if marks_of_calls is not None and (len(marks_of_calls) != 2 or not all(marks_of_calls)):
        key = "workflow.call_marks"
        raise ConfigError(f"{key}={list(marks_of_calls)}: want two texts, neither of them empty", key)


def _validate_judge(compare: str, scale: Sequence[float], template: str | None) -> None:
    """Raises ConfigError. `template` None: the judge's own."""
    if len(scale) != 2 or not scale[0] < scale[1]:
        raise ConfigError(
            f"group_reward.scale={list(scale)}: want two numbers, the lower one first", "group_reward.scale"
        )
    if template is None:
        return
    wanted, read = {"first", "second"} if compare == "pairs" else {"answer"}, Template(template)
    if not read.is_valid() or not wanted <= set(read.get_identifiers()):
        names = " and ".join(f"${each}" for each in sorted(wanted))
        raise ConfigError(
            f"group_reward.template must hold {names} (write $$ for a dollar sign)", "group_reward.template"
        )


def validate_training(config: Config) -> None:
    """Check what scheduler, loss, advantage and learner require of one another. Raises ConfigError."""
    known = with_defaults("learner", config.learner)
    if known.get("lora") is not None:
        check_part("learner.lora", known["lora"])
    _validate_teacher(config, known)
    epochs = known.get("num_minibatch_epochs", 1)
    if epochs > 1 and "single_pass" in marks("loss", config.loss["name"]):
        key = "learner.num_minibatch_epochs"
        raise ConfigError(f"{key}: loss={config.loss['name']} diverges with more than 1, got {epochs}", key)
    _validate_correction(config)
    if known.get("schedule", "constant") != "constant" and known.get("schedule_steps") is not None:
        _refuse_warmup(known)
    advantage = config.advantage["name"]
    for knob in ("kl_reward", "overlong_penalty"):
        if advantage == "maxrl" and known.get(knob):
            key = f"learner.{knob}"
            raise ConfigError(f"{key}: advantage=maxrl takes no negative rewards, which this would cause", key)
    if "needs_values" in marks("advantage", advantage) and known.get("critic_lr") == 0:
        key = "learner.critic_lr"
        raise ConfigError(f"advantage={advantage} needs a critic: set {key} above 0", key)
    _validate_shaping(config, known)
    _refuse_lone_samples(config, known)


def _refuse_lone_samples(config: Config, learner: Mapping[str, object]) -> None:
    """Groups of one sample: some advantages learn nothing from them."""
    advantage, sizing, key = config.advantage["name"], with_defaults("sizing", config.sizing), "sizing.group_size"
    learns_else = learner.get("teacher") is not None or "supervised" in marks("loss", config.loss["name"])
    if "teacher" not in learner or learns_else or sizing["name"] != "fixed":  # `learner=timed` learns nothing anyway
        return
    if sizing["group_size"] == 1 and "compares_samples" in marks("advantage", advantage):
        raise ConfigError(
            f"{key}=1: advantage={advantage} compares the samples of one prompt, so all advantages would be 0: "
            "take larger groups, or advantage=batch",
            key,
        )


def _validate_correction(config: Config) -> None:
    """Corrections whose knobs contradict one another or the loss."""
    loss = with_defaults("loss", config.loss)
    found, own = marks("loss", loss["name"]), None
    if "wants_proximal" in found and loss.get("proximal", "recompute") is not None:
        own = "proximal_current"
    elif "ratio_to_behaviour" in found:
        own = "behaviour_current"
    path, spec = "loss.correction", correction_of(config.loss)
    if "supervised" in found and spec["name"] != "none":
        raise ConfigError(f"{path}: demonstrations were sampled by no policy: leave it out", path)
    while spec["name"] != "none":
        chosen = with_defaults("correction", spec)
        if "weight" not in chosen:  # one of the user's own
            return
        problem = problem_of_correction(chosen) or problem_with_loss(chosen, own)
        if problem:
            raise ConfigError(f"{path}.{problem[0]}: {problem[1]}", f"{path}.{problem[0]}")
        path, spec = f"{path}.correction", as_spec(chosen["correction"])


def _validate_teacher(config: Config, learner: Mapping[str, object]) -> None:
    """A teacher that is missing, or that nobody asks."""
    key, wanted = "learner.teacher", "needs_teacher" in marks("advantage", config.advantage["name"])
    teacher = learner.get("teacher")
    if teacher is None:
        if wanted:
            name = config.advantage["name"]
            raise ConfigError(f"advantage={name} needs a teacher: set {key}.path to the folder of a model", key)
        return
    if not isinstance(teacher, Mapping):
        raise ConfigError(f"{key}: expected {{path: FOLDER, knobs}}, got {teacher!r}", key)
    check_part(key, teacher)
    if teacher.get("path") is None:
        raise ConfigError(f"{key}.path: got null, expected the folder of a model", f"{key}.path")
    if not wanted and not teacher.get("top"):
        raise ConfigError(f"{key} has nothing to do: set advantage=distill, or {key}.top above 0", key)


def _validate_shaping(config: Config, learner: Mapping[str, object]) -> None:
    """Knobs that would do nothing, for lack of another."""
    advantage = with_defaults("advantage", config.advantage)
    key, problem = "", ""
    if learner.get("critic_clip") is not None and learner.get("critic_lr") == 0:
        key, problem = "learner.critic_clip", "there is no critic whose values it could clip: set learner.critic_lr"
    if learner.get("kl_cut") is not None and not (learner.get("kl_loss") or learner.get("kl_reward")):
        key, problem = "learner.kl_cut", "there is no KL to cut: set learner.kl_loss or learner.kl_reward"
    if advantage.get("bootstrap") is True and learner.get("overlong_filter") is True:
        key, problem = "advantage.bootstrap", "learner.overlong_filter leaves cut answers out: choose one of the two"
    if advantage.get("deviation_of") == "rewards" and advantage.get("std") is False:
        key, problem = "advantage.deviation_of", "advantage.std=false divides by no deviation: leave one of them out"
    if key:
        raise ConfigError(f"{key}: {problem}", key)


def validate_replay(config: Config) -> None:
    """Router replay needs a model that has experts, and an engine that returns them. Raises ConfigError."""
    known, key = with_defaults("learner", config.learner), "learner.router_replay"
    if config.engine.get("return_experts"):
        problem = f"{key} says whether experts come back: leave this out"
        raise ConfigError(f"engine.return_experts: {problem}", "engine.return_experts")
    if not known.get("router_replay"):
        return
    if known.get("compile"):
        raise ConfigError(f"{key} does not go with learner.compile: leave one of them out", key)
    name = config.engine["name"]
    if "return_experts" not in knobs("engine", name):
        raise ConfigError(f"{key}: engine={name} does not return the experts that its model chooses: leave it out", key)
    path = with_defaults("model", config.model).get("path")
    kind = read_config(path)["model_type"] if isinstance(path, str) else config.model["name"]
    if kind not in ROUTED and (isinstance(path, str) or kind == "qwen2"):
        kinds = ", ".join(sorted(ROUTED))
        raise ConfigError(f"{key}: a model of {kind} has no experts that can be replayed (those of {kinds} have)", key)


def validate_mismatch(config: Config) -> None:
    """Only noise can stay. Raises ConfigError."""
    engine = config.engine
    if engine.get("mismatch_stays") and not isinstance(engine.get("inject_mismatch"), int | float):
        raise ConfigError("engine.mismatch_stays: expected engine.inject_mismatch=NUMBER", "engine.mismatch_stays")


def _refuse_warmup(learner: Mapping[str, int]) -> None:
    """A falling learning rate needs steps in which it falls."""
    steps, warmup = optimizer_steps(learner), learner["warmup_steps"] or 0
    if steps <= warmup:
        key, schedule = "learner.warmup_steps", learner["schedule"]
        raise ConfigError(
            f"{key}={warmup}: learner.schedule={schedule} ends after {steps} optimizer steps; lower the warm-up, or "
            "raise run.steps (learner.schedule_steps)",
            key,
        )


def problem_of_correction(knobs: Mapping[str, object]) -> Problem | None:
    """What makes no sense in the knobs of a correction, all of them given."""
    for found in (_problem_of_weight(knobs), _problem_of_rejection(knobs)):
        if found:
            return found
    if knobs["weight"] == "none" == knobs["reject"] == "none":
        return "weight", "it neither weighs nor rejects: set weight or reject, or leave the correction out"
    return None


def _problem_of_weight(knobs: Mapping[str, object]) -> Problem | None:
    if knobs["weight"] != "none":
        return None
    for knob, off in (("weight_low", 0.0), ("weight_high", math.inf), ("self_normalise", False)):
        if knobs[knob] != off:
            return knob, "there is no weight that it could bound: set weight to token, sequence or geometric"
    return None


def _problem_of_rejection(knobs: Mapping[str, object]) -> Problem | None:
    low, high, what = knobs["low"], knobs["high"], knobs["reject"]
    if what == "none":
        for knob, off in (("low", None), ("high", None), ("over", "token"), ("rejected", "mask")):
            if knobs[knob] != off:
                return knob, "nothing is rejected: set reject to ratio, k1, k2, k3, k3_reverse or binary_kl"
        return None
    if low is None and high is None:
        return "high", f"reject={what} needs a bound: set high, low, or both"
    if what in _NEVER_NEGATIVE and low is not None:
        return "low", f"{what} is never negative, and small where the policies agree: it has no lower bound"
    on_policy = 1.0 if what == "ratio" else 0.0
    if not _number(low, -math.inf) <= on_policy <= _number(high, math.inf):
        return (
            "low" if _number(low, -math.inf) > on_policy else "high",
            f"the bounds must enclose {on_policy:g}, which is {what} where the policies agree, got {low} and {high}",
        )
    return None


def _number(bound: object, otherwise: float) -> float:
    return float(bound) if isinstance(bound, int | float) else otherwise


def problem_with_loss(knobs: Mapping[str, object], own_ratio: str | None) -> Problem | None:
    """A weight that a loss has in its own ratio already (`own_ratio`: behaviour_current, proximal_current, None)."""
    if knobs["weight"] == "none" or own_ratio is None:
        return None
    left = "behaviour_proximal"
    if own_ratio == "behaviour_current":
        return "weight", "the loss has the whole ratio to the behaviour policy itself: only reject, with weight=none"
    if (knobs["pair"] or left) != left:
        return "pair", f"the loss has current/proximal itself, which would count twice: weigh by {left}"
    return None


def validate_supervision(config: Config) -> None:
    """Settings that need rollouts. Raises ConfigError."""
    if not is_supervised(config):
        return
    learner, loss = with_defaults("learner", config.learner), config.loss["name"]
    asked = {
        "run.target_reward": config.run.target_reward is not None,
        "replay": bool(config.replay),
        "inject_staleness": config.inject_staleness is not None,
        "sampling.temperature": config.sampling.temperature != 1.0,
        "group_reward": config.group_reward["name"] != "none",
        "eval.sets": bool(config.eval.sets),
        **{f"learner.{knob}": bool(learner.get(knob)) for knob in _OF_ROLLOUTS},
    }
    for key, is_set in asked.items():
        if is_set:
            raise ConfigError(f"{key}: loss={loss} has neither rollouts nor rewards: leave it out", key)
    if "needs_model" not in marks("learner", config.learner["name"]):
        raise ConfigError(f"learner: loss={loss} needs a learner with a model", "learner")


def shares_of(spec: object) -> list[tuple[int, float]]:
    """(age, share) in the order of ages; shares are above 0, of any sum. Raises ConfigError for no distribution."""
    if _is_age(spec):
        return [(spec, 1.0)]
    if isinstance(spec, dict) and list(spec) == ["uniform"]:
        limits = spec["uniform"]
        if not isinstance(limits, list) or len(limits) != 2 or not all(map(_is_age, limits)) or limits[0] > limits[1]:
            raise ConfigError(f"{AGES}: uniform takes [youngest, oldest], not {limits!r}", AGES)
        return [(age, 1.0) for age in range(limits[0], limits[1] + 1)]
    if not isinstance(spec, dict) or not spec:
        raise ConfigError(f"{AGES}: an age in versions, {{age: share, ...}} or {{uniform: [0, 8]}}, not {spec!r}", AGES)
    try:
        shares = sorted((int(age), float(share)) for age, share in spec.items())
    except (TypeError, ValueError):
        raise ConfigError(f"{AGES}: ages are whole numbers and shares numbers, not {spec!r}", AGES) from None
    if shares[0][0] < 0 or min(share for _, share in shares) <= 0 or abs(sum(s for _, s in shares) - 1.0) > 1e-6:
        raise ConfigError(f"{AGES}: ages are at least 0, shares above 0 and 1 in sum, not {spec!r}", AGES)
    return shares


def _is_age(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def task_spec(
    run_task: Mapping[str, object], model_path: object, given: str | Mapping[str, object]
) -> dict[str, object]:
    """The spec of a set's task. FILE.jsonl is read as the run's own task reads its file, if that is `jsonl`; else with
    the tokenizer of the run's task or model."""
    if not isinstance(given, str) or not given.endswith(".jsonl"):
        return as_spec(given)
    if run_task["name"] == "jsonl":
        return {**run_task, "path": given, "heldout_path": None}
    return {"name": "jsonl", "path": given, "tokenizer": run_task.get("tokenizer") or model_path}


def validate_eval_sets(own: Spec, run_task: Spec, model_path: object, workflow_of: Callable[[object], Spec]) -> None:
    """Check the section `eval` with its sets, as far as its text allows. `run_task`: the run's task; `workflow_of`: a
    set's workflow, from the set's knobs for it. Raises ConfigError."""
    _validate_ks("eval", own)
    sets, tasks = own["sets"], run_task.get("tasks") or {}
    assert isinstance(sets, Mapping) and isinstance(tasks, Mapping)
    for name, spec in sets.items():
        key = f"eval.sets.{name}"
        if not _SET_NAME.fullmatch(str(name)) or name in ("train", OWN):
            raise ConfigError(f"{key}: can't be the name of a set; use letters, digits, _ and -", "eval.sets")
        if name in tasks:
            raise ConfigError(f"{key}: a task of the run has this name; choose another one", "eval.sets")
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{key}: want {{task: ..., samples: ..., ...}}, got {spec!r}", "eval.sets")
        known = {knob: value for knob, value in spec.items() if knob not in ("task", "workflow")}  # checked below
        check_knobs("areal_like.config.schema:eval_set", key, known)
        _validate_ks(key, {**own, **spec})
        every, usual = spec.get("every", own["every"]), own["every"]
        assert isinstance(every, int) and isinstance(usual, int)
        if every and (not usual or every % usual):
            raise ConfigError(
                f"{key}.every={every}: must be a multiple of eval.every={usual}: a round asks the run's own set, too",
                "eval.sets",
            )
        try:
            _validate_task(spec.get("task"), run_task, model_path, list(tasks))
            check("workflow", workflow_of(spec.get("workflow")))
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}", key) from None


def _validate_ks(key: str, said: Mapping[str, object]) -> None:
    samples, ks = said["samples"], said["k"]
    assert ks is None or isinstance(ks, list)
    most = samples if isinstance(samples, int) else 1
    if wrong := [k for k in ks or () if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= most]:
        raise ConfigError(f"{key}.k: pass@{wrong[0]} needs at least as many samples; {key}.samples={samples}", key)
    if said["temperature"] == 0 and samples != 1:
        raise ConfigError(
            f"{key}: {samples} greedy answers are all the same: set temperature above 0, or samples to 1", key
        )


def _validate_task(given: object, run_task: Mapping[str, object], model_path: object, members: list[str]) -> None:
    if given is None or (isinstance(given, str) and given in members):
        return
    if not isinstance(given, str | Mapping):
        raise ConfigError(f"task: want FILE.jsonl, a task's name or {{name: ..., knobs}}, got {given!r}")
    if isinstance(given, str) and given.endswith(".jsonl") and not Path(given).is_file():
        raise ConfigError(f"task: there is no file {given!r}")
    check("task", task_spec(run_task, model_path, given))
