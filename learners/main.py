"""The learner process: batches in, train steps, weights out. The order of things in a step is what matters here:

    batch k arrives → batch k+1 is asked for → train → "trained k" → publish → metrics, checkpoint

so that the buffer can prepare the next batch during the step, and actors get new weights before anything that only
people wait for. Waits for the buffer (unblocked by pushes of the actors); never for an actor.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from areal_like.client import LearnerClient
from areal_like.interfaces import Trainer
from areal_like.metrics import MetricsLog
from areal_like.process import Role, run_role
from areal_like.registry import bind, build, resolve
from learners.publisher import Publisher

log = logging.getLogger(__name__)


def build_trainer(config: Any) -> Trainer:
    """The learner of the config; one that needs a model gets it, with its loss and advantage."""
    learner = resolve("learner", config.learner.name)
    if not getattr(learner, "needs_model", False):
        return build("learner", config.learner)
    import torch

    torch.set_num_threads(config.actors.threads)
    vocab_size = build("task", config.task, config.run.seed).vocab_size
    model = build("model", config.model, config.run.seed, vocab_size)
    loss, advantage = bind("loss", config.loss), bind("advantage", config.advantage)
    return build("learner", config.learner, model, loss, advantage, config.sampling.temperature, config.run.seed)


class TrainLoop:
    """Train steps until the config's end, then the final evaluation and the summary."""

    def __init__(self, config: Any, trainer: Trainer, client: LearnerClient, publisher: Publisher, metrics: MetricsLog):
        self.config, self.trainer, self.client = config, trainer, client
        self.publisher, self.metrics = publisher, metrics
        self.version = 0
        self.digest = ""
        self.waited = 0.0
        self.evaluations: list[dict[str, Any]] = []
        self._tokens = 0

    def run(self) -> dict[str, Any]:
        """Returns the summary."""
        self.client.hello()
        self._publish()
        self.client.want(0, 0)
        step, reason, begin = 0, self._reason_to_stop(0, 0.0), time.monotonic()
        while not reason:
            batch, info = self._next_batch()
            if step == 0:
                begin = time.monotonic()
                self.waited = 0.0
            self.client.want(step + 1, (step + 1) // self.config.weight_sync_interval)
            started = time.monotonic()
            row = self.trainer.train(batch)
            row["train/step_seconds"] = time.monotonic() - started
            self.client.trained(step)
            step += 1
            if step % self.config.weight_sync_interval == 0:
                self.version += 1
                row["publish/seconds"] = self._publish()
            elapsed = time.monotonic() - begin
            self._write(step, row, info, elapsed)
            reason = self._reason_to_stop(step, info["seconds"])
        log.info("training ends: %s", reason)
        report = self.client.finish(reason)
        return self._summary(step, reason, report, time.monotonic() - begin)

    def _next_batch(self) -> tuple[Any, dict[str, Any]]:
        begin = time.monotonic()
        batch, info = self.client.batch()
        waited = time.monotonic() - begin
        self.waited += waited
        info["train/wait_seconds"] = waited
        return batch, info

    def _publish(self) -> float:
        """Offer the current weights as the current version; returns the seconds that it took."""
        begin = time.monotonic()
        manifest = self.publisher.publish(self.version, self.trainer.snapshot())
        self.digest = manifest["digest"]
        self.client.published(manifest)
        return time.monotonic() - begin

    def _write(self, step: int, row: dict[str, Any], info: dict[str, Any], elapsed: float) -> None:
        evaluations = info.pop("evaluations")
        self.evaluations += evaluations
        if evaluations:
            newest = evaluations[-1]
            row |= {"eval/reward": newest["reward"], "eval/version": newest["version"], "eval/length": newest["length"]}
        self._tokens += int(row.get("tokens", 0))
        row["train/idle_share"] = self.waited / elapsed if elapsed else 0.0
        row["train/tokens_per_second"] = self._tokens / elapsed if elapsed else 0.0
        row["publish/bytes"] = self.publisher.bytes_sent
        self.metrics.write({"step": step, "version": self.version, **row, **info})

    def _reason_to_stop(self, step: int, seconds: float) -> str:
        run = self.config.run
        if step >= run.steps:
            return f"{run.steps} steps are done"
        if run.max_seconds is not None and seconds >= run.max_seconds:
            return f"{run.max_seconds} seconds have passed"
        reached = (
            run.target_reward is not None and self.evaluations and self.evaluations[-1]["reward"] >= run.target_reward
        )
        return f"the held-out reward has reached {run.target_reward}" if reached else ""

    def _summary(self, steps: int, reason: str, report: dict[str, Any], elapsed: float) -> dict[str, Any]:
        evaluations = report["evaluations"]
        target = self.config.run.target_reward
        reached = [e["seconds"] for e in evaluations if target is not None and e["reward"] >= target]
        return {
            "reward_before": evaluations[0]["reward"] if evaluations else None,
            "reward_after": evaluations[-1]["reward"] if evaluations else None,
            "steps": steps,
            "version": self.version,
            "seconds": report["trained_seconds"],
            "seconds_to_target": reached[0] if reached else None,
            "stopped_because": reason,
            "staleness_mean": report["staleness_mean"],
            "staleness_max": report["staleness_max"],
            "staleness_bound": self.config.scheduler.get("max_staleness", 0),
            "tokens_per_second": report.get("rollout/tokens", 0) / max(1e-9, report["trained_seconds"]),
            "trained_tokens_per_second": self._tokens / max(1e-9, elapsed),
            "actor_idle_share": report.get("rollout/idle_share"),
            "learner_idle_share": self.waited / elapsed if elapsed else 0.0,
            "update_apply_seconds": report.get("rollout/update_apply_seconds"),
            "update_pause_seconds": report.get("rollout/update_pause_seconds"),
            "weights_digest": self.digest,
            "ledger": report["ledger"],
            "evaluations": evaluations,
        }


def main(role: Role) -> None:
    trainer = build_trainer(role.config)
    publisher = Publisher(role.endpoint("weights"))
    client = LearnerClient(role.find("buffer"), role.name)
    try:
        with MetricsLog(role.run / "metrics.jsonl") as metrics:
            summary = TrainLoop(role.config, trainer, client, publisher, metrics).run()
        trainer.save(str(role.run / "checkpoints" / "final"))
        (role.run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    finally:
        client.close()
        publisher.close()


if __name__ == "__main__":
    run_role(main)
