"""The buffer process: builds the parts and runs the server."""

from __future__ import annotations

import logging
import math
import sys
import time
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.registry import bind, build
from areal_like.config.run_config import Config
from areal_like.interfaces import Task
from areal_like.run import checkpoints
from areal_like.run.process import Role, run_role
from areal_like.run.run_folder import CONFIG, NEXT
from areal_like.tasks.heldout import sets_of
from areal_like.types import Prompt
from areal_like.wire.bus import Router
from buffer import recovery
from buffer.checks import MOST_ANSWERS, AnswerLimits, Unverified
from buffer.dispatch import Dispatcher
from buffer.evaluation import Evaluation
from buffer.gauges import Gauges
from buffer.groups import GroupManager, record_nothing
from buffer.injection import FixedAge
from buffer.journal import Journal, JournalError, Recorded, check_payloads, reader
from buffer.kept_samples import KeptSamples
from buffer.outbox import Outbox
from buffer.peers import Fleet, Peers
from buffer.prompts import PromptCursor, shares_of
from buffer.replay_server import ReplayServer
from buffer.schedulers import Scheduler
from buffer.server import Server
from buffer.shares import Shares
from buffer.staleness import Bound

log = logging.getLogger(__name__)
SWITCH_SECONDS = 0.001
"""Python's thread switch interval: a fifth of the default, because batches wait for the journal's thread."""


def restore(role: Role, groups: GroupManager) -> tuple[int, Journal | None]:
    """Restore the run from its journal. Returns train steps done, and the journal (None: off). Raises JournalError."""
    folder, options = role.run / "journal", role.config.buffer
    steps, keep = checkpoints.steps_done(role.run), role.config.checkpoint.keep
    found = sum(1 for _ in Recorded(folder, repair=True, check=True))
    if steps and not found:
        raise JournalError(
            f"can't resume {role.run}: it has a checkpoint of step {steps}, but its journal {folder} is empty"
        )
    journal = None
    if options.journal != "off":
        journal = Journal(folder, sync=options.journal == "fsync", keep=options.keep_journal, checkpoints=keep)
        sys.setswitchinterval(SWITCH_SECONDS)
    record = journal.append if journal else record_nothing
    recovery.restore(groups, Recorded(folder, next_batch=steps), steps, time.monotonic(), record, reader(folder))
    check_payloads(folder, groups.store.payloads())
    if found:
        log.info("restored from the journal: %s; the learner continues at batch %d", groups.store.ledger(), steps)
    if why := other_settings(role.run):
        redone = recovery.branch_off(groups, steps, why)
        log.info("from batch %d on %s: %d groups of later weights are rolled out again", steps, why, redone)
    return steps, journal


def other_settings(run: Path) -> str:
    """How the learner's settings differ from the earlier start, in words; "" if they do not. For a resume."""
    pending = run / NEXT / CONFIG
    if not pending.is_file():
        return ""
    before, now = configs.load_resolved(run / CONFIG), configs.load_resolved(pending)
    return ", ".join(configs.differences(before, now, ["learner"]))


def restore_scheduler(scheduler: Scheduler, groups: GroupManager, gauges: Gauges) -> None:
    """Restore the scheduler's state, and the metrics that explain batches to be served (again)."""
    for batch, state in groups.store.decided.items():
        scheduler.load_state_dict(state)
        gauges.decisions[batch] |= scheduler.metrics()
    if groups.store.scheduler:
        scheduler.load_state_dict(groups.store.scheduler)


def build_groups(config: Config, scheduler: Scheduler) -> GroupManager:
    """An empty buffer with the policies of the config."""
    bound = Bound(scheduler.max_staleness, config.groups_per_batch, config.weight_sync_interval)
    policy, group_filter = bind("batch_policy", config.batch_policy), bind("filter", config.filter)
    age = None if config.inject_staleness is None else FixedAge(bound, config.checkpoint.every)
    return GroupManager(bound, policy, config.staleness_policy, group_filter, age)


def build_dispatcher(
    config: Config, task: Task, router: Router, outbox: Outbox, groups: GroupManager, scheduler: Scheduler
) -> Dispatcher:
    """What decides in the run of a config. A simulation brings its own router."""
    actors = configs.actors_of(config)
    fanout = actors if config.weights.fanout is None else config.weights.fanout
    return Dispatcher(
        Peers(router, actors, fleet=Fleet(fanout)),
        groups,
        outbox,
        scheduler,
        PromptCursor(shares_of(task), config.run.seed, groups.store.counts.admitted),
        Evaluation(sets_of(config, task)),
        config.buffer.max_bytes,
        last_batch=config.run.steps,
        shares=Shares(configs.ranks_of(config)),
    )


def answer_limits(config: Config, task: Task, evaluation: Evaluation) -> dict[str, AnswerLimits]:
    """`limits` of the training rows, and `heldout_limits` of the places of held-out answers."""

    def longest(prompt: Prompt) -> int:
        return (config.sampling.max_new_tokens or prompt.max_tokens) + max(prompt.filler, default=0)

    def of_place(number: int) -> int:
        place = evaluation.places[number]
        return longest(place.of.prompt(place.prompt))

    plain = config.workflow.name == "single_turn"
    train = AnswerLimits(lambda row: longest(task.prompt("train", row)), one_prompt=plain)
    return {"limits": train, "heldout_limits": AnswerLimits(of_place)}


def build_server(
    config: Config, dispatcher: Dispatcher, samples: KeptSamples | None = None, **limits: AnswerLimits
) -> Server:
    window = min(dispatcher.samples_per_batch, MOST_ANSWERS)
    return Server(
        dispatcher,
        heartbeat_timeout=config.buffer.heartbeat_timeout,
        lease_timeout=config.buffer.lease_timeout,
        ready_timeout=config.launcher.get("ready_timeout", math.inf),
        verifiers=Unverified(config.task.name, config.rewards.timeout, config.rewards.max_unverified, window),
        samples=samples,
        **limits,
    )


def main(role: Role) -> None:
    config, ranks = role.config, configs.ranks_of(role.config)
    router = Router(role.endpoint("buffer"), role.keys)
    if config.replay:
        role.offer("buffer", router.endpoint)
        ReplayServer(router, Path(config.replay) / "journal", config.weight_sync_interval, ranks).run()
    task: Task = build("task", config.task, config.run.seed)
    scheduler: Scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
    groups = build_groups(config, scheduler)
    steps, journal = restore(role, groups)
    dispatcher = build_dispatcher(config, task, router, Outbox(router, journal), groups, scheduler)
    dispatcher.peers.learner.steps = steps
    restore_scheduler(scheduler, groups, dispatcher.gauges)
    limits = answer_limits(config, task, dispatcher.evaluation)
    server = build_server(config, dispatcher, KeptSamples(role.run, config.run, steps), **limits)
    role.offer("buffer", router.endpoint)
    try:
        server.run()
    finally:
        router.close()


if __name__ == "__main__":
    run_role(main)
