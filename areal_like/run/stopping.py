"""When a run ends. The learner asks after each train step; a resume asks first whether anything is left to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_like.config.schema import Run


def reason_to_stop(run: Run, steps: int, seconds: float, evaluations: Sequence[Mapping[str, float]]) -> str:
    """Why a run ends after `steps` train steps and `seconds`, in words; "" while it continues."""
    if steps >= run.steps:
        return f"{run.steps} steps are done"
    if run.max_seconds is not None and seconds >= run.max_seconds:
        return f"{run.max_seconds} seconds have passed"
    if run.target_reward is None or not evaluations:
        return ""
    reached = evaluations[-1]["reward"] >= run.target_reward
    return f"the held-out reward has reached {run.target_reward}" if reached else ""
