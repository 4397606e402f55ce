"""TRL's GRPOTrainer as a contender: the settings that the benches of the learner and of a pretrained model share."""

from __future__ import annotations

from typing import Any


def trl_config(folder: str, samples: int, micro_batch: int, group_size: int, **more: Any) -> Any:
    """A GRPOConfig on the CPU: one optimizer step per `samples` samples, without KL; the loss is the sum over tokens
    divided by their number. `more`: further fields of GRPOConfig."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=group_size,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        temperature=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )


def at_steps(begin: Any, end: Any) -> Any:
    """A callback that calls `begin` and `end` around each optimizer step."""
    from transformers import TrainerCallback

    class AtSteps(TrainerCallback):
        def on_step_begin(self, *args: Any, **more: Any) -> None:
            begin()

        def on_step_end(self, *args: Any, **more: Any) -> None:
            end()

    return AtSteps()
