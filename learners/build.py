"""Builds the trainer that a config names."""

from __future__ import annotations

from typing import Any

from areal_like.config import learner_threads
from areal_like.interfaces import Trainer
from areal_like.registry import bind, build, resolve


def build_trainer(config: Any) -> Trainer:
    """Build the learner that the config names; if it needs a model, with model, loss and advantage."""
    learner = resolve("learner", config.learner.name)
    if not getattr(learner, "needs_model", False):
        return build("learner", config.learner)
    import torch

    from learners.losses.trial import try_loss

    torch.set_num_threads(learner_threads(config))
    vocab_size = build("task", config.task, config.run.seed).vocab_size
    model = build("model", config.model, config.run.seed, vocab_size)
    loss, advantage = bind("loss", config.loss), bind("advantage", config.advantage)
    try_loss(loss, config.loss.name)
    return build("learner", config.learner, model, loss, advantage, config.sampling.temperature, config.run.seed)
