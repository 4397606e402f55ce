"""Checks before any process starts, of the machine, files and tasks: `areal_like.config` has checked the values."""

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from actors.reward_pool import RewardError, RewardPool
from actors.rewards import reward_function
from areal_like.config.heldout import heldout_workflow
from areal_like.config.registry import build, check, check_function, marks, with_defaults, within
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from areal_like.interfaces import PooledTask, Task
from areal_like.launch.children import limits
from areal_like.models import model_folder
from areal_like.tasks.generated import GeneratedPrompts
from areal_like.tasks.heldout import HeldoutSet, sets_of
from areal_like.tasks.text import load_tokenizer
from areal_like.wire import keys
from buffer.schedulers import Scheduler
from buffer.sizing import Sizing, check_sizes
from learners.probe import PROMPTS

from .gpus import Gpus, gpus_here, sharing

LEAST_BYTES = 13
"""Fewest bytes of a sample in the buffer: one token of a prompt and one of a response (`areal_like.wire.groups`)."""
SPLITS = ("train", "heldout")
ROWS = 256
"""Most prompts of each split to check without `rows_beyond`; of held-out ones those asked, one of a generated task."""

_TRIED = set[str]()
"""Tasks, with limits, whose rewards work or whose prompts fit: an ablation checks many configs of one task."""


def preflight(config: Config, gpus: Gpus | None = None) -> tuple[str, dict[str, str]]:
    """Check everything, with `gpus` in place of this machine's. Returns warnings for the user (empty: none), and the
    digests of the task's rows. Raises ConfigError, ValueError, OSError."""
    build("launcher", config.launcher, Path(config.run.dir), limits(config))
    sizing = _built("sizing", config.sizing, Sizing)
    _built("scheduler", config.scheduler, Scheduler, sizing)
    check_batch(config, sizing)
    if config.learner["name"] == "torch" and config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature: got 0, expected more: greedy rollouts can't be trained on")
    check_packages(config)
    check_devices(config, gpus)
    check_workflows(config)
    if config.security.key_folder:
        keys.server_pair(config.security.key_folder)
        for role in keys.ROLES:
            keys.client_pair(config.security.key_folder, role)
    task = build("task", config.task, config.run.seed)
    check_teacher(config, task)
    model = model_config(config)
    check_texts(task, config)
    check_lengths(task, asked_prompts(task, sets_of(config, task)), config, model)
    if model is not None:
        path = config.model["path"]
        model_folder.check_weights(path)
        _check_vocabulary("model.path", path, model, task)
    check_rewards(task, config)
    notes = list(sharing(config))
    if (rows := task.size("train")) < (size := config.groups_per_batch):
        notes.append(f"groups_per_batch={size}: there are {rows} training prompts, so a batch repeats them")
    return "; ".join(notes), digests_of(task)


def digests_of(task: Task) -> dict[str, str]:
    """Of its rows, by split, and by the names of a mixture's tasks; none of generated ones."""
    members = {name: each for name, each in getattr(task, "members", {"": task}).items() if hasattr(each, "digests")}
    return {f"{name} {split}".strip(): text for name in members for split, text in members[name].digests().items()}


def _built(kind: str, spec: Mapping[str, Any], base: type, *args: object) -> Any:
    made = build(kind, spec, *args)
    if not isinstance(made, base):
        wanted = f"{base.__module__}.{base.__name__}"
        raise ConfigError(f"{kind}={spec['name']} does not inherit from {wanted}: see docs/extending.md", kind)
    return made


def check_batch(config: Config, sizing: Sizing) -> None:
    """Check that the buffer can hold a batch, even one of the shortest prompts and answers."""
    check_sizes(sizing, config.groups_per_batch)
    if len(sizing.sizes) > 1 and config.batch_policy["name"] != "in_order":
        raise ConfigError("sizing: a group size that changes from batch to batch needs batch_policy=in_order", "sizing")
    key, room = "groups_per_batch", config.buffer.max_bytes // LEAST_BYTES
    if config.groups_per_batch * sizing.group_size > room:
        size = f"{key}={config.groups_per_batch} groups of sizing.group_size={sizing.group_size}"
        raise ConfigError(f"{size} can never fill: at most {room} samples fit in buffer.max_bytes", key)


def check_packages(config: Config) -> None:
    """Raises ConfigError for an unknown tracker, and where an optional package is missing that a setting needs."""
    with within("run.trackers: ", "run.trackers"):
        for name in config.run.trackers:
            check("tracker", {"name": name})
    for key, package, extra, is_needed in (
        ("learner.lora", "peft", "lora", config.learner.get("lora") is not None),
        ("workflow=agent", "aiohttp", "openai", config.workflow["name"] == "agent"),
        *((f"run.trackers={name}", name, name, ":" not in name) for name in config.run.trackers),
    ):
        if is_needed and find_spec(package) is None:
            raise ConfigError(f"{key} needs {package}: pip install 'areal_like[{extra}]'", key.partition("=")[0])


def check_devices(config: Config, stated: Gpus | None) -> None:
    """Check that CUDA devices exist where the config asks for them: on this machine, or those that are stated."""
    known = {kind: with_defaults(kind, getattr(config, kind)) for kind in ("learner", "engine")}
    asked = [kind for kind, each in known.items() if each.get("device") == "cuda" and not each.get("url")]
    if not asked or "ACROSS_HOSTS" in marks("launcher", config.launcher["name"]):
        return
    key, gpus = f"{asked[0]}.device", stated or gpus_here()
    if not gpus.count:
        why = "torch sees no CUDA device (see nvidia-smi)" if gpus.cuda else "this torch is built without CUDA"
        remedy = f"{key}=cpu" if config.gpu in (None, "none") else "gpu=none"
        raise ConfigError(f"{key}=cuda: {why}; make one visible, or set {remedy}", key)


def check_workflows(config: Config) -> None:
    """Check that functions and programs named by workflows exist, and that environments can be made."""
    for prefix, spec in (("workflow", config.workflow), ("eval.workflow", heldout_workflow(config))):
        key, environment = f"{prefix}.environment", spec.get("environment")
        if spec["name"] == "agent":
            check_agent(f"{prefix}.agent", spec["agent"])
        if environment:
            for tool in environment.get("tools", ()):
                if ":" in tool:
                    check_function(f"{key}.tools", tool)
            try:
                build("environment", environment)
            except UserError:
                raise
            except (Exception, SystemExit) as error:
                raise ConfigError(f"{key}={environment['name']} can't be made: {error!r}", key) from error
        elif "needs_environment" in marks("task", config.task["name"]):  # never a mixture
            wanted = f"{prefix}={{name: multi_turn, environment: {{name: MODULE:CLASS}}}}"
            raise ConfigError(f"{key}: task={config.task['name']} has no rewards of its own; set {wanted}", key)


def check_agent(key: str, agent: str | Sequence[str]) -> None:
    if isinstance(agent, str):
        if not check_function(key, agent):
            raise ConfigError(f"{key}={agent} is no async function; give a blocking program as a command (a list)", key)
    elif not agent or shutil.which(agent[0]) is None:
        raise ConfigError(f"{key}: there is no program {agent[0] if agent else ''!r} to start", key)


def check_texts(task: Task, config: Config) -> None:
    """Check that the task has the text that workflows need, and an end of answers."""
    codec, name = task.prompt("train", 0).codec, config.task["name"]
    stops = task.stop_tokens  # raises ValueError where a tokenizer names no end of answers
    if config.sampling.stop and (codec is None or "" in config.sampling.stop):
        wanted = "texts" if codec else f"no text: task={name} has none"
        raise ConfigError(f"sampling.stop: got {list(config.sampling.stop)}, expected {wanted}", "sampling.stop")
    if any(not 0 <= token < task.vocab_size for token in config.sampling.stop_ids):
        found = f"got {list(config.sampling.stop_ids)}, expected tokens from 0 to {task.vocab_size - 1}"
        raise ConfigError(f"sampling.stop_ids: {found}", "sampling.stop_ids")
    for prefix, spec in (("workflow", config.workflow), ("eval.workflow", heldout_workflow(config))):
        needed = {"multi_turn": "reply", "agent": "opening"}.get(spec["name"])
        if needed and not hasattr(codec, needed):
            raise ConfigError(f"{prefix}={spec['name']} needs a task with text, e.g. jsonl, not {name}", prefix)
        if needed and (marks := getattr(codec, "stray_marks", "")):
            fact = f"the chat template writes {marks!r} before an answer, so no turn can follow"
            raise ConfigError(f"{prefix}={spec['name']}: {fact}: take workflow=single_turn", prefix)
    if config.learner.get("overlong_filter") and not stops:
        key = "learner.overlong_filter"
        raise ConfigError(f"{key}: answers of task={name} have a fixed length, so each of them is cut", key)


def check_teacher(config: Config, task: Task) -> None:
    """Raises ConfigError where the model to distil from is no folder, or does not use the task's tokens: by their text
    where its tokenizer is there, else by their number."""
    path, key = (config.learner.get("teacher") or {}).get("path"), "learner.teacher.path"
    if path is None:
        return
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{key}: no config.json in {path!r}: want the folder of a Hugging Face model", key)
    model = model_folder.computed_config(path, embedded=False, trained=True, key=key)
    _check_vocabulary(key, path, model, task)
    ours = getattr(task, "vocabulary", None)
    if not ours or not (Path(path) / "tokenizer_config.json").is_file():
        return
    theirs = {number: token for token, number in load_tokenizer(path, key).get_vocab().items()}
    for token, number in ours.items():
        if theirs.get(number) != token:
            what = f"is {theirs.get(number)!r} to the model in {path!r}, and {token!r} to the task"
            raise ConfigError(f"{key}: token {number} {what}: take a teacher of the same tokenizer", key)


def _check_vocabulary(key: str, path: str, model: Any, task: Task) -> None:
    known = getattr(model, "vocab_size", None)
    if known is not None and known < task.vocab_size:
        fact = f"the model in {path!r} knows {known} token ids, the task uses {task.vocab_size}"
        raise ConfigError(f"{key}: {fact}: take a model and a tokenizer that belong together", key)


def model_config(config: Config) -> Any:
    """transformers' config of the model's folder, if there is a folder and the engine or the learner computes the
    model; else None."""
    path, engine, learner = config.model.get("path"), config.engine["name"], config.learner["name"]
    if path is None:
        return None
    if "needs_model" in marks("engine", engine) | marks("learner", learner):
        return model_folder.computed_config(path, embedded=engine == "torch", trained=learner == "torch")
    model_folder.read_config(path)
    return None


def positions_of(config: Config, model: Any) -> dict[str, int]:
    """Setting of the model → most tokens of a sequence (`areal_like.models.model_folder.bounds`)."""
    model = SimpleNamespace(**with_defaults("model", config.model)) if model is None else model
    found = model_folder.bounds(model, config.engine["name"] == "torch")
    return {f"the model's {name}": most for name, most in found.items()}


def check_rewards(task: Task, config: Config) -> None:
    """Score an empty response to row 0, or else its answer, by each reward of the user's own. Raises ConfigError, with
    its file and line, where neither gets a number. Not where verifiers run in the actor, to be debugged."""
    key, limits, empty = "task", config.rewards, np.array([*task.stop_tokens, 0][:1], np.int32)
    own, spec = {}, repr((config.task, limits))
    for each in getattr(task, "members", {"": task}).values():
        prompt, name = each.prompt("train", 0), type(each).__module__
        if isinstance(each, PooledTask):
            key, name = "task.reward", each.verification(prompt, empty)[0]
        if limits.workers and spec not in _TRIED and name.partition(".")[0] != "areal_like":
            own[each] = prompt

    async def score() -> None:
        seconds, memory = limits.timeout, limits.memory_limit
        pool = RewardPool(timeout=seconds, memory_limit=memory)
        try:
            for each, prompt in own.items():
                reward = reward_function(each, pool, timeout=seconds, on_error="drop")
                try:
                    await reward(prompt, empty)
                except RewardError:  # it may expect more of an answer, which costs no run (`rewards.on_error`)
                    if prompt.codec is None:
                        raise
                    own_tokens = isinstance(answer := prompt.answer, np.ndarray)  # a generated task's
                    await reward(prompt, answer if own_tokens else prompt.codec.encode(str(answer)))
                if pool.timeouts:
                    raise RewardError(f"none within rewards.timeout={seconds:g} s")
        finally:
            await pool.close()

    try:
        asyncio.run(score()) if own else None
        _TRIED.add(spec)
    except RewardError as error:
        raise ConfigError(f"{key}: got no number for a response to row 0: {error}", key) from None


def check_lengths(task: Task, heldout: int, config: Config, model: Any) -> None:
    """Every prompt of `rows_to_check` can be made and fits the model with its longest response. Raises ConfigError."""
    computes = "needs_model" in marks("engine", config.engine["name"])
    known = positions_of(config, model) if computes else {}
    if (held := config.engine.get("kv_tokens")) is not None:
        known["engine.kv_tokens"] = held

    set_limit = config.sampling.max_new_tokens  # each look into a config takes longer than a prompt
    spec = repr((config.task, config.run.seed, set_limit, known, heldout))
    if spec in _TRIED and isinstance(task, GeneratedPrompts):  # no file of which could have changed
        return

    def problem(split: str, row: int) -> str:
        prompt = task.prompt(split, row)
        most = set_limit or prompt.max_tokens
        needed = len(prompt.tokens) + most + (max(prompt.filler, default=0) if split == "train" else 0)
        short = [f"{name}={bound}" for name, bound in known.items() if needed > bound]
        total = f"a prompt of {len(prompt.tokens)} tokens with its longest response needs {needed}"
        return f"{total}; {short[0]}: lower sampling.max_new_tokens (or task.max_tokens)" if short else ""

    least = min(known.values(), default=None)
    _refuse_rows(task, {split: rows_to_check(task, split, heldout, config, least) for split in SPLITS}, problem)
    _TRIED.add(spec)


def _refuse_rows(task: Task, rows: Mapping[str, Sequence[int]], problem: Callable[[str, int], str]) -> None:
    """Raises ConfigError for the first row with a problem, with the number of others."""
    problems = []
    for split, row in [(split, row) for split, its in rows.items() for row in its]:
        try:
            found = problem(split, row)
        except ValueError as error:
            problems.append(str(error))
            continue
        place = task.place(split, row) if hasattr(task, "place") else f"row {row} of {split}"
        problems += [f"{place}: {found}"] if found else []
    if problems:
        others = f" ({len(problems) - 1} more rows don't fit either)" if len(problems) > 1 else ""
        raise ConfigError(f"{problems[0]}{others}", "task")


def rows_to_check(task: Task, split: str, heldout: int, config: Config, bound: int | None) -> Sequence[int]:
    """The rows of a split that may be too long; without `rows_beyond` the first `ROWS`, of held-out ones `heldout`."""
    if not hasattr(task, "rows_beyond"):
        asked = 1 if isinstance(task, GeneratedPrompts) else heldout
        return range(min(task.size(split), ROWS, asked if split == "heldout" else ROWS))
    try:
        first = task.prompt(split, 0)
    except ValueError:
        return range(task.size(split))
    room = sys.maxsize if bound is None else bound - (config.sampling.max_new_tokens or first.max_tokens)
    return range(task.size(split)) if first.filler else sorted({0, *task.rows_beyond(split, room)})


def asked_prompts(task: Task, sets: Iterable[HeldoutSet]) -> int:
    """How many of a task's held-out prompts, from the first, a run asks at most: in its sets, and in probes."""
    return max([PROMPTS, *(len(each.rows) for each in sets if each.task is task)])
