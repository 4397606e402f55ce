"""How far a run is: the numbers that a checkpoint keeps, their metrics, and the summary at the run's end."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.config.schema import OWN, Run
from areal_like.run import checkpoints
from areal_like.run.run_folder import SUMMARY, note_step, write
from areal_like.wire.messages import Manifest

log = logging.getLogger(__name__)
FAULTS = ("rewards/", "refused/", "served/alarms")
"""Beginnings of the names, in the buffer's report, of what the summary calls faults."""


@dataclass
class RunProgress:
    """What a checkpoint stores beside the trainer's own state: `steps` trained batches; `seconds` since the first
    lease; `elapsed` since the first batch, of which `waited` were spent waiting; `staleness`, the sum over the trained
    `samples`, in versions; `nonfinite`, steps whose loss or gradient was not finite; `mismatched_in_a_row`, steps
    in which engine and learner computed different logprobs."""

    steps: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    waited: float = 0.0
    tokens: int = 0
    samples: int = 0
    staleness: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    nonfinite: int = 0
    nonfinite_in_a_row: int = 0
    mismatched_in_a_row: int = 0

    @property
    def idle_share(self) -> float:
        return self.waited / max(1e-9, self.elapsed)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(1e-9, self.elapsed)

    def count(self, row: dict[str, Any], staleness: list[int], evaluations: list[dict[str, Any]]) -> None:
        """Count a train step: its metrics `row`, which get those of the run, and the staleness of its samples."""
        finite = all(math.isfinite(row.get(name, 0.0)) for name in ("loss", "grad_norm"))
        if not finite:
            log.warning("step %d: loss %s, gradient norm %s", self.steps, row.get("loss"), row["grad_norm"])
        self.nonfinite += not finite
        self.nonfinite_in_a_row = 0 if finite else self.nonfinite_in_a_row + 1
        self.samples += len(staleness)
        self.staleness += sum(staleness)
        self.tokens += int(row.get("tokens", 0))
        row["train/nonfinite_steps"] = self.nonfinite
        row["train/idle_share"] = self.idle_share
        row["train/tokens_per_second"] = self.tokens_per_second
        self.evaluations = [*self.evaluations, *evaluations]
        if evaluations:
            newest = evaluations[-1]
            row |= {f"eval/{key}": newest[key] for key in ("reward", "version", "length") if key in newest}
            row |= heldout_metrics(newest.get("sets", {}))

    def check(self, run: Path, limits: Run, mismatch: float | None) -> None:
        """Raises NotFinite if too many steps in a row had no finite loss or gradient, Mismatch if in as many steps
        tokens of the present weights had other logprobs in the engine (`mismatch_kl`; None: there were none)."""
        most, bound = limits.max_nonfinite, limits.max_mismatch or math.inf
        if mismatch is not None:
            self.mismatched_in_a_row = self.mismatched_in_a_row + 1 if mismatch > bound else 0
        if self.mismatched_in_a_row >= most:
            raise Mismatch(
                f"run.max_mismatch: got a mismatch_kl of {mismatch:.3g}, expected at most {bound:g}, in {most} train "
                "steps in a row: the engine computes another model than the learner, so no sample is of this policy"
            )
        if self.nonfinite_in_a_row >= most:
            good = checkpoints.latest(run, up_to=self.steps - most)
            raise NotFinite(
                f"run.max_nonfinite: got {most} train steps in a row, up to step {self.steps}, without a finite loss "
                f"or gradient; last good checkpoint: {good[1] if good else 'none'}. Fix the loss, or lower learner.lr"
            )

    def summary(
        self, start: RunProgress, reason: str, report: dict[str, Any], manifest: Manifest, config: Any
    ) -> dict[str, Any]:
        """The run's summary: of a run that ends for `reason`, in a process that continued from `start`. `report` is the
        buffer's last, `manifest` that of the last weights."""
        seconds = start.seconds + (report["trained_seconds"] or 0.0)
        counted = (self.elapsed - start.elapsed) or (seconds - start.seconds)  # as for the trained tokens
        evaluations = start.evaluations + on_clock_of_run(report["evaluations"], start.seconds)
        target = config.run.target_reward
        reached = [each["seconds"] for each in evaluations if target is not None and each["reward"] >= target]
        faults = {name: value for name, value in report.items() if name.startswith(FAULTS)}
        return {
            # A run killed during its first round has no evaluation of version 0.
            "reward_before": evaluations[0]["reward"] if evaluations and not evaluations[0]["version"] else None,
            "reward_after": evaluations[-1]["reward"] if evaluations else None,
            "steps": self.steps,
            "version": manifest.version,
            "seconds": seconds,
            "stopped_because": reason,
            "since_step": start.steps,  # rates and shares count from here on, except the learner's own
            "trained_tokens_per_second": self.tokens_per_second,
            "learner_idle_share": self.idle_share,
            "weights_digest": manifest.digest,
            "evaluations": evaluations,
            "seconds_to_target": reached[0] if reached else None,
            "staleness_mean": self.staleness / max(1, self.samples),
            "staleness_max": report["staleness_max"],
            "staleness_bound": report["staleness_bound"],
            "tokens_per_second": report.get("rollout/tokens", 0) / max(1e-9, counted),
            "actor_idle_share": report.get("rollout/idle_share"),
            "update_apply_seconds": report.get("rollout/update_apply_seconds"),
            "update_pause_seconds": report.get("rollout/update_pause_seconds"),
            "ledger": report["ledger"],
            "faults": faults | {"train/nonfinite_steps": self.nonfinite},
        }


class Mismatch(RuntimeError):
    """Engine and learner disagree about the model."""


class NotFinite(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


def heldout_metrics(sets: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures of held-out sets by their names in `metrics.jsonl`. Figures of a single task's own set stand beside
    `eval/reward`; other sets have `heldout/NAME` (the reward) and `heldout/NAME/FIGURE`."""
    found: dict[str, float] = {}
    for name, figures in sets.items():
        prefix = "eval" if name == OWN else f"heldout/{name}"
        found |= {f"{prefix}/{figure}": value for figure, value in figures.items() if figure != "reward"}
        found["eval/reward" if name == OWN else prefix] = figures["reward"]
    return found


def on_clock_of_run(evaluations: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Evaluations on the clock of the whole run: the buffer's clock restarts at a resume, after `seconds`."""
    return [result | {"seconds": result["seconds"] + seconds} for result in evaluations]


def write_summary(run: Path, summary: dict[str, Any]) -> None:
    """A summary exists only for a finished run, and is complete."""
    note_step(run)  # even if no step was left
    write(run / SUMMARY, json.dumps(summary, indent=2) + "\n")
