"""The buffer process: puts the parts together and runs the controller."""

from __future__ import annotations

from areal_like.bus import BusError, Router, is_loopback
from areal_like.process import Role, run_role
from areal_like.registry import bind, build
from buffer.admission import Bound
from buffer.controller import Controller
from buffer.evaluation import Evaluation
from buffer.prompts import PromptCursor
from buffer.replay import Replay


def main(role: Role) -> None:
    config = role.config
    if config.buffer.transport == "tcp" and not is_loopback(config.buffer.host):
        raise BusError(f"buffer.host={config.buffer.host}: without encryption keys the buffer binds to loopback only")
    router = Router(role.endpoint("buffer"))
    task = build("task", config.task, config.run.seed)
    scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
    bound = Bound(scheduler.max_staleness, config.groups_per_batch, config.weight_sync_interval)
    heldout = min(config.eval.prompts, task.size("heldout"))
    controller = Controller(
        router,
        Replay(bound, bind("policy", config.policy), config.staleness_policy),
        scheduler,
        PromptCursor(task.size("train"), config.run.seed),
        Evaluation(config.eval.every, heldout, config.eval.temperature),
        expected_actors=config.actors.count,
        max_bytes=config.buffer.max_bytes,
        heartbeat_timeout=config.buffer.heartbeat_timeout,
    )
    role.offer("buffer", router.endpoint)
    try:
        controller.run()
    finally:
        router.close()


if __name__ == "__main__":
    run_role(main)
