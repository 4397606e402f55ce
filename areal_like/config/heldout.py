"""Held-out prompts in a config: the section `eval`, its sets, and how each of them is rolled out."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from areal_like.config.registry import ConfigError, as_spec, check, check_knobs, within
from areal_like.config.schema import OWN, Config, Knobs
from areal_like.hub import LOCAL


def eval_set(
    *,
    task: object = None,
    prompts: Annotated[int, "[1, inf)"] = 1,
    samples: Annotated[int, "[1, inf)"] = 1,
    temperature: Annotated[float, "[0, inf)"] = 0.0,
    every: Annotated[int, "[0, inf)"] = 0,
    k: list[Annotated[int, "[1, inf)"]] | None = None,
    right: float = 1.0,
    workflow: object = None,
) -> None:
    """The knobs of one of `eval.sets`. A set has the values of the section `eval` for those that it leaves out."""


def heldout_workflow(config: Config, of_set: object = None) -> Knobs:
    """The run's workflow, with some knobs replaced by `eval.workflow`, and then by those `of_set`."""
    usual = _with_knobs(as_spec(config.workflow), as_spec(config.eval.workflow))
    return _with_knobs(usual, dict(of_set)) if isinstance(of_set, Mapping) else usual


def _with_knobs(spec: Knobs, knobs: Knobs) -> Knobs:
    """The spec with some knobs replaced, at any depth; if `knobs` name another component, they replace all."""
    if knobs.get("name", spec.get("name")) != spec.get("name"):
        return knobs
    both = [key for key, value in knobs.items() if isinstance(value, dict) and isinstance(spec.get(key), dict)]
    return spec | knobs | {key: _with_knobs(spec[key], knobs[key]) for key in both}


def task_spec(config: Config, given: str | Mapping[str, object]) -> Knobs:
    """The spec of a set's task. A file is read like the run's own one, or with the run's tokenizer."""
    if not isinstance(given, str) or not given.endswith(LOCAL):
        return as_spec(given)
    task = as_spec(config.task)
    if task["name"] == "jsonl":
        return {**task, "path": given, **dict.fromkeys(("subset", "split", "heldout_path", "heldout_split"))}
    return {"name": "jsonl", "path": given, "tokenizer": task.get("tokenizer") or config.model.get("path")}


def check_heldout(config: Config) -> None:
    """Raises ConfigError."""
    with within("eval."):
        check("workflow", heldout_workflow(config))
    own = as_spec(config.eval)
    _check_samples("eval", own)
    members = config.task.get("tasks") or ()
    for name, spec in own["sets"].items():
        key = f"eval.sets.{name}"
        if not re.fullmatch(r"[A-Za-z][\w-]*", str(name)) or name in ("train", OWN, *members):
            why = "the name is taken, or has other signs than letters, digits, _ and -"
            raise ConfigError(f"{key}: {why}: choose another one", "eval.sets")
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{key}: got {spec!r}, expected {{task: ..., samples: ..., ...}}", "eval.sets")
        own_knobs = {knob: value for knob, value in spec.items() if knob not in ("task", "workflow")}  # checked below
        check_knobs(f"{__name__}:eval_set", key, own_knobs)
        _check_samples(key, {**own, **spec})
        every, usual = spec.get("every", own["every"]), own["every"]
        if every and (not usual or every % usual):
            raise ConfigError(f"{key}.every: got {every}, expected a multiple of eval.every={usual}", "eval.sets")
        with within(f"{key}.", key):
            _check_task(config, spec.get("task"), list(members))
            check("workflow", heldout_workflow(config, spec.get("workflow")))


def _check_samples(key: str, section: Knobs) -> None:
    samples = section["samples"]
    if wrong := [k for k in section["k"] or () if not 1 <= k <= samples]:
        raise ConfigError(f"{key}.k: pass@{wrong[0]} needs at least as many samples; {key}.samples={samples}", key)
    if section["temperature"] == 0 and samples != 1:
        hint = "set temperature above 0, or samples to 1"
        raise ConfigError(f"{key}: {samples} greedy answers are all the same: {hint}", key)


def _check_task(config: Config, given: object, members: list[str]) -> None:
    if given is None or given in members:
        return
    if not isinstance(given, str | Mapping):
        raise ConfigError(f"task: got {given!r}, expected a file, a task's name or {{name: ..., knobs}}")
    if isinstance(given, str) and given.endswith(LOCAL) and not Path(given).is_file():
        raise ConfigError(f"task: there is no file {given!r}")
    check("task", task_spec(config, given))
