"""What `scripts.train` refuses before it starts a process: one sentence with the key, the value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like import config as configs
from scripts.train import parse, prepare

QUICKSTART = "configs/quickstart.yaml"


def refusal(folder: Path, *overrides: str) -> str:
    """The sentence with which a run is refused; nothing is left behind."""
    argv = [QUICKSTART, f"run.dir={folder / 'runs'}", *overrides]
    with pytest.raises((ValueError, OSError)) as error:
        prepare(parse(argv), argv)
    assert not (folder / "runs").exists()
    return " ".join(str(error.value).split())


VALUES = [
    (["model.hidden_size=0"], "model.hidden_size: must be at least 1, got 0 [from command line]"),
    (["model.num_hidden_layers=0"], "model.num_hidden_layers: must be at least 1, got 0"),
    (["model.rope_theta=0"], "model.rope_theta: must be above 0, got 0"),
    (["learner.betas=[0.9]"], "learner.betas: expected 2 values, got [0.9]"),
    (["learner.betas=[2,3]"], "learner.betas: each must be at least 0 and below 1, got [2, 3]"),
    (["learner.lr=inf"], "learner.lr: must be at least 0 and finite, got inf"),
    (["learner.lr=.nan"], "learner.lr: expected float, got nan"),
    (["learner.publish_dtype=float31"], "learner.publish_dtype: expected Literal['bfloat16', 'float16', 'float32']"),
    (["learner.critic_lr=-1"], "learner.critic_lr: must be at least 0, got -1"),
    (["learner.lora={rank: -1}"], "learner.lora.rank: must be at least 1, got -1"),
    (["learner.normalise=-3"], "learner.normalise: must be above 0, got -3"),
    (["learner.normalise=mean"], "learner.normalise: expected Literal['token_mean', 'sequence_mean'] | float"),
    (["engine.slots=0"], "engine.slots: must be at least 1, got 0"),
    (["engine.kv_tokens=-1"], "engine.kv_tokens: must be at least 1, got -1"),
    (["workflow={name: best_of_n, n: 0}"], "workflow.n: must be at least 1, got 0"),
    (["run.seed=-1"], "run.seed: must be at least 0 and at most 18446744073709551615, got -1"),
    (["run.seed=18446744073709551616"], "run.seed: must be at least 0 and at most 18446744073709551615"),
    (["run.max_seconds=-1"], "run.max_seconds: must be at least 0, got -1"),
    (["run.target_reward=.nan"], "run.target_reward: must be a number, got nan"),
    (["weights.dense_above=2"], "weights.dense_above: must be at least 0 and at most 1, got 2"),
    (["buffer.heartbeat_timeout=inf"], "buffer.heartbeat_timeout: must be at least 2 and at most 10000000, got inf"),
    (["launcher.ready_timeout=0"], "launcher.ready_timeout: must be above 0"),
    (["loss=ppo", "loss.clip=-1"], "loss.clip: must be above 0 and at most 1, got -1"),
    (["loss=ppo", "loss.clip=2"], "loss.clip: must be above 0 and at most 1, got 2"),
    (["loss=ppo", "loss.dual_clip=1"], "loss.dual_clip: must be above 1, got 1"),
    (["loss={name: dppo, tv_high: 1.5}"], "loss.tv_high: must be above 0 and at most 1, got 1.5"),
    (["loss={name: dg_kondo, keep: 0}"], "loss.keep: must be above 0 and at most 1, got 0"),
    (["loss={name: pmpo, alpha: 2}"], "loss.alpha: must be at least 0 and at most 1, got 2"),
    (["loss={name: vtrace, rho_bar: 0}"], "loss.rho_bar: must be above 0, got 0"),
    (["advantage={name: gae, lam: 2}", "learner.critic_lr=1e-3"], "advantage.lam: must be at least 0 and at most 1"),
    (["buffer.transport=ipc", "buffer.port=7777"], "buffer.transport=ipc has no use for buffer.port=7777: leave that"),
    (["buffer.transport=ipc", "buffer.host=192.0.2.1"], "ipc has no use for buffer.host=192.0.2.1"),
    (["mode=sync", "scheduler.name=async"], "scheduler.name=async contradicts mode=sync: say mode=async"),
    (["mode=async", "scheduler=sync"], "scheduler.name=sync contradicts mode=async: say mode=sync"),
    (["run=5", "run.steps=3"], "run.steps: run is 5 [from command line], which has no keys; leave one of the two out"),
]


@pytest.mark.parametrize(
    ("argv", "words"), VALUES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_value_that_can_not_work_is_refused_with_its_key(tmp_path: Path, argv: list[str], words: str) -> None:
    assert words in refusal(tmp_path, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["run.seed=18446744073709551615"],
        ["run.max_seconds=inf", "learner.betas=[0, 0.5]", "learner.normalise=12", "weights.dense_above=0"],
        ["loss={name: tis, cap: inf}"],
        ["loss={name: decoupled_ppo, clip: 1, behaviour_cap: null}"],
        ["learner.lora={}", "scheduler.max_staleness=inf"],
    ],
)
def test_the_ends_of_ranges_are_taken(argv: list[str]) -> None:
    configs.load([QUICKSTART, *argv])


def test_the_mode_follows_a_scheduler_that_was_chosen_alone() -> None:
    assert configs.load([QUICKSTART, "scheduler=sync"]).mode == "sync"
    assert configs.load([QUICKSTART]).mode == "async"
