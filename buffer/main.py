"""The buffer process: builds the parts and runs the controller."""

from __future__ import annotations

import logging
import math
import sys
import time
from pathlib import Path

from areal_like.config import run_config as configs
from areal_like.config.registry import as_spec, bind, build
from areal_like.config.run_config import Config
from areal_like.config.schema import Spec
from areal_like.interfaces import Task
from areal_like.run import checkpoints
from areal_like.run.process import Role, run_role
from areal_like.run.run_folder import CONFIG, NEXT
from areal_like.tasks.heldout import sets_of
from areal_like.wire.bus import Router
from buffer import recovery
from buffer.controller import Controller
from buffer.evaluation import Evaluation, asked
from buffer.events import record_nothing
from buffer.gauges import Gauges
from buffer.injection import AgedSlots, Ages
from buffer.journal import Journal, JournalError, Recorded, check_payloads, reader, since_snapshot
from buffer.outbox import Outbox
from buffer.playback import Playback
from buffer.prompts import PromptCursor, shares_of
from buffer.relays import Relays
from buffer.replay import Replay
from buffer.results import Results
from buffer.run_state import RunState
from buffer.samplers import asks
from buffer.schedulers import Scheduler
from buffer.shares import Shares
from buffer.staleness import Bound, Slots
from buffer.untrained_samples import UntrainedSamples
from buffer.verifier_timeouts import MOST_ANSWERS, VerifierTimeouts

log = logging.getLogger(__name__)
SWITCH_SECONDS = 0.001
"""Python's thread switch interval: a fifth of the default, because batches wait for the journal's thread."""


def restore(role: Role, replay: Replay) -> tuple[int, Journal | None]:
    """Restore the state from the journal of an earlier process of this run. Returns the number of train steps done, and
    the journal to write to (None: off). Raises JournalError."""
    folder, options = role.run / "journal", role.config.buffer
    checkpoint = checkpoints.latest(role.run)
    steps = checkpoint[0] if checkpoint else 0
    found = sum(1 for _ in since_snapshot(folder, repair=True))
    if steps and not found:
        raise JournalError(
            f"can't resume {role.run}: it has a checkpoint of step {steps}, but its journal {folder} is empty"
        )
    journal = None
    if options.journal != "off":
        journal = Journal(folder, sync=options.journal == "fsync", keep=options.keep_journal)
        sys.setswitchinterval(SWITCH_SECONDS)
    record = journal.append if journal else record_nothing
    recovery.restore(replay, Recorded(folder), steps, time.monotonic(), record, reader(folder))
    check_payloads(folder, replay.store.payloads())
    if found:
        log.info("restored from the journal: %s; the learner continues at batch %d", replay.store.ledger(), steps)
    return steps, journal


def other_settings(run: Path) -> str:
    """How the learner's settings differ from the earlier start, in words; "" if they do not. For a resume."""
    pending = run / NEXT / CONFIG
    if not pending.is_file():
        return ""
    before, now = configs.load_resolved(run / CONFIG), configs.load_resolved(pending)
    return ", ".join(configs.differences(before, now, ["learner"]))


def go_on(scheduler: Scheduler, replay: Replay, gauges: Gauges) -> None:
    """Restore the scheduler's state, and the metrics that explain batches to be served (again)."""
    for batch, held in replay.store.decided.items():
        scheduler.load_state_dict(held)
        gauges.note_decision(batch, scheduler.metrics())
    if replay.store.scheduler:
        scheduler.load_state_dict(replay.store.scheduler)


def verifier_of(task: Spec) -> str:
    """The config's task and the verifier of its answers, in words."""
    reward = task.get("reward")
    return f"{task.name} (task.reward={as_spec(reward)['name']})" if reward else str(task.name)


def build_replay(config: Config, scheduler: Scheduler) -> Replay:
    """An empty replay buffer with the policies of the config."""
    bound = Bound(scheduler.max_staleness, config.groups_per_batch, config.weight_sync_interval)
    policy, group_filter = bind("policy", config.policy), bind("filter", config.filter)
    ages = configs.select(config, "inject_staleness")
    slots = Slots() if ages is None else AgedSlots(Ages(ages, config.run.seed), bound, config.checkpoint.every)
    results = Results() if asks(bind("sampler", config.sampler)) else None
    resume = config.partial_rollout == "resume"
    return Replay(bound, policy, config.staleness_policy, group_filter, resume, slots, results)


def build_state(
    config: Config, task: Task, router: Router, outbox: Outbox, replay: Replay, scheduler: Scheduler
) -> RunState:
    """The buffer's state when a run begins. A simulation brings its own router."""
    held, sampler = replay.store, bind("sampler", config.sampler)
    state = RunState(
        router,
        outbox,
        replay,
        scheduler,
        PromptCursor(shares_of(task), config.run.seed, held.admitted, sampler, held.results),
        Evaluation(asked(sets_of(config, task))),
        configs.actors_of(config),
        config.buffer.max_bytes,
        last_batch=config.run.steps,
        shares=Shares(configs.ranks_of(config)),
        verifiers=VerifierTimeouts(verifier_of(config.task), config.rewards.timeout, config.rewards.max_timeouts),
        relays=Relays(configs.actors_of(config) if config.weights.fanout is None else config.weights.fanout),
    )
    state.verifiers.window = min(state.samples_per_batch, MOST_ANSWERS)
    return state


def build_controller(config: Config, state: RunState) -> Controller:
    return Controller(
        state,
        heartbeat_timeout=config.buffer.heartbeat_timeout,
        lease_timeout=config.buffer.lease_timeout,
        ready_timeout=config.launcher.get("ready_timeout", math.inf),
    )


def main(role: Role) -> None:
    config, ranks = role.config, configs.ranks_of(role.config)
    router = Router(role.endpoint("buffer"), role.keys)
    if config.replay:
        role.offer("buffer", router.endpoint)
        Playback(router, Path(config.replay) / "journal", config.weight_sync_interval, ranks).run()
    task: Task = build("task", config.task, config.run.seed)
    scheduler: Scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
    replay = build_replay(config, scheduler)
    steps, journal = restore(role, replay)
    if why := other_settings(role.run):
        lost = replay.branch_off(steps, why)
        log.info("from batch %d on %s: %d groups of later weights are rolled out again", steps, why, lost)
    state = build_state(config, task, router, Outbox(router, journal), replay, scheduler)
    state.learner.steps = state.gauges.since_step = steps
    state.folder, state.samples = role.run, UntrainedSamples(role.run, config.run, steps)
    go_on(scheduler, replay, state.gauges)
    controller = build_controller(config, state)
    role.offer("buffer", router.endpoint)
    try:
        controller.run()
    finally:
        router.close()


if __name__ == "__main__":
    run_role(main)
