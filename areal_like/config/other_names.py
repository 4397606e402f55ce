"""What other systems call a key or a component, and what to write here: for errors only.

Words of TRL, verl, AReaL, prime-rl, OpenRLHF and slime. A key is looked up by its end, the longest first:
`actor_rollout_ref.rollout.n` by `rollout.n`. Names that mean exactly the same are accepted instead (`ALIASES`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BATCH = "groups_per_batch (prompts) and sizing.group_size (answers per prompt); their product is the batch"
_CLIP_HIGH = "loss.clip_high"
_GPUS = "learner.ranks and actors.count"
_KL_LOSS = "learner.kl_loss, the factor of the KL in the loss (0: off)"
_KL_REWARD = "learner.kl_reward, the factor of the KL in the reward (0: off)"
_LENGTH = "sampling.max_new_tokens"
_MICRO = "learner.micro_batch_tokens, the tokens of a micro-batch"
_MINI = "learner.num_minibatches, optimizer steps per batch"
_NAME = "run.dir and run.name"
_PAPERS = "algorithm=grpo, algorithm=dapo, algorithm=dr_grpo, ... (docs/algorithms.md)"
_PASSES = "learner.num_minibatch_epochs"
_PROJECT = "run.project, which trackers show, and run.name"
_REWARD = "task=jsonl with task.reward=my_module:my_reward"
_SCHEDULE = "learner.schedule (constant, linear or cosine)"
_STEPS = "run.steps; there are no epochs"
_TP = "engine.tp_size, of engine=sglang"
_TRACKERS = "run.trackers=[tensorboard, wandb]"
_WARMUP = "learner.warmup_steps, in optimizer steps"

ALIASES = {
    "max_head_offpolicyness": "scheduler.max_staleness",
    "max_off_policy_steps": "scheduler.max_staleness",
    "max_staleness_steps": "scheduler.max_staleness",
    "max_staleness": "scheduler.max_staleness",
    "group_size": "sizing.group_size",
    "inject_mismatch": "engine.inject_mismatch",
}
"""Names that are accepted, with a note → ours."""

KEYS = {
    # optimizer
    "actor_learning_rate": "learner.lr",
    "adam_beta1": "learner.betas",
    "adam_beta2": "learner.betas",
    "adam_betas": "learner.betas",
    "adam_epsilon": "learner.eps",
    "beta1": "learner.betas",
    "beta2": "learner.betas",
    "critic.optim.lr": "learner.critic_lr",
    "critic_learning_rate": "learner.critic_lr",
    "grad_clip": "learner.clip_grad",
    "gradient_clipping": "learner.clip_grad",
    "learning_rate": "learner.lr",
    "lr": "learner.lr",
    "lr_scheduler": _SCHEDULE,
    "lr_scheduler_type": _SCHEDULE,
    "lr_warmup_steps": _WARMUP,
    "lr_warmup_steps_ratio": _WARMUP,
    "max_grad_norm": "learner.clip_grad",
    "max_norm": "learner.clip_grad",
    "warmup_ratio": _WARMUP,
    "warmup_steps": _WARMUP,
    "warmup_steps_proportion": _WARMUP,
    "weight_decay": "learner.weight_decay",
    # loss
    "behav_imp_weight_cap": "loss.correction.high, of loss=decoupled_ppo",
    "loss.behaviour_cap": "loss.correction.high, of loss=decoupled_ppo",
    "loss.cap": "loss.correction.weight_high, of loss=tis",
    "loss.cap_mode": "loss.correction: capped leaves tokens out, {name: ratio, weight_high: 5} cuts their weights",
    "loss.high": "loss.correction.high, of loss=icepop",
    "loss.level": "loss.correction.weight, of loss=is_pg",
    "loss.low": "loss.correction.low, of loss=icepop",
    "rejection_sampling": "loss.correction (docs/algorithms.md)",
    "rollout_correction": "loss.correction (docs/algorithms.md)",
    "rollout_is": "loss.correction.weight",
    "rollout_is_threshold": "loss.correction.weight_high",
    "rollout_rs": "loss.correction.reject and loss.correction.over",
    "off_policy_mask_threshold": "loss.correction={name: sequence_mask, high: ...}",
    "sapo_tau_neg": "loss.temperature_negative, of loss=sapo",
    "sapo_tau_pos": "loss.temperature, of loss=sapo",
    "sapo_temperature_neg": "loss.temperature_negative, of loss=sapo",
    "sapo_temperature_pos": "loss.temperature, of loss=sapo",
    "use_sapo_loss": "loss=sapo",
    "vllm_importance_sampling_cap": "loss.correction.weight_high",
    "vllm_importance_sampling_mode": "loss.correction (docs/algorithms.md)",
    "clip_eps": "loss.clip",
    "clip_epsilon": "loss.clip",
    "clip_eps_high": _CLIP_HIGH,
    "clip_range": "loss.clip",
    "clip_ratio": "loss.clip",
    "clip_ratio_c": "loss.dual_clip",
    "clip_ratio_high": _CLIP_HIGH,
    "clip_ratio_low": "loss.clip",
    "cliprange": "loss.clip",
    "cliprange_value": "learner.critic_clip",
    "value_eps_clip": "learner.critic_clip",
    "c_clip": "loss.dual_clip",
    "delta": "loss.dual_clip",
    "entropy_bonus": "learner.entropy_bonus",
    "entropy_coef": "learner.entropy_bonus",
    "entropy_coeff": "learner.entropy_bonus",
    "entropy_loss_coef": "learner.entropy_bonus",
    "eps_clip": "loss.clip",
    "eps_clip_high": _CLIP_HIGH,
    "eps_clip_higher": _CLIP_HIGH,
    "epsilon": "loss.clip",
    "epsilon_high": _CLIP_HIGH,
    "importance_sampling_level": "algorithm=gspo for whole sequences, and loss.correction.weight",
    "loss_agg_mode": "learner.normalise (token_mean, sequence_mean, or a number of tokens)",
    "algorithm": _PAPERS,
    "loss_type": _PAPERS,
    "policy_loss": "loss=ppo, loss=gspo, ... (docs/algorithms.md)",
    "prox_logp_method": "loss.proximal, of loss=decoupled_ppo",
    "recompute_logprob": "loss.proximal, of loss=decoupled_ppo",
    "tis_imp_ratio_cap": "loss.correction.weight_high, of loss=tis",
    "use_decoupled_loss": "loss=decoupled_ppo",
    "use_tis": "loss=tis",
    # KL
    "beta": _KL_LOSS,
    "init_kl_coef": _KL_REWARD,
    "kl_beta": _KL_LOSS,
    "kl_coef": "learner.kl_loss (the KL in the loss) or learner.kl_reward (in the reward)",
    "kl_ctl": _KL_REWARD,
    "kl_ctrl.kl_coef": _KL_REWARD,
    "kl_estimator": "learner.kl_loss_estimator",
    "kl_loss_coef": _KL_LOSS,
    "kl_loss_type": "learner.kl_loss_estimator",
    "use_kl_estimator": "learner.kl_loss_estimator",
    "use_kl_in_reward": _KL_REWARD,
    "use_kl_loss": _KL_LOSS,
    # advantage and reward
    "adv_estimator": "advantage=group, advantage=rloo, advantage=gae, ... (docs/algorithms.md)",
    "adv_norm": "advantage=group with advantage.std, or advantage=batch",
    "advantage_estimator": "advantage=group, advantage=rloo, advantage=gae, ... (docs/algorithms.md)",
    "custom_reward_function": _REWARD,
    "gae_lambda": "advantage.lam, of advantage=gae",
    "gamma": "advantage.gamma, of advantage=gae, reinforce_pp and turn",
    "lam": "advantage.lam, of advantage=gae",
    "lambd": "advantage.lam, of advantage=gae",
    "mask_no_eos_with_zero": "learner.overlong_filter, which leaves cut answers out of the loss",
    "mask_truncated_completions": "learner.overlong_filter",
    "norm_adv_by_std_in_grpo": "advantage.std",
    "normalize_advantages": "advantage.std",
    "overlong_buffer": "learner.overlong_buffer",
    "overlong_penalty_factor": "learner.overlong_penalty",
    "remote_rm_url": _REWARD,
    "reward_fn": _REWARD,
    "reward_func": _REWARD,
    "reward_funcs": _REWARD,
    "reward_function": _REWARD,
    "reward_model": _REWARD,
    "rm_type": _REWARD,
    "reward_clip": "learner.reward_clip",
    "reward_scaling": "learner.reward_scale",
    "scale_rewards": "advantage.std=sample, or for batch: advantage={name: batch, baseline: group, std: sample, "
    "deviation_of: rewards}",
    # groups and batches
    "batch_size": _BATCH,
    "dynamic_filtering": "filter=zero_variance",
    "dynamic_sampling": "filter=zero_variance",
    "filter_groups": "filter=zero_variance",
    "global_batch_size": _BATCH,
    "gradient_accumulation_steps": _MICRO,
    "max_epochs": _PASSES,
    "max_token_len_per_gpu": _MICRO,
    "max_tokens_per_mb": _MICRO,
    "micro_batch_size": _MICRO,
    "micro_train_batch_size": _MICRO,
    "mini_batch_size": _MINI,
    "n_samples": "sizing.group_size",
    "n_samples_per_prompt": "sizing.group_size",
    "num_generations": "sizing.group_size",
    "num_iterations": _PASSES,
    "over_sampling_batch_size": "scheduler.oversample_prompts, of mode=sync",
    "oversampling_factor": "scheduler.oversample_prompts, of mode=sync",
    "per_device_train_batch_size": _BATCH,
    "ppo_epochs": _PASSES,
    "ppo_max_token_len_per_gpu": _MICRO,
    "ppo_micro_batch_size": _MICRO,
    "ppo_micro_batch_size_per_gpu": _MICRO,
    "ppo_mini_batch_size": _MINI,
    "ppo_n_minibatches": _MINI,
    "rollout.n": "sizing.group_size",
    "rollout_batch_size": "groups_per_batch, in prompts",
    "rollouts_per_example": "sizing.group_size",
    "rollouts_per_prompt": "sizing.group_size",
    "steps_per_generation": _MINI,
    "train_batch_size": _BATCH,
    # staleness
    "async_level": "scheduler.max_staleness",
    "async_queue_size": "scheduler.max_staleness",
    "async_train": "mode=async",
    "colocate": "mode=sync",
    "max_async_level": "scheduler.max_staleness",
    "max_concurrent_rollouts": "scheduler.max_inflight_groups",
    "staleness_threshold": "scheduler.max_staleness, a whole number of versions",
    "trainer_mode": "mode (sync or async)",
    "trigger_parameter_sync_step": "weight_sync_interval",
    # sampling and lengths
    "generate_max_len": _LENGTH,
    "max_completion_length": _LENGTH,
    "max_model_len": "task.max_prompt_tokens, of task=jsonl, and sampling.max_new_tokens",
    "max_new_tokens": _LENGTH,
    "max_prompt_length": "task.max_prompt_tokens, of task=jsonl",
    "max_response_length": _LENGTH,
    "max_tokens": "sampling.max_new_tokens (of an answer) or learner.micro_batch_tokens (of a micro-batch)",
    "prompt_max_len": "task.max_prompt_tokens, of task=jsonl",
    "rollout_max_response_len": _LENGTH,
    "seq_len": _MICRO,
    "temperature": "sampling.temperature",
    # data and model
    "chat_template": "task.chat_template, of task=jsonl",
    "dataset": "task=jsonl with task.path",
    "dataset_name": "task=jsonl with task.path",
    "hf_checkpoint": "model=folder with model.path",
    "input_key": "task.prompt_key, of task=jsonl",
    "label_key": "task.answer_key, of task=jsonl",
    "model_name_or_path": "model=folder with model.path",
    "model_path": "model=folder with model.path",
    "pretrain": "model=folder with model.path",
    "prompt_data": "task=jsonl with task.path",
    "train_dataset": "task=jsonl with task.path",
    "train_files": "task=jsonl with task.path",
    "val_files": "task.heldout_path, of task=jsonl",
    # the run
    "ckpt.interval": "checkpoint.every",
    "eval_every": "eval.every",
    "eval_steps": "eval.every",
    "epochs": _STEPS,
    "experiment_name": _NAME,
    "gpu_memory_utilization": "engine.server={mem-fraction-static: 0.8}, of engine=sglang",
    "gradient_checkpointing": "learner.checkpoint_activations",
    "lora_alpha": "learner.lora={rank: 16, alpha: 32}",
    "lora_r": "learner.lora={rank: 16}",
    "lora_rank": "learner.lora={rank: 16}",
    "max_steps": "run.steps",
    "n_gpus_per_node": _GPUS,
    "nnodes": _GPUS,
    "num_episodes": _STEPS,
    "num_epochs": _STEPS,
    "num_gpus": _GPUS,
    "num_train_epochs": _STEPS,
    "output_dir": _NAME,
    "project_name": _PROJECT,
    "report_to": _TRACKERS,
    "resume_from_checkpoint": "resume=auto, or resume with a run folder",
    "rollout.name": "engine=torch or engine=sglang",
    "checkpoint_every": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "seed": "run.seed",
    "steps": "run.steps",
    "tensor_model_parallel_size": _TP,
    "tensor_parallel_size": _TP,
    "test_freq": "eval.every",
    "total_epochs": _STEPS,
    "total_steps": "run.steps",
    "total_train_epochs": _STEPS,
    "total_training_steps": "run.steps",
    "trial_name": _NAME,
    "use_vllm": "engine=sglang; there is no vLLM",
    "use_wandb": _TRACKERS,
    "wandb_project": _PROJECT,
}
"""The end of a key → what to write here."""

COMPONENTS = {
    "loss": {
        "clip_cov": "loss=ppo",
        "dpo": "loss=ppo: pairs of preferences are not trained here",
        "drgrpo": "algorithm=dr_grpo",
        "pg": "loss=is_pg, or loss=reinforce without correction",
        "ppo_clip": "loss=ppo",
        "reinforce++": "loss=ppo advantage=reinforce_pp",
        "rloo": "loss=is_pg advantage=rloo",
        "vanilla": "loss=ppo",
    },
    "advantage": {
        "dr_grpo": "advantage=group, or all of the paper with algorithm=dr_grpo",
        "grpo": "advantage=group advantage.std=true, or all of the paper with algorithm=grpo",
        "reinforce++": "advantage=reinforce_pp",
        "reinforce_plus_plus": "advantage=reinforce_pp",
        "reinforce_plus_plus_baseline": "advantage=reinforce_pp advantage.baseline=true",
    },
    "engine": {
        "hf": "engine=torch",
        "transformers": "engine=torch",
        "vllm": "engine=sglang; there is no vLLM",
    },
    "filter": {"dapo": "filter=zero_variance", "dynamic": "filter=zero_variance"},
    "launcher": {"accelerate": "launcher=local learner.ranks=2", "torchrun": "launcher=local learner.ranks=2"},
    "mode": {
        "colocated": "mode=sync",
        "disaggregated": "mode=async",
        "fully_async": "mode=async",
        "off_policy": "mode=async",
        "on_policy": "mode=sync",
        "one_step_off": "mode=async scheduler.max_staleness=1",
    },
    "model": {"hf": "model=folder with model.path", "llama": "model=folder with model.path"},
    "task": {
        "gsm8k": "the config qwen2.5/gsm8k, or task=jsonl with task.path",
        "math": "task=jsonl with task.path",
    },
    "workflow": {"agentic": "workflow=agent or workflow=multi_turn", "rlvr": "workflow=single_turn"},
}
"""Kind of component (or `mode`) → name elsewhere → what to write here."""


def instead_of(key: str, value: object = None) -> str:
    """` Here that is learner.lr.` for a key, or for those within its value, that another system calls so; else ""."""
    found = [KEYS[end] for path in _paths(key, value) for end in _ends(path) if end in KEYS]
    found = [text for text in found if not f"{text} ".startswith(f"{key} ")]  # the key that is wrong itself
    return f" Here that is {found[0]}." if found else ""


def instead_of_component(kind: str, name: str) -> str:
    """The same for a component's name."""
    if kind == "model" and "/" in name:
        return f" Write model=folder model.path={name}."
    found = COMPONENTS.get(kind, {}).get(name.lower().replace("-", "_"))
    return f" Write {found}." if found else ""


def instead_of_option(option: str, value: str) -> str:
    """The same for a setting that is written as an option: ` Write run.steps=5.` for `--steps 5`."""
    key = option.lstrip("-").replace("-", "_")
    found = ALIASES.get(key) or KEYS.get(key, key)
    if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", found):
        return f" Write {found}={value}."
    return instead_of(key) or " A setting is key=value, such as run.steps=5."


def _paths(key: str, value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _paths(f"{key}.{name}", below)
    yield key


def _ends(path: str) -> Iterator[str]:
    """`a.b.c`, `b.c`, `c`."""
    parts = path.lower().replace("-", "_").split(".")
    yield from (".".join(parts[first:]) for first in range(len(parts)))
