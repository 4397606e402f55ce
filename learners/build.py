"""Builds the trainer that a config names."""

from contextlib import nullcontext
from typing import Any

from areal_like.config.registry import bind, build, resolve
from areal_like.config.run_config import learner_threads, select
from areal_like.interfaces import Task, Trainer


def build_trainer(config: Any, rank: int = 0) -> Trainer:
    """Build the config's learner, with model, loss and advantage if it needs a model. `rank`: of several, which have
    joined. `learner.normalise=response_limit`: the longest response in tokens that task and sampling allow."""
    learner = resolve("learner", config.learner.name)
    if not getattr(learner, "needs_model", False):
        return build("learner", config.learner)
    import torch

    from areal_like.models.causal_lm import deferred_weights
    from learners.losses.trial import try_loss

    torch.set_num_threads(learner_threads(config))
    task: Task = build("task", config.task, config.run.seed)
    spec = select(config, "learner")
    # Adapters are made from whole weights.
    apart = spec.get("ranks", 1) > 1 and spec.get("lora") is None
    with deferred_weights(maker=rank == 0) if apart else nullcontext():
        model = build("model", config.model, config.run.seed, task.vocab_size)
    loss, advantage = bind("loss", config.loss), bind("advantage", config.advantage)
    try_loss(loss, config.loss.name)
    if spec.get("normalise") == "response_limit":
        limit, most = task.prompt("train", 0).max_tokens, config.sampling.max_new_tokens
        spec["normalise"] = limit if most is None else min(limit, most)
    return build("learner", spec, model, loss, advantage, config.sampling.temperature, config.run.seed)
