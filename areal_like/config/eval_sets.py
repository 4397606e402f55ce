"""The keys of held-out sets (`eval.sets`), and the checks that refuse a wrong one. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from areal_like.config.registry import ConfigError, as_spec, check, nearest

OWN = "heldout"
"""The name of a single task's own set."""
KNOBS = ("task", "prompts", "samples", "temperature", "every", "k", "right", "workflow")
RESERVED = ("train", OWN)
LEAST = {"prompts": 1, "samples": 1, "every": 0, "temperature": 0.0}
_NAME = re.compile(r"[A-Za-z][\w-]*")
_WHOLE = ("prompts", "samples", "every")
Spec = Mapping[str, object]


def task_spec(run_task: Spec, model_path: object, given: str | Spec) -> dict[str, object]:
    """The spec of a set's task. FILE.jsonl is read as the run's own task reads its file, if that is `jsonl`; else with
    the tokenizer of the run's task or model."""
    if not isinstance(given, str) or not given.endswith(".jsonl"):
        return as_spec(given)
    if run_task["name"] == "jsonl":
        return {**run_task, "path": given, "heldout_path": None}
    return {"name": "jsonl", "path": given, "tokenizer": run_task.get("tokenizer") or model_path}


def check_sets(
    own: Spec, run_task: Spec, model_path: object, workflow_of: Callable[[object], Mapping[str, object]]
) -> None:
    """Check the section `eval` with its sets, as far as its text allows. `run_task`: the run's task; `workflow_of`: a
    set's workflow, from the set's knobs for it. Raises ConfigError."""
    _check_ks("eval", own)
    sets, tasks = own["sets"], run_task.get("tasks") or {}
    assert isinstance(sets, Mapping) and isinstance(tasks, Mapping)
    for name, spec in sets.items():
        key = f"eval.sets.{name}"
        if not _NAME.fullmatch(str(name)) or name in RESERVED:
            raise ConfigError(f"{key}: can't be the name of a set; use letters, digits, _ and -", "eval.sets")
        if name in tasks:
            raise ConfigError(f"{key}: a task of the run has this name; choose another one", "eval.sets")
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{key}: want {{task: ..., samples: ..., ...}}, got {spec!r}", "eval.sets")
        for knob, value in spec.items():
            _check_knob(key, str(knob), value)
        _check_ks(key, {**own, **spec})
        every, usual = spec.get("every", own["every"]), own["every"]
        assert isinstance(every, int) and isinstance(usual, int)
        if every and (not usual or every % usual):
            raise ConfigError(
                f"{key}.every={every}: must be a multiple of eval.every={usual}: a round asks the run's own set, too",
                "eval.sets",
            )
        try:
            _check_task(spec.get("task"), run_task, model_path, list(tasks))
            check("workflow", workflow_of(spec.get("workflow")))
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}", key) from None


def _check_knob(key: str, knob: str, value: object) -> None:
    if knob not in KNOBS:
        raise ConfigError(f"{key}: unknown key {knob!r}.{nearest(knob, KNOBS)} There are {', '.join(KNOBS)}", key)
    if knob not in (*LEAST, "right"):
        return
    kind = int if knob in _WHOLE else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= LEAST.get(knob, value):
        least = f" of at least {LEAST[knob]}" if knob in LEAST else ""
        raise ConfigError(f"{key}.{knob}: must be a {'whole ' * (knob in _WHOLE)}number{least}, got {value!r}", key)


def _check_ks(key: str, said: Mapping[str, object]) -> None:
    samples, ks = said["samples"], said["k"]
    if ks is not None and not isinstance(ks, list):
        raise ConfigError(f"{key}.k: want a list such as [1, 4], got {ks!r}", key)
    most = samples if isinstance(samples, int) else 1
    if wrong := [k for k in ks or () if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= most]:
        raise ConfigError(f"{key}.k: pass@{wrong[0]} needs at least as many samples; {key}.samples={samples}", key)
    if said["temperature"] == 0 and samples != 1:
        raise ConfigError(
            f"{key}: {samples} greedy answers are all the same: set temperature above 0, or samples to 1", key
        )


def _check_task(given: object, run_task: Spec, model_path: object, members: list[str]) -> None:
    if given is None or (isinstance(given, str) and given in members):
        return
    if not isinstance(given, str | Mapping):
        raise ConfigError(f"task: want FILE.jsonl, a task's name or {{name: ..., knobs}}, got {given!r}")
    if isinstance(given, str) and given.endswith(".jsonl") and not Path(given).is_file():
        raise ConfigError(f"task: there is no file {given!r}")
    check("task", task_spec(run_task, model_path, given))
