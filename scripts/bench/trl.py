"""TRL's GRPOTrainer as a contender in benches."""

import tempfile
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch


def clock() -> float:
    """Seconds, when a GPU has done what it has to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()


def trl_steps(
    model: Any,
    rows: Sequence[dict[str, Any]],
    reward: Callable[..., list[float]],
    tokenizer: Any,
    sizes: tuple[int, int, int],
    rollout: Callable[..., dict[str, Any]] | None = None,
    **fields: Any,
) -> list[tuple[float, float]]:
    """Seconds of each optimizer step: as a whole, and of forward, backward, clipping and AdamW alone. No KL, mean over
    tokens. `sizes`: samples of a step, of a micro-batch and of a group. `rollout`: instead of generating. `fields`: of
    GRPOConfig."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    began, generating, seconds = 0.0, 0.0, list[tuple[float, float]]()

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            nonlocal generating
            begin = clock()
            made = super()._generate_and_score_completions(inputs)
            generating += clock() - begin
            return made

    class AtSteps(TrainerCallback):
        def on_step_begin(self, *_: Any, **more: Any) -> None:
            nonlocal began, generating
            began, generating = clock(), 0.0

        def on_step_end(self, *_: Any, **more: Any) -> None:
            whole = clock() - began
            seconds.append((whole, whole - generating))

    samples, micro_batch, group_size = sizes
    fixed = {"beta": 0.0, "loss_type": "dapo", "scale_rewards": "none", "temperature": 1.0, "report_to": []}
    fixed |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False}
    fixed |= {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": samples // micro_batch}
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(folder, num_generations=group_size, **{"use_cpu": True} | fixed | fields)
        data, how = Dataset.from_list(list(rows)), {"processing_class": tokenizer, "rollout_func": rollout}
        Trainer(model, reward, config, data, callbacks=[AtSteps()], **how).train()
    return seconds
