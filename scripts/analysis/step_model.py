"""A checkpoint of a run on its way (`RUN/checkpoints/step-N`) as a model's folder, `model` in it.

The checkpoint holds the learner's state, of several ranks each its part. The learner that the run's config names is
built here, on the CPU, as one rank, takes the weights of all files, and writes them as they were published.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

from areal_like.config import run_config as configs
from areal_like.config.run_config import Config, ConfigError
from areal_like.errors import UserError
from areal_like.run.run_folder import CONFIG

_OF_WEIGHTS = ("name", "lora", "publish_dtype")
"""Knobs of `learner=torch` that choose the weights; the others are about training."""


def step_model(step: Path) -> Path:
    """The model's folder of a checkpoint, written if it is not there. Raises UserError (ConfigError: no run around it,
    a learner without a model) and OSError."""
    target, file = step / "model", step.resolve().parents[1] / CONFIG
    if (target / "config.json").is_file():
        return target
    if not file.is_file():
        raise ConfigError(f"{step} holds a learner's state; {file} is missing: leave it in its run's folder")
    beside = target.with_name(f".model.{os.getpid()}.tmp")
    try:
        _write(configs.load_resolved(file), step, beside)
        if not (target / "config.json").is_file():
            beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _write(config: Config, step: Path, folder: Path) -> None:
    from transformers.utils import logging

    from areal_like.config.registry import bind, build
    from learners.build import build_trainer

    logging.disable_progress_bar()
    task: Any = build("task", config.task, config.run.seed)
    if config.learner["name"] == "torch":
        spec = {knob: value for knob, value in configs.select(config, "learner").items() if knob in _OF_WEIGHTS}
        model = build("model", config.model, config.run.seed, task.vocab_size)
        any_loss, advantage = bind("loss", {"name": "dg"}), bind("advantage", {"name": "group"})
        trainer: Any = build("learner", spec, model, any_loss, advantage, 1.0, config.run.seed)
    else:
        trainer = build_trainer(config)
    try:
        getattr(trainer, "load_weights", trainer.load_state)(step)
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{step}: the learner's state can't be read: {type(error).__name__}: {error}") from error
    trainer.save(str(folder))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{step}: learner={config.learner['name']} trains no model that could be asked")
    if hasattr(task, "save_tokenizer"):
        task.save_tokenizer(str(folder))
