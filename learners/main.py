"""The learner process: batches in, train steps, weights out. The order within a step matters:

    batch k arrives → ask for batch k+1 → train → "trained k" → publish → metrics → checkpoint → "checkpointed"

So the buffer can prepare the next batch during the step, and actors get new weights before the metrics are written. The
learner waits for the buffer (which actors' pushes unblock), never for an actor. If the run folder holds a checkpoint,
training continues from it: the buffer serves all later batches again. With a supervised loss there is no buffer:
batches come from the task, and only the last weights are published, for their digest.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.config.registry import build, is_supervised
from areal_like.config.run_config import ranks_of
from areal_like.config.schema import OWN
from areal_like.interfaces import Trainer
from areal_like.run import checkpoints
from areal_like.run.metrics import MetricsLog
from areal_like.run.process import EXIT_PAUSED, EXIT_STOPPED, Role, run_role
from areal_like.run.run_folder import SUMMARY, note_step, progress_of, reason_to_stop
from areal_like.run.spans import Spans
from areal_like.types import Batch
from areal_like.wire.client import LearnerClient, Stopped
from areal_like.wire.messages import Manifest
from learners.attestation import Attestation
from learners.build import build_trainer
from learners.demonstrated import Demonstrated, client_of
from learners.probe import Reference, sequences_of
from learners.publication import Alone, Coding, Publisher
from learners.trained_samples import TrainedSamples
from learners.untrainable import Untrainable

log = logging.getLogger(__name__)
DRAINED = "it was drained"


@dataclass
class RunProgress:
    """What a checkpoint stores beside the trainer's own state: `steps` trained batches; `seconds` since the first
    lease; `elapsed` since the first batch, of which `waited` were spent waiting; `staleness`, the sum over the trained
    `samples`, in versions; `nonfinite`, steps whose loss or gradient was not finite."""

    steps: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    waited: float = 0.0
    tokens: int = 0
    samples: int = 0
    staleness: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    nonfinite: int = 0


class NotFinite(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class TrainLoop:
    """Makes train steps until the config's end, then runs the final evaluation and writes the summary."""

    def __init__(
        self,
        role: Role,
        trainer: Trainer,
        client: LearnerClient | Demonstrated,
        publisher: Publisher,
        attestation: Attestation,
        metrics: MetricsLog,
        reference: Reference,
    ):
        self.run_folder, self.config, self.trainer, self.client = role.run, role.config, trainer, client
        self.publisher, self.attestation, self.metrics = publisher, attestation, metrics
        self.reference, self.alone = reference, is_supervised(role.config)
        self.spans = Spans(role.run, role.name)
        self.progress = RunProgress()
        self.digest = ""
        self._published = -1
        self._stepped = False  # in this process
        self._in_a_row = 0  # batches that were set aside
        self._nonfinite_in_a_row = 0

    @property
    def version(self) -> int:
        return self.progress.steps // self.config.weight_sync_interval

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        self.trainer.load_state(folder)
        meta = checkpoints.meta(folder)
        self.progress = RunProgress(**progress_of(self.run_folder, meta, meta["steps"]))
        log.info("resumed from %s, version %d", folder, self.version)

    def run(self) -> dict[str, Any]:
        """Returns the summary."""
        progress, before = self.progress, dataclasses.replace(self.progress)
        self.samples = TrainedSamples(self.run_folder, self.config.run, progress.steps)
        self.client.hello(getattr(self.trainer, "vocab_size", None), getattr(self.trainer, "routing", None))
        if not self.alone:
            self._publish()
        self._want(progress.steps)
        reason, begin = self._reason_to_stop(), time.monotonic()
        while not reason:
            try:
                batch, info = self._next_batch()
                if progress.steps == before.steps:
                    begin = time.monotonic()
                    progress.waited = before.waited
                row = self._train(batch)
            except Stopped as stopped:
                self._checkpoint(last=True)
                if not stopped.drained:
                    raise
                reason = DRAINED
                break
            except Untrainable as fault:
                self._set_aside(fault)
                continue
            self.client.trained(progress.steps)
            progress.steps += 1
            if progress.steps % self.config.weight_sync_interval == 0 and not self.alone:
                row["publish/seconds"] = self._publish()
            progress.elapsed = before.elapsed + time.monotonic() - begin
            progress.seconds = info["seconds"] = before.seconds + info["seconds"]
            info["evaluations"] = _later(info["evaluations"], before.seconds)
            found = getattr(self.trainer, "staleness", batch.staleness)()  # the trainer knows other ranks' shares, too
            progress.samples, progress.staleness = progress.samples + len(found), progress.staleness + sum(found)
            self.samples.keep(batch, progress.steps, getattr(self.trainer, "numbers", None))
            self._count_nonfinite(row)
            self._write(row, info)
            self._check_finite()
            reason = self._reason_to_stop()
            self._checkpoint(last=bool(reason))
        log.info("training ends: %s", reason)
        unpublished = bool(progress.steps % self.config.weight_sync_interval)
        if unpublished or self.alone:
            self._publish(self.version + unpublished)  # the last evaluation then sees the weights that are saved
        manifest = self.publisher.wait()
        self._published, self.digest = manifest.version, manifest.digest
        report = self.client.finish(reason, progress.steps)
        return self._summary(reason, report, before)

    def _train(self, batch: Batch) -> dict[str, Any]:
        """Make a train step, while the buffer prepares the next batch. Returns its metrics. Raises Untrainable."""
        if not self.alone:
            self.attestation.check(batch)
        self._want(batch.index + 1)
        started = time.monotonic()
        with self.spans.during("train"):
            trained = self.trainer.train(batch)
        row = {**trained, "train/step_seconds": time.monotonic() - started}
        self._in_a_row = 0
        return row

    def _want(self, index: int) -> None:
        self.client.want(index, index // self.config.weight_sync_interval)

    def _set_aside(self, fault: Untrainable) -> None:
        """Have an untrainable batch replaced. Raises the fault if that is impossible or too many failed in a row."""
        step, most = self.progress.steps, self.config.run.max_untrainable
        if isinstance(self.client, Demonstrated) or self.config.replay or self.config.inject_staleness is not None:
            raise fault  # demonstrations, a replay, or a fixed age allow no other batch
        log.warning("step %d: %s", step + 1, fault, exc_info=fault.__cause__)
        self.client.set_aside(step, str(fault))
        self._in_a_row += 1
        if fault.moved:
            raise RuntimeError(f"{fault}. It failed after one of its optimizer steps: training cannot continue")
        if self._in_a_row >= most:
            kept = self.run_folder / "untrainable"
            raise RuntimeError(f"{most} batches in a row (run.max_untrainable) were set aside, see {kept}: {fault}")
        self._want(step)

    def _count_nonfinite(self, row: dict[str, Any]) -> None:
        finite = all(math.isfinite(row.get(name, 0.0)) for name in ("loss", "grad_norm"))
        self._nonfinite_in_a_row = 0 if finite else self._nonfinite_in_a_row + 1
        self.progress.nonfinite += not finite
        if not finite:
            log.warning("step %d: loss %s, gradient norm %s", self.progress.steps, row.get("loss"), row["grad_norm"])
        row["train/nonfinite_steps"] = self.progress.nonfinite

    def _check_finite(self) -> None:
        """Raises NotFinite if too many steps in a row had no finite loss or gradient."""
        most, steps = self.config.run.max_nonfinite, self.progress.steps
        if self._nonfinite_in_a_row >= most:
            good = checkpoints.latest(self.run_folder, up_to=steps - most)
            raise NotFinite(
                f"run.max_nonfinite: got {most} train steps in a row, up to step {steps}, without a finite loss or "
                f"gradient; last good checkpoint: {good[1] if good else 'none'}. Fix the loss, or lower learner.lr"
            )

    def _checkpoint(self, last: bool) -> None:
        """Write a checkpoint if one is due, and at the last step in any case, unless its weights are unpublished."""
        steps, interval = self.progress.steps, self.config.weight_sync_interval
        if not checkpoints.is_due(steps, self.config.checkpoint.every, interval) and (not last or steps % interval):
            return
        meta = dataclasses.asdict(self.progress)
        with self.spans.during("checkpoint"):
            checkpoints.write(self.run_folder, steps, self.trainer.save_state, meta, self.config.checkpoint.keep)
        self.client.checkpointed(steps)

    def _next_batch(self) -> tuple[Any, dict[str, Any]]:
        begin = time.monotonic()
        batch, info = self.client.batch(may_pause=self.progress.steps % self.config.weight_sync_interval == 0)
        info["train/wait_seconds"] = time.monotonic() - begin
        self.progress.waited += info["train/wait_seconds"]
        return batch, info

    def _publish(self, version: int | None = None) -> float:
        """Publish the current weights while training continues. Returns the seconds for which training waited."""
        version = self.version if version is None else version
        with self.spans.during("publish"):
            self.reference.take(version)
            return self.publisher.publish(version, self.trainer.snapshot)

    def _write(self, row: dict[str, Any], info: dict[str, Any]) -> None:
        progress, evaluations = self.progress, info.pop("evaluations")
        progress.evaluations = [*progress.evaluations, *evaluations]  # the list is shared with `before`
        if evaluations:
            newest = evaluations[-1]
            row |= {f"eval/{key}": newest[key] for key in ("reward", "loss", "version", "length") if key in newest}
            row |= heldout_metrics(newest.get("sets", {}))
        progress.tokens += int(row.get("tokens", 0))
        row["train/idle_share"] = progress.waited / max(1e-9, progress.elapsed)
        row["train/tokens_per_second"] = progress.tokens / max(1e-9, progress.elapsed)
        row |= self.publisher.metrics
        first = {"step": progress.steps, "version": self.version}
        self.metrics.write(first | info | row | first)
        if not self._stepped:
            note_step(self.run_folder)
            self._stepped = True

    def _reason_to_stop(self) -> str:
        progress = self.progress
        return reason_to_stop(self.config.run, progress.steps, progress.seconds, progress.evaluations)

    def _summary(self, reason: str, report: dict[str, Any], before: RunProgress) -> dict[str, Any]:
        progress, seconds = self.progress, before.seconds + (report["trained_seconds"] or 0.0)
        evaluations = before.evaluations + _later(report["evaluations"], before.seconds)
        target, measured = self.config.run.target_reward, "loss" if self.alone else "reward"
        reached = [e["seconds"] for e in evaluations if target is not None and e["reward"] >= target]
        faults = ("rewards/", "refused/", "served/alarms")
        found: dict[str, Any] = {
            # A run killed during its first round has no evaluation of version 0.
            f"{measured}_before": evaluations[0][measured] if evaluations and not evaluations[0]["version"] else None,
            f"{measured}_after": evaluations[-1][measured] if evaluations else None,
            "steps": progress.steps,
            "version": self._published,
            "seconds": seconds,
            "stopped_because": reason,
            "since_step": before.steps,  # rates and shares count from here on, except the learner's own
            "trained_tokens_per_second": progress.tokens / max(1e-9, progress.elapsed),
            "learner_idle_share": progress.waited / max(1e-9, progress.elapsed),
            "weights_digest": self.digest,
            "faults": {"train/nonfinite_steps": progress.nonfinite},
            "evaluations": evaluations,
        }
        if self.alone:
            return found
        return found | {
            "seconds_to_target": reached[0] if reached else None,
            "staleness_mean": progress.staleness / max(1, progress.samples),
            "staleness_max": report["staleness_max"],
            "staleness_bound": report["staleness_bound"],
            "tokens_per_second": report.get("rollout/tokens", 0) / max(1e-9, seconds - before.seconds),
            "actor_idle_share": report.get("rollout/idle_share"),
            "update_apply_seconds": report.get("rollout/update_apply_seconds"),
            "update_pause_seconds": report.get("rollout/update_pause_seconds"),
            "ledger": report["ledger"],
            "faults": {name: value for name, value in report.items() if name.startswith(faults)} | found["faults"],
        }


def heldout_metrics(sets: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures of held-out sets by their names in `metrics.jsonl`. Figures of a single task's own set stand beside
    `eval/reward`; other sets have `heldout/NAME` (the reward) and `heldout/NAME/FIGURE`."""
    found: dict[str, float] = {}
    for name, figures in sets.items():
        prefix = "eval" if name == OWN else f"heldout/{name}"
        found |= {f"{prefix}/{figure}": value for figure, value in figures.items() if figure != "reward"}
        found["eval/reward" if name == OWN else prefix] = figures["reward"]
    return found


def _later(evaluations: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Evaluations on the clock of the whole run: the buffer's clock restarts at a resume."""
    return [result | {"seconds": result["seconds"] + seconds} for result in evaluations]


def main(role: Role) -> None:
    others = Alone()
    if ranks_of(role.config) == 1:
        trainer = build_trainer(role.config)
    else:
        from learners import follower  # imports torch

        trainer, others = follower.lead(role)
    checkpoint = checkpoints.latest(role.run)
    task = build("task", role.config.task, role.config.run.seed)
    score = getattr(trainer, "logprobs_of", None)
    client = client_of(role, task, score)
    role.orders.on_pause(client.pause)
    if role.grace:
        role.orders.on_end(client.pause, role.grace)
    attestation = Attestation(role.run, Path(role.config.replay) if role.config.replay else None)
    reference = Reference(sequences_of(task), role.config.weights.probe_every, score)

    def announce(manifest: Manifest) -> None:
        attestation.add(manifest.version, manifest.digest)
        client.published(reference.added_to(manifest))

    coding = Coding.of(role.config.weights)
    publisher = Publisher(role.endpoint("weights"), coding, announce, role.keys, others)
    try:
        with MetricsLog(role.run / "metrics.jsonl", done=checkpoint[0] if checkpoint else 0) as metrics:
            loop = TrainLoop(role, trainer, client, publisher, attestation, metrics, reference)
            if checkpoint:
                loop.resume(checkpoint[1])
            summary = loop.run()
        final = str(role.run / "checkpoints" / "final")  # a folder that other programs can load
        trainer.save(final)
        if hasattr(task, "save_tokenizer"):
            task.save_tokenizer(final)
        beside = role.run / "summary.tmp"
        beside.write_text(json.dumps(summary, indent=2) + "\n")
        note_step(role.run)  # even if no step was left
        beside.replace(role.run / SUMMARY)  # a summary exists only for a finished run, and is complete
    except Stopped as stopped:
        log.info("ending after step %d: %s", loop.progress.steps, stopped)
        sys.exit(EXIT_PAUSED if stopped.by_signal else EXIT_STOPPED)
    finally:
        publisher.close()
        client.close()


if __name__ == "__main__":
    run_role(main)
