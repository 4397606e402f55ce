"""Checks before any process starts: each of these errors would otherwise appear seconds later, in a log."""

from __future__ import annotations

import shutil
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq

from areal_like.config.defaults import ruinous_rate, spent_schedule
from areal_like.config.registry import COMPONENTS, as_spec, build, check, check_function, knobs, marks
from areal_like.config.run_config import Config, ConfigError, heldout_workflow, ranks_of
from areal_like.config.supervision import is_supervised
from areal_like.errors import UserError
from areal_like.interfaces import Task
from areal_like.launch.plan import limits
from areal_like.models import model_folder
from areal_like.models.adapter_folder import read_adapter
from areal_like.tasks.generated import GeneratedPrompts
from areal_like.tasks.heldout import HeldoutSet, sets_of
from areal_like.tasks.text import load_tokenizer
from areal_like.types import Prompt
from areal_like.wire import keys
from areal_like.wire.bus import NODE, own_address
from buffer.schedulers import Scheduler
from buffer.sizing import Sizing, check_sizes
from learners.probe import PROMPTS

from .gpus import Gpus, gpus_here, sharing

LEAST_BYTES = 13
"""Fewest bytes of a sample in the buffer: one token of a prompt and one of a response (`areal_like.wire.groups`)."""
ON_DEVICES = ("learner", "engine")
POSITIONS = "the model's max_position_embeddings"
ROWS = 256
"""Most prompts of each split to check if a task can't tell which are long; of held-out ones those that are asked."""
TELL_SECONDS = 5.0
ANSWER_SECONDS = 2.0
_FITTING: set[str] = set()
"""Task, seed and bounds whose prompts fit. An ablation asks in each of its runs; what a task makes itself stays so."""


def preflight(config: Config, gpus: Gpus | None = None) -> str:
    """Check everything, with `gpus` in place of this machine's. Returns warnings for the user (empty: none). Raises
    ConfigError, ValueError, OSError."""
    build("launcher", config.launcher, Path(config.run.dir), limits(config))
    sizing = build("sizing", config.sizing)
    _refuse_others("sizing", config.sizing, sizing, Sizing)
    scheduler = build("scheduler", config.scheduler, sizing)
    _refuse_others("scheduler", config.scheduler, scheduler, Scheduler)
    check_sizes(sizing, config.groups_per_batch)
    if len(sizing.sizes) > 1 and config.batch_policy["name"] != "in_order":
        raise ConfigError("sizing: a group size that changes from batch to batch needs batch_policy=in_order", "sizing")
    if config.learner["name"] == "torch" and config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature: greedy rollouts (0) can't be trained on; evaluation may be greedy")
    if config.learner.get("lora") is not None and find_spec("peft") is None:
        raise ConfigError("learner.lora needs peft: pip install 'areal_like[lora]'")
    if (path := (config.learner.get("lora") or {}).get("path")) is not None:
        read_adapter(path)
    check_packages(config)
    check_trackers(config)
    check_devices(config, gpus)
    check_functions(config)
    check_environments(config)
    model = model_config(config)
    if config.security.key_folder:
        keys.server_pair(config.security.key_folder)
        for role in keys.ROLES:
            keys.client_pair(config.security.key_folder, role)
    if config.buffer.transport == "tcp" and config.buffer.port and config.buffer.host != NODE:
        check_port(config.buffer.host, config.buffer.port)
    elif config.buffer.transport == "tcp" and "ACROSS_HOSTS" not in marks("launcher", config.launcher["name"]):
        check_host(config.buffer.host)
    task = build("task", config.task, config.run.seed)
    sets = sets_of(config, task)
    check_teacher(config, task)
    check_batch(config, sizing.group_size)
    if is_supervised(config):
        check_demonstrations(task, config, model)
    else:
        check_texts(task, config)
        check_ends(task, config)
        check_lengths(task, asked_prompts(task, sets), config, model)
    if model is not None:
        check_model(config.model["path"], model, task.vocab_size)
    return "; ".join(filter(None, notes(task, config, scheduler)))


def _refuse_others(kind: str, spec: Mapping[str, Any], made: object, base: type) -> None:
    if not isinstance(made, base):
        wanted = f"{base.__module__}.{base.__name__}"
        raise ConfigError(f"{kind}={spec['name']} does not inherit from {wanted}: see docs/extending.md", kind)


def check_trackers(config: Config) -> None:
    """Raises ConfigError for an unknown tracker, and for one whose package is missing."""
    for name in config.run.trackers:
        try:
            check("tracker", {"name": name})
        except ConfigError as error:
            raise ConfigError(f"run.trackers: {error}", "run.trackers") from None
        if name in COMPONENTS["tracker"] and find_spec(name) is None:
            raise ConfigError(
                f"run.trackers: {name} is not installed: pip install 'areal_like[{name}]'", "run.trackers"
            )


def check_packages(config: Config) -> None:
    """Raises ConfigError where a judge's client, or the server for agents, is not installed."""
    needed = {"openai": ("group_reward", "judge", "judge"), "aiohttp": ("workflow", "agent", "openai")}
    for package, (kind, name, extra) in needed.items():
        if getattr(config, kind)["name"] == name and find_spec(package) is None:
            raise ConfigError(f"{kind}={name} needs {package}: pip install 'areal_like[{extra}]'", kind)


def check_teacher(config: Config, task: Task) -> None:
    """Raises ConfigError where the model to distil from is no folder, or does not use the task's tokens. Only the
    folders of checkpoints and of whole models say what their ids mean; of others the number of ids is compared."""
    path, key = (config.learner.get("teacher") or {}).get("path"), "learner.teacher.path"
    if path is None:
        return
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{key}: no config.json in {path!r}: want the folder of a Hugging Face model", key)
    known, wanted = model_folder.read_config(path).get("vocab_size"), task.vocab_size
    if known is not None and known < wanted:
        raise ConfigError(f"{key}: the model in {path!r} knows {known} token ids, the task uses {wanted}", key)
    ours = getattr(task, "vocabulary", None)
    if not ours or not (Path(path) / "tokenizer_config.json").is_file():
        return
    theirs = {number: token for token, number in load_tokenizer(path, key).get_vocab().items()}
    for token, number in sorted(ours.items(), key=lambda each: each[1]):
        if theirs.get(number) != token:
            raise ConfigError(
                f"{key}: token {number} is {theirs.get(number)!r} to the model in {path!r}, and {token!r} to the task: "
                "take a teacher of the same tokenizer",
                key,
            )


def notes(task: Task, config: Config, scheduler: Scheduler) -> Iterator[str]:
    """Warnings about settings that are allowed but possibly not meant."""
    yield ruinous_rate(config)
    yield spent_schedule(config)
    yield from sharing(config)
    yield from unanswered(config)
    if config.partial_rollout == "resume":
        yield scheduler.warning()
    if (rows := task.size("train")) < config.groups_per_batch:
        yield f"groups_per_batch={config.groups_per_batch}: there are {rows} training prompts, so a batch repeats them"


def unanswered(config: Config) -> Iterator[str]:
    """Warnings about servers of others that do not answer: they may still come, or be seen by other hosts only."""
    environment, key = config.workflow.get("environment") or {}, "workflow.environment.server"
    asked = {key: environment.get("server"), "group_reward.base_url": config.group_reward.get("base_url")}
    for name, url in asked.items():
        if not isinstance(url, str) or not url.startswith(("http://", "https://", "ws://", "wss://")):
            continue
        try:
            found = urlsplit(url)
            port = found.port or (443 if found.scheme in ("https", "wss") else 80)
            socket.create_connection((found.hostname or "", port), ANSWER_SECONDS).close()
        except (OSError, ValueError) as error:
            yield f"{name}={url}: nobody answers there now ({error}); the run needs it"


def model_config(config: Config) -> dict[str, Any] | None:
    """The config.json of the model's folder, if there is a folder and the engine or the learner uses it."""
    if config.model.get("path") is None:
        return None
    found = model_folder.read_config(config.model["path"])
    return found if computes(config, "engine") or computes(config, "learner") else None


def computes(config: Config, kind: str) -> bool:
    """Does the engine, or the learner, compute the model? Timed ones do not."""
    return "needs_model" in marks(kind, getattr(config, kind)["name"])


def check_model(path: str, model: dict[str, Any], vocabulary: int) -> None:
    """Check that the folder's weights are complete, and that the model knows every token of the task."""
    model_folder.check_weights(path)
    known = model.get("vocab_size")
    if known is not None and known < vocabulary:
        raise ConfigError(
            f"model.path: the model in {path!r} knows {known} token ids, the task uses {vocabulary}: take a model and "
            "a tokenizer that belong together",
            "model.path",
        )
    model_folder.check_type(path, model)


def check_devices(config: Config, stated: Gpus | None) -> None:
    """Check that CUDA devices exist where the config asks for them: on this machine, or those that are stated."""
    known = {kind: knobs(kind, getattr(config, kind)["name"]) | dict(getattr(config, kind)) for kind in ON_DEVICES}
    asked = [kind for kind in ON_DEVICES if known[kind].get("device") == "cuda" and not known[kind].get("url")]
    if not asked or "ACROSS_HOSTS" in marks("launcher", config.launcher["name"]):
        return
    key, gpus = f"{asked[0]}.device", stated or gpus_here()
    if gpus.cuda is None:
        raise ConfigError(f"{key}=cuda: this torch is built without CUDA; install one with CUDA, or set {key}=cpu", key)
    if not gpus.count:
        raise ConfigError(f"{key}=cuda: torch sees no CUDA device (see nvidia-smi); make one visible, or set cpu", key)
    ranks = ranks_of(config)
    if known["learner"].get("device") == "cuda" and ranks > gpus.count:
        raise ConfigError(
            f"learner.ranks={ranks}: each needs a CUDA device, and there are {gpus.count}", "learner.ranks"
        )


def workflows(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """Every workflow of the config, by its key; those of a mixture's tasks among them."""
    found: dict[str, Mapping[str, Any]] = {"workflow": config.workflow, "eval.workflow": heldout_workflow(config)}
    of_tasks = config.task.get("workflows") or {}
    return found | {f"task.workflows.{name}": as_spec(spec) for name, spec in of_tasks.items()}


def check_functions(config: Config) -> None:
    """Check that functions and programs named by knobs exist; it looks them up in the source, and does not run them."""
    for prefix, spec in workflows(config).items():
        if spec["name"] == "agent":
            check_agent(f"{prefix}.agent", spec["agent"])
        for tool in (spec.get("environment") or {}).get("tools", ()):
            if ":" in tool:
                check_function(f"{prefix}.environment.tools", tool)
    if config.batch_policy["name"] == "priority":
        check_function("batch_policy.key", config.batch_policy["key"])


def check_agent(key: str, agent: str | Sequence[str]) -> None:
    if isinstance(agent, str):
        if not check_function(key, agent):
            raise ConfigError(f"{key}={agent} is no async function; give a blocking program as a command (a list)", key)
    elif not agent or shutil.which(agent[0]) is None:
        raise ConfigError(f"{key}: there is no program {agent[0] if agent else ''!r} to start", key)


def check_batch(config: Config, group_size: int) -> None:
    """Check that the buffer can hold a batch, even one of the shortest prompts and answers."""
    samples, room = config.groups_per_batch * group_size, config.buffer.max_bytes
    if samples * LEAST_BYTES > room:
        raise ConfigError(
            f"groups_per_batch={config.groups_per_batch} groups of sizing.group_size={group_size} can never fill: "
            f"{samples} samples take {samples * LEAST_BYTES} bytes or more, and buffer.max_bytes is {room}; at most "
            f"{room // LEAST_BYTES} samples fit",
            "groups_per_batch",
        )


def check_texts(task: Task, config: Config) -> None:
    """Check that the task has the tokens and the text that the workflows and a judge need."""
    prompt, _ = task.prompt("train", 0), task.stop_tokens
    if config.group_reward["name"] == "judge" and prompt.codec is None:
        name = config.task["name"]
        raise ConfigError(f"group_reward=judge reads text, e.g. of task=jsonl; task={name} has none", "group_reward")
    for prefix, spec in (("workflow", config.workflow), ("eval.workflow", heldout_workflow(config))):
        needed = {"multi_turn": "reply", "agent": "opening"}.get(spec["name"])
        if needed and not hasattr(prompt.codec, needed):
            name = config.task["name"]
            raise ConfigError(
                f"{prefix}={spec['name']} needs a task with text, e.g. jsonl; task={name} has none", prefix
            )


def check_environments(config: Config) -> None:
    """Check that environments can be made, and that there is one for a task that needs it."""
    name = config.task["name"]
    for prefix, spec in workflows(config).items():
        if spec.get("environment"):
            check_environment(prefix, spec["environment"])
        elif "needs_environment" in marks("task", name):  # never a mixture
            raise ConfigError(
                f"{prefix}={spec['name']}: task={name} has no rewards of its own; it needs an environment, e.g. "
                f"{prefix}={{name: multi_turn, environment: {{name: openenv, server: URL, action: FIELD}}}}",
                prefix,
            )


def check_environment(prefix: str, spec: Mapping[str, object]) -> None:
    """Check that the environment of a workflow can be made."""
    try:
        build("environment", spec)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{prefix}.environment={spec['name']} can't be made: {error!r} at {place.filename}:{place.lineno}", prefix
        ) from error


def check_ends(task: Task, config: Config) -> None:
    """Check that answers can end before they are cut, where cut ones are treated apart."""
    knobs = {"learner.overlong_filter": config.learner, "advantage.bootstrap": config.advantage}
    for key, spec in knobs.items():
        if spec.get(key.rpartition(".")[2]) and not task.stop_tokens:
            name = config.task["name"]
            raise ConfigError(f"{key}: answers of task={name} have a fixed length, so each of them is cut", key)


def check_lengths(task: Task, heldout: int, config: Config, model: dict[str, Any] | None) -> None:
    """Every prompt can be made and, with its longest response, fits the model; of a task without `rows_beyond`, the
    first `ROWS` of each split, and of those that are held out no more than the first `heldout`. Raises ConfigError for
    the first prompt that doesn't fit, with the number of others."""
    most = config.sampling.max_new_tokens
    bounds = {"engine.kv_tokens": config.engine.get("kv_tokens"), POSITIONS: positions_of(config, model)}
    known = {name: bound for name, bound in bounds.items() if bound is not None}
    asked = repr((config.task, config.run.seed, most, heldout, known))
    if isinstance(task, GeneratedPrompts) and asked in _FITTING:
        return
    for split in ("train", "heldout"):
        problems, bound = [], min(known.values(), default=None)
        for row in with_progress(rows_to_check(task, split, heldout, config, bound), split):
            try:
                prompt = task.prompt(split, row)
            except ValueError as error:
                problems.append(str(error))
                continue
            found = [too_long(prompt, split, most, *bound) for bound in known.items()]
            place = task.place(split, row) if hasattr(task, "place") else f"row {row} of {split}"
            problems += [f"{place}: {problem}" for problem in found if problem]
        if problems:
            others = f" ({len(problems) - 1} more rows don't fit either)" if len(problems) > 1 else ""
            raise ConfigError(f"{problems[0]}{others}", "task")
    _FITTING.add(asked)


def check_demonstrations(task: Task, config: Config, model: dict[str, Any] | None) -> None:
    """Every demonstration can be made, and fits the model; of a task without `place`, the first `ROWS` of each split.
    Raises ConfigError for the first that doesn't fit, with the number of others."""
    if not hasattr(task, "demonstration"):
        name, loss = config.task["name"], config.loss["name"]
        raise ConfigError(
            f"task={name} demonstrates nothing that loss={loss} could train on: want task=demonstrations (a file), "
            "copy, reverse or arithmetic",
            "task",
        )
    known = knobs("model", config.model["name"]) | dict(config.model) if model is None else model
    most = known.get("max_position_embeddings") or sys.maxsize
    for split in ("train", "heldout"):
        rows = task.size(split) if hasattr(task, "place") else min(task.size(split), ROWS)
        problems = []
        for row in with_progress(range(rows), split):
            try:
                shown = task.demonstration(split, row)
            except ValueError as error:
                problems.append(str(error))
                continue
            if (length := len(shown.prompt.tokens) + len(shown.tokens)) > most:
                place = task.place(split, row) if hasattr(task, "place") else f"row {row} of {split}"
                problems.append(f"{place}: {length} tokens; {POSITIONS}={most}: take the row out")
        if problems:
            others = f" ({len(problems) - 1} more rows don't fit either)" if len(problems) > 1 else ""
            raise ConfigError(f"{problems[0]}{others}", "task")


def positions_of(config: Config, model: dict[str, Any] | None) -> int | None:
    """The longest sequence that the engine's model accepts, from its knobs or its folder; None if unknown."""
    if not computes(config, "engine"):
        return None
    known = knobs("model", config.model["name"]) | dict(config.model) if model is None else model
    return known.get("max_position_embeddings")


def rows_to_check(task: Task, split: str, heldout: int, config: Config, bound: int | None) -> Sequence[int]:
    """The rows of a split that may be too long."""
    if not hasattr(task, "rows_beyond"):
        return range(min(task.size(split), ROWS, heldout if split == "heldout" else ROWS))
    try:
        first = task.prompt(split, 0)
    except ValueError:
        return range(task.size(split))
    room = sys.maxsize if bound is None else bound - (config.sampling.max_new_tokens or first.max_tokens)
    return range(task.size(split)) if first.filler else sorted({0, *task.rows_beyond(split, room)})


def asked_prompts(task: Task, sets: Iterable[HeldoutSet]) -> int:
    """How many of a task's held-out prompts, from the first, a run asks at most: in its sets, and in probes."""
    return max([PROMPTS, *(len(each.rows) for each in sets if each.task is task)])


def with_progress(rows: Sequence[int], split: str) -> Iterator[int]:
    """The rows; logs progress now and then."""
    told = time.monotonic()
    for done, row in enumerate(rows):
        yield row
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            print(f"checking the lengths of prompts: {done + 1} of {len(rows)} ({split})", file=sys.stderr)


def too_long(prompt: Prompt, split: str, most: int | None, name: str, bound: int) -> str:
    """Describes why a prompt is too long for a bound; empty if it is not. `most`: of `sampling.max_new_tokens`."""
    filler = max(prompt.filler, default=0) if split == "train" else 0
    response = (most or prompt.max_tokens) + filler
    if (needed := len(prompt.tokens) + response) <= bound:
        return ""
    return (
        f"a {split} prompt of {len(prompt.tokens)} tokens with a response of up to {response} needs {needed}; "
        f"{name}={bound}: lower sampling.max_new_tokens (or task.max_tokens)"
    )


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing can be bound there now. (The buffer itself binds some seconds later.)"""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a port is at most 65535"
        raise ConfigError(
            f"buffer.port={port}: can't bind to {host}:{port} ({reason}); choose a free port, or 0 for any"
        ) from None


def check_host(host: str) -> None:
    """Raises ConfigError if it is no address, name or interface of this machine (by ZeroMQ's own check)."""
    try:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            probe.bind(f"tcp://{own_address() if host == NODE else host}:*")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"buffer.host={host}: can't bind to it ({error.strerror}); want an address or interface of this machine "
            f"(see ip address), or {NODE}",
            "buffer.host",
        ) from None
