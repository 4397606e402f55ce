"""A word of another system is answered with the word to write here, and that word exists."""

import re

import pytest

from areal_like.config import registry
from areal_like.config import run_config as config
from areal_like.config.layers import CONFIGS
from areal_like.config.other_names import ALIASES, COMPONENTS, KEYS
from areal_like.config.registry import ConfigError, knobs
from areal_like.config.schema import SECTIONS, Config

TOP = [name for name in Config.__dataclass_fields__ if name not in SECTIONS and name not in registry.COMPONENTS]
KNOWN = {*TOP, "run.name", "run.dir"}
KNOWN |= {f"{section}.{key}" for section, fields in SECTIONS.items() for key in fields.__dataclass_fields__}
KNOWN |= {
    f"{kind}.{knob}" for kind, names in registry.COMPONENTS.items() for name in names for knob in knobs(kind, name)
}
TEXTS = {**KEYS, **ALIASES} | {
    f"{kind}={name}": text for kind, names in COMPONENTS.items() for name, text in names.items()
}


def unknown(text: str) -> list[str]:
    """Keys and choices in a text that do not exist."""
    wrong = [key for key in re.findall(r"\b[a-z_]+\.[a-z_]+\b", text) if key not in KNOWN]
    wrong = [key for key in wrong if not key.endswith((".md", ".jsonl"))]
    for key, value in re.findall(r"([a-z_.]+)=([a-z_]+)", text):
        files = {file.stem for file in (CONFIGS / key).glob("*.yaml")}
        if key not in KNOWN and value not in {*files, *registry.COMPONENTS.get(key, {})}:
            wrong.append(f"{key}={value}")
    return wrong


def test_a_key_that_does_not_exist_is_found() -> None:
    assert unknown("learner.learning, loss=pppo, scheduler.max_staleness") == ["learner.learning", "loss=pppo"]


def test_all_that_is_told_to_write_exists() -> None:
    assert not {name: wrong for name, text in TEXTS.items() if (wrong := unknown(text))}


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        config.load(["quickstart", *overrides])
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("learning_rate=1e-5", "learner.lr"),
        ("learner.learning_rate=1e-5", "learner.lr"),
        ("lr=1e-5", "learner.lr"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "learner.lr"),
        ("critic.optim.lr=1e-6", "learner.critic_lr"),
        ("loss.kl_coef=0.1", "learner.kl_loss"),
        ("beta=0.04", "learner.kl_loss"),
        ("use_kl_loss=true", "learner.kl_loss"),
        ("num_generations=8", "sizing.group_size"),
        ("rollout.n=8", "sizing.group_size"),
        ("actor_rollout_ref.rollout.n=8", "sizing.group_size"),
        ("train_batch_size=64", "groups_per_batch"),
        ("data.train_batch_size=64", "groups_per_batch"),
        ("max_new_tokens=64", "sampling.max_new_tokens"),
        ("gconfig.max_new_tokens=64", "sampling.max_new_tokens"),
        ("clip_range=0.1", "loss.clip"),
        ("loss.epsilon_high=0.28", "loss.clip_high"),
        ("scale_rewards=false", "advantage.std"),
        ("max_async_level=2", "scheduler.max_staleness"),
        ("learner.temperature=0.6", "sampling.temperature"),
        ("engine.gpu_memory_utilization=0.8", "engine.server"),
        ("epochs=3", "run.steps; there are no epochs"),
        ("learner.checkpoint_every=2", "checkpoint.every."),
        ("report_to=wandb", "run.trackers=[tensorboard, wandb]"),
    ],
)
def test_a_word_of_another_system_is_answered(override: str, told: str) -> None:
    assert f"Here that is {told}" in refusal(override)


def test_our_own_key_in_another_place_is_found_in_the_code() -> None:
    assert "Did you mean loss.dual_clip?" in refusal("dual_clip=2")
    assert "Did you mean weights.keep or checkpoint.keep?" in refusal("keep=2")


def test_a_key_is_not_answered_with_itself() -> None:
    assert "Here that is" not in refusal("learner=timed", "learner.lr=1")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("advantage=grpo", "advantage=group advantage.std=true"),
        ("engine=vllm", "engine=sglang"),
        ("loss=reinforce++", "advantage=reinforce_pp"),
        ("loss.name=grpo", "algorithm=grpo"),
        ("mode=fully_async", "mode=async"),
        ("model=/path/to/model", "Write model=folder model.path=/path/to/model."),
        ("mode=one-step-off", "scheduler.max_staleness=1"),
    ],
)
def test_a_component_of_another_name_is_answered(override: str, told: str) -> None:
    assert told in refusal(override)
