"""The learner process: batches in, train steps, weights out. The order within a step matters:

    batch k arrives → ask for batch k+1 → train → "trained k" → publish → metrics → begin a checkpoint
    when the checkpoint is durable, maybe some steps later → "checkpointed"

So the buffer can prepare the next batch during the step, and actors get new weights before the metrics are written. A
thread writes the checkpoint; the next checkpoint, a stop and the end of the run wait for it. The learner waits for the
buffer (which actors' pushes unblock), never for an actor. Training continues from the run folder's checkpoint: the
buffer serves all later batches again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from areal_like.config.registry import build
from areal_like.config.run_config import ranks_of, record
from areal_like.interfaces import Trainer
from areal_like.run import checkpoints
from areal_like.run.metrics import MetricsLog
from areal_like.run.process import EXIT_PAUSED, EXIT_STOPPED, Role, on_end, on_pause, run_role
from areal_like.run.run_folder import config_file, note, note_step, progress_of, reason_to_stop
from areal_like.run.samples import TrainedSamples
from areal_like.run.spans import Spans
from areal_like.types import Batch
from areal_like.wire.learner_client import LearnerClient, Stopped
from areal_like.wire.messages import Manifest
from learners.attestation import Attestation
from learners.build import build_trainer
from learners.probe import Reference, sequences_of
from learners.progress import RunProgress, on_clock_of_run, write_summary
from learners.publication import Alone, Coding, Publisher
from learners.untrainable import Interrupted, SettingAside, Untrainable

log = logging.getLogger(__name__)
LONGEST_SECONDS = 1e9
"""The most that a message can name."""


class TrainLoop:
    """Makes train steps until the config's end, then runs the final evaluation."""

    def __init__(
        self,
        role: Role,
        trainer: Trainer,
        client: LearnerClient,
        publisher: Publisher,
        attestation: Attestation,
        metrics: MetricsLog,
        reference: Reference,
        writer: checkpoints.CheckpointWriter,
    ):
        self.run_folder, self.config, self.trainer, self.client = role.run, role.config, trainer, client
        self.publisher, self.attestation, self.metrics = publisher, attestation, metrics
        self.reference, self.writer = reference, writer
        self.interval = role.config.weight_sync_interval
        self.spans = Spans(role.run, role.name)
        self.spans.start(time.monotonic())
        self.setting_aside = SettingAside(client, role.config)
        self.progress = RunProgress()
        trainer.shall_stop = lambda: self.progress.steps % self.interval == 0 and client.shall_stop()  # type: ignore[attr-defined]
        self._stepped = False  # in this process
        if sizing := getattr(trainer, "sizing", None):
            sizing.announce = lambda text: note(role.run, f"{role.name}: {text}")
        self._counted_to: float | None = None  # the time up to which `progress.elapsed` counts
        self._until: float | None = None  # seconds of this process's part of the run

    @property
    def version(self) -> int:
        return self.progress.steps // self.interval

    def resume(self, folder: Path) -> None:
        checkpoints.check(folder)
        self.trainer.load_state(folder)
        found = checkpoints.progress(folder)
        self.progress = RunProgress(**progress_of(self.run_folder, found, found["steps"]))
        self.attestation.resumed = self.version
        log.info("resumed from %s, version %d", folder, self.version)

    def run(self) -> dict[str, Any]:
        """Returns the summary."""
        progress, start, most = self.progress, dataclasses.replace(self.progress), self.config.run.max_seconds
        self._until = None if most is None else min(max(0.0, most - start.seconds), LONGEST_SECONDS)
        samples = TrainedSamples(self.run_folder, self.config.run, progress.steps)
        self.client.hello(getattr(self.trainer, "facts", None))
        self._publish(self.version)
        self._want(progress.steps)
        reason = self._reason_to_stop()
        while not reason:
            try:
                batch, info = self._next_batch()
                row = self._train(batch)
            except (Stopped, Interrupted) as stopped:
                if isinstance(stopped, Stopped) and stopped.late and most is not None:
                    progress.seconds = max(progress.seconds, most)
                self.client.stops()
                self._checkpoint(last=True)
                if isinstance(stopped, Interrupted):
                    raise Stopped(by_signal=self.client.pausing) from None
                if not stopped.drained:
                    raise
                reason = self._reason_to_stop() or "it was drained"
                break
            except Untrainable as fault:
                self.setting_aside.replace(progress.steps, fault)
                self._want(progress.steps)
                continue
            self.client.trained(progress.steps)
            progress.steps += 1
            if progress.steps % self.interval == 0:
                row["publish/seconds"] = self._publish(self.version)
            self._count_time()
            progress.seconds = info["seconds"] = start.seconds + info["seconds"]
            staleness = getattr(self.trainer, "staleness", batch.staleness)()  # other ranks' shares count, too
            progress.count(row, staleness, on_clock_of_run(info.pop("evaluations"), start.seconds))
            samples.keep(batch, progress.steps, getattr(self.trainer, "numbers", None))
            self._write(info | row)
            progress.check(self.run_folder, self.config.run, row.get("mismatch_kl"))
            reason = self._reason_to_stop()
            self._checkpoint(last=bool(reason))
        log.info("training ends: %s", reason)
        unpublished = bool(progress.steps % self.interval)
        if unpublished:
            self._publish(self.version + 1)  # the last evaluation then sees the weights that are saved
        manifest = self.publisher.wait()
        report = self.client.finish(reason, progress.steps)
        summary = progress.summary(start, reason, report, manifest, self.config)
        self._keep_best(summary["evaluations"])
        return summary

    def _next_batch(self) -> tuple[Any, dict[str, Any]]:
        begin = time.monotonic()
        batch, info = self.client.batch(may_pause=self.progress.steps % self.interval == 0)
        info["train/wait_seconds"] = time.monotonic() - begin
        if self._counted_to is None:  # the wait for the first batch does not count
            self._counted_to = time.monotonic()
        else:
            self.progress.waited += info["train/wait_seconds"]
        return batch, info

    def _train(self, batch: Batch) -> dict[str, Any]:
        """Make a train step, while the buffer prepares the next batch. Returns its metrics. Raises Untrainable."""
        self.attestation.check(batch)
        self._want(batch.index + 1)
        started = time.monotonic()
        with self.spans.during("train"):
            trained = self.trainer.train(batch)
        if (sizing := getattr(self.trainer, "sizing", None)) and sizing.found:
            record(config_file(self.run_folder), {f"learner.{knob}": size for knob, size in sizing.found.items()})
            sizing.found = {}
        self.setting_aside.in_a_row = 0
        return {**trained, "train/step_seconds": time.monotonic() - started}

    def _want(self, index: int) -> None:
        self.client.want(index, index // self.interval, self._until)

    def _publish(self, version: int) -> float:
        """Publish the current weights while training continues. Returns the seconds for which training waited."""
        with self.spans.during("publish"):
            self.reference.take(version)
            return self.publisher.publish(version, self.trainer.snapshot)

    def _count_time(self) -> None:
        now = time.monotonic()
        assert self._counted_to is not None
        self.progress.elapsed, self._counted_to = self.progress.elapsed + now - self._counted_to, now

    def _write(self, row: dict[str, Any]) -> None:
        first = {"step": self.progress.steps, "version": self.version}
        self.metrics.write(first | row | self.publisher.metrics | first)
        if not self._stepped:
            note_step(self.run_folder)
            shutil.rmtree(self.run_folder / "checkpoints" / "final", ignore_errors=True)  # the model of an earlier end
            self._stepped = True

    def _checkpoint(self, last: bool) -> None:
        """Begin a checkpoint if one is due, and at the last step in any case, unless its weights are unpublished. The
        last one is durable when this returns."""
        steps, interval, known = self.progress.steps, self.interval, self.config.checkpoint
        due = checkpoints.is_due(steps, known.every, interval) or (last and steps % interval == 0)
        if known.best and steps % interval == 0:  # is the present version evaluated?
            due |= checkpoints.is_due(steps + interval - 1, self.config.eval.every, 1)
        self._report_written(wait=False)
        if not due and not last:
            return
        with self.spans.during("checkpoint"):
            self._report_written(wait=True)
            if due and checkpoints.is_whole(self.run_folder, steps):
                self.client.checkpointed(steps)
            elif due:
                beside = getattr(self.trainer, "save_beside", None)
                saving = beside() if beside else contextlib.nullcontext(self.trainer.save_state)
                spared = checkpoints.evaluated(self.progress.evaluations, known.best, interval)
                self.writer.begin(steps, saving, dataclasses.asdict(self.progress), spared)
                self._report_written(wait=last or not beside)

    def _report_written(self, wait: bool) -> None:
        if (steps := self.writer.written(wait)) is not None:
            self.client.checkpointed(steps)
        self._keep_best(self.progress.evaluations)

    def _keep_best(self, evaluations: list[dict[str, Any]]) -> None:
        if measure := self.config.checkpoint.best:
            checkpoints.keep_best(self.run_folder, evaluations, measure, self.interval)

    def _reason_to_stop(self) -> str:
        progress = self.progress
        return reason_to_stop(self.config, progress.steps, progress.seconds, progress.evaluations)


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
    timeout = role.config.buffer.heartbeat_timeout
    client = LearnerClient(role.find("buffer"), role.name, link_timeout=timeout, keys=role.keys)
    on_pause(client.pause)
    if role.grace:
        on_end(client.pause, role.grace)
    attestation = Attestation(role.run, Path(role.config.replay) if role.config.replay else None)
    reference = Reference(sequences_of(task), role.config.weights.probe_every, score)

    def announce(manifest: Manifest) -> None:
        attestation.add(manifest.version, manifest.digest)
        client.published(reference.added_to(manifest))

    coding = Coding.of(role.config.weights)
    publisher = Publisher(role.endpoint("weights"), coding, announce, role.keys, others)
    try:
        with (
            MetricsLog(role.run / "metrics.jsonl", done=checkpoint[0] if checkpoint else 0) as metrics,
            contextlib.closing(checkpoints.CheckpointWriter(role.run, role.config.checkpoint.keep)) as writer,
        ):
            loop = TrainLoop(role, trainer, client, publisher, attestation, metrics, reference, writer)
            if checkpoint:
                loop.resume(checkpoint[1])
            summary = loop.run()
        final = str(role.run / "checkpoints" / "final")  # a folder that other programs can load
        trainer.save(final)
        if hasattr(task, "save_tokenizer"):
            task.save_tokenizer(final)
        write_summary(role.run, summary)
    except Stopped as stopped:
        log.info("ending after step %d: %s", loop.progress.steps, stopped)
        sys.exit(EXIT_PAUSED if stopped.by_signal else EXIT_STOPPED)
    finally:
        publisher.close()
        client.close()


if __name__ == "__main__":
    run_role(main)
