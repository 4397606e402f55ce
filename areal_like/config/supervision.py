"""Runs whose loss is supervised (`loss=sft`): the learner trains alone on a task's demonstrations, without a buffer or
actors. The mark `learners.losses.contract.supervised` says so. Imports no torch."""

from __future__ import annotations

from areal_like.config.registry import ConfigError, marks, with_defaults
from areal_like.config.schema import Config

OF_ROLLOUTS = ("critic_lr", "kl_reward", "router_replay", "teacher")
"""Knobs of the learner."""


def is_supervised(config: Config) -> bool:
    return "supervised" in marks("loss", config.loss["name"])


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
        **{f"learner.{knob}": bool(learner.get(knob)) for knob in OF_ROLLOUTS},
    }
    for key, is_set in asked.items():
        if is_set:
            raise ConfigError(f"{key}: loss={loss} has neither rollouts nor rewards: leave it out", key)
    if "needs_model" not in marks("learner", config.learner["name"]):
        raise ConfigError(f"learner: loss={loss} needs a learner with a model", "learner")
