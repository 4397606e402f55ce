"""The actor process: an engine, a worker and a subscriber in one event loop, and the messages that drive them.

SIGTERM ends it gently: it first hands its unfinished groups back to the buffer, and other actors start them again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from actors import measures
from actors.failures import REASON_CHARACTERS, printable
from actors.group_rewards import GroupRewards
from actors.heldout import Heldout
from actors.probe_check import ServedProbe
from actors.relay import Relay
from actors.reward_pool import RewardPool
from actors.rewards import reward_function
from actors.session import GivenUp, Session
from actors.subscriber import Subscriber
from actors.worker import Rollout, Worker
from areal_like.config.registry import bind, build, resolve, with_defaults
from areal_like.config.run_config import select
from areal_like.interfaces import RewardFunction, Task
from areal_like.run.process import EXIT_TERMINATED, TERM_SECONDS, Role, Terminated, end_within, on_end, run_role
from areal_like.run.spans import Spans
from areal_like.stops import stops_of
from areal_like.tasks.heldout import sets_of
from areal_like.tasks.sandbox import WALL
from areal_like.weights.state import State
from areal_like.wire.actor_client import ActorClient
from areal_like.wire.keys import KeysError
from areal_like.wire.link import BusError
from areal_like.wire.messages import Applied

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 1.0
LOOK_SECONDS, MISSES = 2.0, 2
"""Seconds between checks whether the run still exists, and how often in a row it must be missing."""


def build_engine(config: Any, vocab_size: int, folder: Path) -> tuple[Any, State | None]:
    """Build the engine of the config. If it needs a model, also return the weights, rounded as the learner rounds them.
    An engine with processes of its own keeps their files in `folder`."""
    state = None
    kind, spec = resolve("engine", config.engine.name), select(config, "engine")
    if with_defaults("learner", config.learner).get("router_replay"):
        spec["return_experts"] = True
    if not getattr(kind, "needs_model", False):
        engine = build("engine", spec)
    else:
        import torch

        from areal_like.models.causal_lm import publishable

        torch.set_num_threads(config.actors.threads)
        model = build("model", config.model, config.run.seed, vocab_size)
        state = publishable(model)
        engine = build("engine", spec, model, *([folder] if getattr(kind, "needs_folder", False) else []))
        engine.digest = state.digest()
    engine.version = -1  # until the learner announces the version of these bits
    return engine, state


def build_relay(role: Role, subscriber: Subscriber) -> Relay | None:
    """A relay of weights to other actors, if the config wants one and this process can run it."""
    weights = role.config.weights
    if weights.fanout == 0:
        return None
    knobs: dict[str, Any] = {"keep": weights.keep, "snapshot_every": weights.snapshot_every, "keys": role.keys}
    try:
        return Relay(role.own_endpoint(), lambda: subscriber.sources.received, **knobs)
    except (BusError, KeysError) as error:
        log.warning("no weights are handed on from here: %s", error)
        return None


async def _heartbeat(client: ActorClient, worker: Worker, subscriber: Subscriber, pool: RewardPool) -> None:
    while True:
        wall = time.monotonic() - worker.started_at if worker.started_at else 0.0
        said: dict[str, Any] = measures.of_engine(worker.engine, wall) | measures.of_turns()
        said |= pool.stats() | measures.of_weights(subscriber.stats(), said.get("sum:rollout/updates", 0.0))
        if pool.note:
            said["verifier_note"] = printable(pool.note, REASON_CHARACTERS)
        said["sum:rewards/resamples"] = float(worker.failures.redrawn)
        if subscriber.probe:
            said |= subscriber.probe.stats()
        note = (subscriber.probe.note if subscriber.probe else "") or worker.failures.note
        if hasattr(worker.engine, "condition"):  # of an engine with processes of its own
            said["engine"], said["engine_note"] = worker.engine.condition[0], worker.engine.condition[1] or note
        elif note:
            said["engine_note"] = note
        client.heartbeat(said, *worker.look())
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def _subscribe(engine: Any, subscriber: Subscriber) -> None:
    """Follow the weights, once the engine's own processes are up: an actor that holds a version gets leases."""
    if hasattr(engine, "until_up"):
        await engine.until_up()
    await subscriber.run()


async def _until_told_to_end(worker: Worker) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    on_end(lambda: loop.call_soon_threadsafe(told.set))
    await told.wait()
    await worker.hand_back(leaving=True)


async def _until_the_run_is_gone(role: Role, endpoint: str) -> None:
    """Wait until the run's buffer is gone or replaced: nobody may be able to reach this actor, as on a cut-off node."""
    missed = 0
    while missed < MISSES:
        await asyncio.sleep(LOOK_SECONDS)
        if (found := role.offered("buffer")) is not None:
            missed = 0 if found == endpoint else missed + 1
    log.warning("the run has ended, or continues with another buffer: ending")


def rollout_of(config: Any, task: Task, rewards_of: Callable[[Task], RewardFunction]) -> Rollout:
    """How the run samples and answers its held-out sets, which may have their own tasks."""
    sampling, stops = config.sampling, stops_of(config.sampling)
    heldout = {
        each.name: Heldout(each.prompt, bind("workflow", each.workflow), rewards_of(each.task))
        for each in sets_of(config, task)
    }
    workflow = bind("workflow", config.workflow)
    return Rollout(config.run.seed, sampling.temperature, sampling.max_new_tokens, workflow, heldout, stops)


async def serve(role: Role) -> None:
    config = role.config
    task = build("task", config.task, config.run.seed)
    engine, state = build_engine(config, task.vocab_size, role.run / "servers" / role.name)
    rewards = config.rewards
    pool = RewardPool(workers=rewards.workers, timeout=rewards.timeout, memory_limit=rewards.memory_limit)
    link: dict[str, Any] = {"keys": role.keys, "link_timeout": config.buffer.heartbeat_timeout}
    buffer, spans = role.find("buffer"), Spans(role.run, role.name)
    client = ActorClient(buffer, role.name, engine.slots, **link)
    subscriber = Subscriber(
        engine, role.name, applied=lambda *held: client.send(Applied(*held)), state=state, spans=spans,
        sweep_every=config.weights.sweep_every, **link,
    )  # fmt: skip
    del state  # a replica on a device has a copy
    subscriber.relay = build_relay(role, subscriber)
    subscriber.probe = ServedProbe(engine, role.name, config.weights.probe_error)
    client.relay = subscriber.relay.offer if subscriber.relay else None
    timeout = WALL * rewards.timeout if rewards.workers else math.inf
    rewards_of = partial(reward_function, pool=pool, timeout=timeout, on_error=rewards.on_error)
    reward, rollout = rewards_of(task), rollout_of(config, task, rewards_of)
    group_rewards = GroupRewards(config.group_reward, pool, role.run / "group_reward", role.name)
    worker = Worker(task, engine, reward, client, rollout, subscriber.digests, spans, group_rewards)
    session = Session(client, worker, subscriber)
    client.hello()
    jobs = [session.receive(), session.renew_when_cut(), _subscribe(engine, subscriber)]
    jobs.append(_heartbeat(client, worker, subscriber, pool))
    jobs += [_until_told_to_end(worker), _until_the_run_is_gone(role, buffer)]
    if hasattr(engine, "watch"):
        jobs.append(engine.watch())
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    except GivenUp:
        end_within(TERM_SECONDS)  # an engine that hangs may not be closed in time either
        raise
    finally:
        for each in tasks:
            each.cancel()
        if costs := getattr(engine, "step_costs", None):  # for `simulate --costs-from`
            with suppress(OSError):
                costs.write(role.run, role.name)
        await engine.close()
        await pool.close()
        await group_rewards.close()
        subscriber.close()
        client.close()
    raise Terminated(EXIT_TERMINATED)


def main(role: Role) -> None:
    asyncio.run(serve(role))


if __name__ == "__main__":
    run_role(main)
