"""Every component that a config can name, and the knobs that each one takes.

A component is a function or a class; a *spec* such as `{name: ppo, clip: 0.2}` names one and sets its knobs, which are
its keyword-only parameters. `check` and `knobs` read a component's source (`config.signatures`): nothing is imported
until it is used, and a config is refused in milliseconds. `module:Name` is accepted wherever a name is.

To add a component, write it and a line of `COMPONENTS`. A yaml in `configs/KIND/` sets defaults of several ones."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from areal_like.config.annotations import misfit
from areal_like.config.schema import Knobs
from areal_like.config.signatures import REQUIRED, Knob, Signature, UnreadableError, is_async, signature
from areal_like.errors import UserError
from areal_like.places import CONFIGS


def _named(module: str, names: str) -> dict[str, str]:
    """Components that are called as they are in their module."""
    return {name: f"{module}:{name}" for name in names.split()}


COMPONENTS: dict[str, dict[str, str]] = {
    "task": {
        "copy": "areal_like.tasks.copying:Copy",
        "reverse": "areal_like.tasks.copying:Reverse",
        "arithmetic": "areal_like.tasks.arithmetic:Arithmetic",
        "jsonl": "areal_like.tasks.jsonl:Jsonl",
        "mixture": "areal_like.tasks.mixture:Mixture",
        "episodes": "areal_like.tasks.episodes:Episodes",
        "verifiers": "areal_like.tasks.verifiers:Verifiers",
    },
    "reward": {
        **_named("areal_like.tasks.maths", "math_verify exact last_number"),
        "unit_tests": "areal_like.tasks.unit_tests:unit_tests",
    },
    "group_reward": {"none": "actors.group_rewards:none"},
    "model": _named("areal_like.models.causal_lm", "qwen2 folder"),
    "engine": {
        "torch": "actors.engines.torch_engine:TorchEngine",
        "timed": "actors.engines.timed_engine:TimedEngine",
        "sglang": "actors.engines.sglang_engine:SglangEngine",
    },
    "workflow": {
        **_named("actors.workflows", "single_turn"),
        **_named("actors.multi_turn", "multi_turn"),
        "agent": "actors.agents.workflow:agent",
    },
    "environment": {"tools": "actors.tools:Tools"},
    "scheduler": {"async": "buffer.schedulers:AsyncScheduler", "sync": "buffer.rounds:SyncScheduler"},
    "sizing": {"fixed": "buffer.sizing:Fixed", "sagc": "buffer.sizing:Sagc"},
    "batch_policy": _named("buffer.policies", "in_order fifo"),
    "filter": _named("buffer.policies", "none zero_variance"),
    "loss": {
        **_named("learners.losses.clipped", "ppo decoupled_ppo"),
        **_named("learners.losses.bounded", "gspo sapo m2po dppo"),
        "icepop": "learners.losses.clipped:decoupled_ppo",
        **dict.fromkeys(("reinforce", "is_pg", "tis", "cispo", "topr"), "learners.losses.weighted:reinforce"),
        **_named("learners.losses.delightful", "dg dg_kondo"),
        **_named("learners.losses.weighted", "pmpo tpo sft"),
    },
    "correction": _named(
        "learners.losses.corrections",
        "none ratio exact tis cispo capped icepop seq_tis seq_mis geo_mask sequence_mask topr",
    ),
    "advantage": _named("learners.advantages", "group rloo maxrl batch reinforce_pp turn distill"),
    "learner": {"torch": "learners.learner:TorchLearner", "timed": "learners.timed:TimedLearner"},
    "tracker": {
        "tensorboard": "areal_like.trackers.board:Board",
        "wandb": "areal_like.trackers.wandb:WeightsAndBiases",
    },
    "launcher": {
        "local": "areal_like.launch.local:LocalLauncher",
        "slurm": "areal_like.launch.slurm:SlurmLauncher",
        "ray": "areal_like.launch.ray:RayLauncher",
    },
}

PARTS = {"learner.lora": "learners.adapters:Adapters", "learner.teacher": "learners.distillation:Teacher"}
"""Knobs whose value is itself a set of knobs: dotted path → the class that defines them."""

OTHER_NAMES = {
    "advantage": "adv_estimator",
    "advantage.gamma": "gamma",
    "advantage.std": "norm_adv_by_std_in_grpo scale_rewards",
    "algorithm": "loss_type importance_sampling_level",
    "checkpoint.every": "save_freq save_steps",
    "engine": "use_vllm vllm_mode",
    "engine.server": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "engine.tp_size": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "eval.every": "eval_steps test_freq",
    "filter": "filter_groups",
    "groups_per_batch": "batch_size per_device_train_batch_size train_batch_size generation_batch_size",
    "learner.checkpoint_activations": "gradient_checkpointing",
    "learner.clip_grad": "max_grad_norm",
    "learner.entropy_bonus": "entropy_coeff",
    "learner.kl_loss": "beta kl_loss_coef",
    "learner.kl_reward": "kl_coef",
    "learner.lora": "lora_rank",
    "learner.lr": "learning_rate",
    "learner.micro_batch_tokens": "gradient_accumulation_steps ppo_max_token_len_per_gpu",
    "learner.normalise": "loss_agg_mode",
    "learner.num_minibatch_epochs": "num_iterations ppo_epochs",
    "learner.num_minibatches": "ppo_mini_batch_size steps_per_generation",
    "learner.overlong_filter": "mask_truncated_completions",
    "learner.schedule": "lr_scheduler_type",
    "learner.warmup_steps": "lr_warmup_steps warmup_ratio",
    "loss.clip": "clip_ratio epsilon",
    "loss.clip_high": "clip_ratio_high epsilon_high",
    "loss.dual_clip": "clip_ratio_c delta",
    "model.path": "model_name_or_path",
    "resume": "resume_from_checkpoint",
    "run.dir": "output_dir",
    "run.name": "experiment_name run_name",
    "run.steps": "max_steps num_train_epochs total_epochs total_training_steps",
    "run.trackers": "report_to",
    "sampling.max_new_tokens": "max_completion_length max_response_length max_tokens",
    "sampling.temperature": "temperature",
    "sizing.group_size": "n num_generations",
    "task.columns": "prompt_key answer_key input_key label_key dataset_text_field",
    "task.max_prompt_tokens": "max_prompt_length",
    "task.path": "dataset_name train_files",
    "task.reward": "reward reward_funcs custom_reward_function",
    "task.reward_weights": "reward_weights",
}
"""Key → what TRL and verl call it, the commonest ones; for error messages."""

USUAL_CORRECTIONS = {"decoupled_ppo": "capped", "is_pg": "exact"}
USUAL_CORRECTIONS |= {name: name for name in ("icepop", "tis", "cispo", "topr")}
"""A loss's name → its correction where the config sets none."""
NO_CORRECTION: dict[str, object] = {"name": "none"}


class ConfigError(UserError):
    """A config that cannot be run: the fault, its place, and the remedy. `key` is the dotted path at fault."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


@contextlib.contextmanager
def within(prefix: str, key: str = "") -> Iterator[None]:
    """Put a prefix before the text of a ConfigError, and before its key (or `key` in its place)."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}", key or f"{prefix}{error.key}") from None


# Using components


def resolve(kind: str, name: str) -> Any:
    """Import the component `name` of `kind`. A `functools.partial` gets the marks of its function or class
    (`needs_model`, ...). Raises ConfigError where there is no such name, module or attribute."""
    module, attribute = target(kind, name).split(":")
    try:
        component = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the component's own import failed: that is not about its name
        raise ConfigError(f"{kind}.name: {name!r} needs the module {module!r}, which cannot be found", kind) from None
    except AttributeError:
        raise ConfigError(f"{kind}.name: module {module!r} has no {attribute!r}", kind) from None
    if isinstance(component, functools.partial):
        for mark, value in inspect.getmembers(component.func, lambda value: isinstance(value, bool)):
            setattr(component, mark, value)
    return component


def build(kind: str, spec: Mapping[str, object], *args: object) -> Any:
    """Call the component of `spec` with `args` and the spec's knobs. Raises ConfigError, also where the component
    refuses the value of a knob (by ValueError)."""
    component = bind(kind, spec)
    try:
        return component(*args)
    except UserError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), kind) from error
    except TypeError as error:
        if error.__traceback__ and error.__traceback__.tb_next:  # not of the call, but in the component
            raise
        raise ConfigError(f"{kind}={spec['name']} is no {kind} ({error}): see docs/extending.md", kind) from error


def bind(kind: str, spec: Mapping[str, object]) -> functools.partial[Any]:
    """The component of `spec` with its knobs bound, for later calls. A loss comes with its correction."""
    check(kind, spec)
    plain = _plain(spec)
    correction = correction_of(plain) if kind == "loss" else NO_CORRECTION
    if kind == "loss":
        plain.pop("correction", None)
    bound = functools.partial(resolve(kind, plain.pop("name")), **plain)
    return bound if correction == NO_CORRECTION else build("correction", correction, bound)


def correction_of(spec: Mapping[str, object]) -> Knobs:
    """The spec of a loss's correction: that of the loss's spec (a name, knobs, or both), or the usual one of losses of
    its name. Knobs without a name are those of `ratio`; beside a usual one they need a name. Raises ConfigError."""
    loss, given, key = str(spec["name"]), _plain(spec).get("correction"), "loss.correction"
    usual, knobs = USUAL_CORRECTIONS.get(loss, "none"), as_spec(given, key) if given else {}
    if knobs and usual != "none" and "name" not in knobs:
        meant = f"name={usual} (the correction of loss={loss}, with these changes) or name=ratio (these knobs alone)"
        raise ConfigError(f"{key}: got {', '.join(knobs)} without a name, expected {meant}", key)
    return {"name": "ratio" if knobs else usual} | knobs


def _plain(spec: Mapping[str, object]) -> Knobs:
    return cast(Knobs, OmegaConf.to_container(spec, resolve=True)) if isinstance(spec, DictConfig) else dict(spec)


# Checking specs


def check(kind: str, spec: Mapping[str, object]) -> None:
    """Check a spec against its component's keyword-only parameters, without an import. Raises ConfigError."""
    plain = _plain(spec)
    name = plain.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{kind}.name: got {name!r}, expected one of {', '.join(COMPONENTS[kind])}", kind)
    if kind == "loss" and "correction" in plain:
        plain["correction"] = correction_of({"name": name, **plain})
    _validate_knobs(described(kind, name), kind, name, plain)


def check_knobs(target: str, path: str, values: Mapping[str, object]) -> None:
    _validate_knobs(signature(target), path, path.rpartition(".")[2], values)


def marks(kind: str, name: str) -> frozenset[str]:
    """The marks of a component: a function's decorators, the attributes that a class or a base of it sets to True."""
    return described(kind, name).marks


def check_function(key: str, path: str) -> bool:
    """Is the function "module:name" that the knob `key` names async? Raises ConfigError."""
    try:
        return is_async(path)
    except UnreadableError as error:
        raise ConfigError(f"{key}={path}: {error}; name a function as module:name", key) from None


def _validate_knobs(found: Signature, prefix: str, name: str, values: Mapping[str, object]) -> None:
    for knob, value in values.items():
        path = f"{prefix}.{knob}"
        if knob not in found.knobs:
            if not found.takes_any:
                hint = (
                    key_hint(path, found.knobs) or f" Its keyword-only parameters: {', '.join(found.knobs) or 'none'}"
                )
                raise ConfigError(f"{path}: {name!r} has no such knob.{hint}", path)
        elif problem := misfit(value, found.knobs[knob].annotation):
            raise ConfigError(f"{path}: {problem}", path)
        elif knob in COMPONENTS:  # it takes a spec of this kind, or just a name
            with within(path.removesuffix(knob), path):
                check(knob, as_spec(value, knob))
    missing = [knob for knob, known in found.knobs.items() if known.default is REQUIRED and knob not in values]
    if missing and prefix != "reward":  # which takes columns of the data
        path = f"{prefix}.{missing[0]}"
        raise ConfigError(f"{path}: {name!r} needs it and has no default; set it with {path}=VALUE", path)


def knobs(kind: str, name: str) -> Knobs:
    """Knob → default of a component (`REQUIRED` where there is none; source text where it is no literal)."""
    return {knob: known.default for knob, known in described(kind, name).knobs.items()}


def as_spec(spec: object, key: str = "") -> Knobs:
    """A spec; a bare name becomes `{name: ...}`. Raises ConfigError for another value."""
    if not isinstance(spec, str | Mapping):
        raise ConfigError(f"{key}: got {spec!r}, expected a name or {{name: ..., knobs}}", key)
    return {"name": spec} if isinstance(spec, str) else _plain(spec)


def with_defaults(kind: str, spec: Mapping[str, object]) -> Knobs:
    plain = _plain(spec)
    return knobs(kind, plain["name"]) | plain


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def key_hint(path: str, known: Iterable[str]) -> str:
    """What to write for an unknown key: our name for a key of TRL or verl, or the nearest known one."""
    key = path.rpartition(".")[2]
    ours = next((ours for ours, theirs in OTHER_NAMES.items() if key in theirs.split()), "")
    return f" Here that is {ours}." if ours else nearest(key, known)


def component_hint(kind: str, name: str, known: Iterable[str]) -> str:
    if kind == "loss" and (CONFIGS / "algorithm" / f"{name}.yaml").is_file():
        return f" Did you mean algorithm={name}?"
    return nearest(name, known)


def target(kind: str, name: str) -> str:
    """Where a component of this name is defined, as "module:name". Raises ConfigError."""
    known = COMPONENTS[kind]
    found = known.get(name, name)
    if not all(found.partition(":")):
        hint = f"{component_hint(kind, name, known)} There are {', '.join(known)}; or name your own as module:Name"
        raise ConfigError(f"{kind}.name: there is no {kind} {name!r}.{hint}", f"{kind}.name")
    return found


def described(kind: str, name: str) -> Signature:
    try:
        found = signature(target(kind, name))
        if kind != "loss":
            return found
        correction = Knob(USUAL_CORRECTIONS.get(name, "none"), None)
        return dataclasses.replace(found, knobs={**found.knobs, "correction": correction})
    except UnreadableError as error:
        raise ConfigError(f"{kind}.name: {name!r} cannot be read: {error}", f"{kind}.name") from None
