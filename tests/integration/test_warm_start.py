"""Runs with algorithm=sft: the learner alone, its resumes and adapters. (Reinforcement learning behind it:
`tests/integration/test_documented_commands.py`.)"""

from pathlib import Path

import pytest

from tests.integration.runs import rows, summary, train

TINY = ["algorithm=sft", "task={name: arithmetic, digits: 3}", "groups_per_batch=8", "eval.prompts=16"]
SCHEDULED = ["learner.schedule=cosine", "learner.schedule_steps=6", "learner.warmup_steps=1", "eval.every=2"]


def digest(run: Path) -> str:
    return summary(run)["weights_digest"]


@pytest.mark.parametrize("more", [[], ["learner.lora={rank: 2}"]], ids=["whole", "adapters"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, more: list[str]) -> None:
    setting = [*TINY, *SCHEDULED, *more]
    whole = train(tmp_path, "whole", *setting, "run.steps=6")
    parted = train(tmp_path, "parted", *setting, "run.steps=3")
    train(tmp_path, "parted", *setting, "run.steps=6", f"resume={parted}")
    assert digest(parted) == digest(whole)
    for key in ("loss", "lr", "grad_norm", "eval/loss"):
        assert [row.get(key) for row in rows(parted)] == [row.get(key) for row in rows(whole)], key
    found = summary(whole)
    assert [each["version"] for each in found["evaluations"]] == [0, 2, 4, 6]
    assert found["loss_after"] < found["loss_before"] and "reward_after" not in found
    assert (whole / "checkpoints" / "final" / "adapter").exists() is bool(more)
