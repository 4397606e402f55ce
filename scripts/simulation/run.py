"""A whole run in virtual time: the production buffer with modelled peers."""

from __future__ import annotations

import gc
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_like.config import run_config as configs
from areal_like.config.registry import build
from areal_like.config.run_config import Config, actors_of, ranks_of
from areal_like.interfaces import Task
from areal_like.run.metrics import MetricsLog
from areal_like.run.spans import Spans
from areal_like.wire import messages
from areal_like.wire.partials import digest_of
from buffer import recovery
from buffer.main import build_controller, build_replay, build_state, go_on
from buffer.outbox import Outbox
from buffer.schedulers import Scheduler
from buffer.status import waits
from buffer.store import Stage

from .actors import Prompts, SimulatedActor, World
from .cores import Cores
from .costs import Costs, check
from .failing import Failing
from .journal import MemoryJournal
from .learner import Progress, SimulatedLearner
from .patience import Patience, in_short
from .pushes import SimulatedHandlers
from .timeline import SimulatedRouter, Timeline, Turns

WARMUP_STEPS = 3
"""The first batches fill the pipeline; rates leave them out."""
MOST_SPANS = 64
"""Actors whose spans are written."""


EVENTS_PER_LOOK = 100
"""Events between two looks at whether the run is stuck."""


class Stuck(RuntimeError):
    """Nothing happens any more, and the run is not over."""


@dataclass(frozen=True)
class Outcome:
    """What a simulated run came to. `samples_per_second` without the first steps; `staleness`: samples by age;
    `events`, `turns`: what the simulation took. `rolled_out`: tokens that actors have pushed, `tokens`: those that were
    trained. `reason`: why the run has ended. `deaths` of actors, nodes `taken`, `crashes` of the learner, and train
    steps that had to be `repeated` after them."""

    seconds: float
    samples_per_second: float
    actor_idle: float
    learner_idle: float
    staleness: dict[int, int]
    tokens: int
    report: dict[str, Any]
    events: int
    turns: int
    deaths: int = 0
    taken: int = 0
    crashes: int = 0
    repeated: int = 0
    rolled_out: int = 0
    reason: str = ""

    @property
    def staleness_mean(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / max(1, sum(self.staleness.values()))


def age_at(ages: Mapping[int, int], share: float) -> int:
    """The age that `share` of the counted samples do not exceed."""
    wanted, so_far = share * sum(ages.values()), 0
    for age in sorted(ages):
        so_far += ages[age]
        if so_far >= wanted:
            return age
    return 0


def prompts_of(task: Task, costs: Costs) -> Prompts:
    """The task's own prompts or, where `answers.prompt` says how long they are, made-up ones."""
    if (tokens := costs.answers.prompt) is not None:
        return Prompts(lambda split, row: (tokens, row + (split != "train"), 1 << 30), costs.answers.right)

    def of(split: str, row: int) -> tuple[int, int, int]:
        prompt = task.prompt("train" if split == "train" else "heldout", row)
        return len(prompt.tokens), digest_of(prompt.tokens), prompt.max_tokens

    return Prompts(of, costs.answers.right)


class Simulation:
    """`folder`: where metrics and spans go (None: nowhere). `history`: seeds what differs between runs of one config,
    failures and the jitter of actors. Raises ConfigError."""

    def __init__(self, config: Config, costs: Costs, folder: Path | None = None, history: int = 0):
        check(config, costs)
        self.config, self.costs, self.folder = config, costs, folder
        self.timeline = Timeline()
        self.task: Task = build("task", config.task, config.run.seed)
        self.prompts, self._lengths = prompts_of(self.task, costs), costs.answers.lengths
        self._cores = Cores(self.timeline, costs.sample, history) if costs.sample.takes_turns else None
        failures = msgspec.structs.replace(costs.failures, seed=costs.failures.seed + history)
        journal = costs.journal
        self.journal: MemoryJournal | None = None
        if failures.learner or journal.write or journal.every:
            sync, dice = config.buffer.journal == "fsync", random.Random(failures.seed + 1)
            self.journal = MemoryJournal(self.timeline, journal, sync, dice)
        self.turns = self.repeated = self._pushed = 0  # tokens, before the last crash
        self._evaluated: list[dict[str, Any]] = []  # before the last resume
        self._idled = [0.0, 0.0]  # seconds of actors until the last crash: without work, and all
        self.actors: list[SimulatedActor] = []
        self.failing = Failing(
            self.timeline, failures, self.actors, self._actor, self._tell_of_death, self._crash, self._resume
        )
        self._build(Progress())

    def _build(self, progress: Progress) -> None:
        """The processes of a run that has come so far: those of a resume find what the journal holds."""
        config, costs, timeline = self.config, self.costs, self.timeline
        if ranks_of(config) > 1:  # here one learner trains whole batches: its costs are those of all ranks
            config = configs.replace(config, "learner.ranks", 1)
        self._started, self._factor = False, 1.0  # the first lease is due; how much slower engines are
        self.router = router = SimulatedRouter(timeline, costs.latency)
        scheduler: Scheduler = build("scheduler", config.scheduler, build("sizing", config.sizing))
        replay, journal = build_replay(config, scheduler), self.journal
        if journal:
            recovery.restore(replay, journal, progress.steps, timeline.now, journal.append, journal.read)
        else:
            recovery.restore(replay, [], progress.steps, timeline.now)
        self.state = build_state(config, self.task, router, Outbox(router, journal), replay, scheduler)  # type: ignore[arg-type]
        self.state.clock = timeline.clock
        self.state.learner.steps = self.state.gauges.since_step = progress.steps
        go_on(scheduler, replay, self.state.gauges)
        self.controller = build_controller(config, self.state)
        self.controller.handlers = SimulatedHandlers(self.state)
        if not (costs.failures.silent or costs.failures.hangs):  # nobody sends heartbeats
            self.controller.heartbeat_timeout, self.controller.deadlines.timeout = math.inf, 0.0
        waited = journal.take_debt if journal else lambda: 0.0
        takes = self._cores.interrupt if self._cores else lambda seconds: None
        Turns(timeline, router, self._turn, costs.buffer, costs.sample.buffer, waited=waited, takes=takes)
        if journal:
            journal.wake = router.wake
        most, timeout = costs.answers.most or config.sampling.max_new_tokens, config.rewards.timeout
        self._world = World(
            timeline,
            router,
            costs,
            self.prompts,
            config.run.seed,
            most,
            self._lengths,
            self._cores,
            timeout if config.rewards.workers else math.inf,
            self.failing.quits,
        )
        self.actors[:] = [self._actor(place) for place in range(actors_of(config))]
        metrics = MetricsLog(self.folder / "metrics.jsonl", done=progress.steps) if self.folder else None
        spans = self._spans("learner")
        self.learner = SimulatedLearner(config, timeline, router, costs, self._report, metrics, spans, progress)
        self.learner.works = self._beside

    def _beside(self, training: float, after: float) -> None:
        """The learner trains for so long: it takes cores from the actors, and their engines are slower meanwhile."""
        if self._cores:
            self._cores.hold(self.costs.learner.cores, training + after)
        if self.costs.engine.beside != 1.0:
            self._slow(self.costs.engine.beside)
            self.timeline.after(training, self._slow, 1.0)

    def _slow(self, factor: float) -> None:
        self._factor = factor
        for actor in self.actors:
            actor.slow(factor)

    def _actor(self, place: int) -> SimulatedActor:
        count, name = actors_of(self.config), f"actor-{place}"
        fanout = count if self.config.weights.fanout is None else self.config.weights.fanout
        update = self.costs.weights.seconds(place, count, fanout, self.costs.learner.gpus)
        actor = SimulatedActor(name, self._world, update, self._spans(name, place))
        if self._factor != 1.0:
            actor.slow(self._factor)
        return actor

    def _spans(self, name: str, place: int = 0) -> Spans | None:
        return Spans(self.folder, name, since_1970=0.0) if self.folder and place < MOST_SPANS else None

    def _tell_of_death(self, name: str) -> None:
        """As the starter of a run does."""
        self.router.say(b"starter", messages.Lost(name, 0, "died", False))

    def _crash(self) -> bool:
        """The learner has died: the run's starter ends all processes. False if it has trained all."""
        if self.learner.reason:
            return False
        self._pushed += self.state.gauges.tokens_pushed
        self._note_idle()
        for actor in self.actors:
            actor.die()
        self.learner.die()
        self.router.close()
        assert self.journal
        self.journal.crash()
        self.repeated += self.learner.progress.steps - self.learner.saved.steps
        return True

    def _note_idle(self) -> None:
        """Of the actors that live; who died before is left out."""
        for idle, wall in (actor.idled() for actor in self.actors):
            self._idled[0] += idle
            self._idled[1] += wall

    def _idle_share(self, since_resume: float) -> float:
        """Of the whole run."""
        if not self.failing.crashes:
            return since_resume
        self._note_idle()
        return self._idled[0] / max(1e-9, self._idled[1])

    def _resume(self) -> None:
        self.learner.saved.began_at = self.learner.progress.began_at  # also if there was no checkpoint yet
        self._evaluated = list(self.learner.saved.evaluations)
        self._build(self.learner.saved)
        self._begin()

    def _begin(self) -> None:
        self.learner.hello()
        for actor in self.actors:
            actor.hello()

    def _turn(self) -> None:
        self.turns += 1
        self.controller.step(0)
        if not self._started and self.state.phase.started_at is not None:
            self._started = True
            self.failing.begin()

    def _report(self) -> None:
        for actor in self.actors:
            actor.report()

    def run(self, warmup: int = WARMUP_STEPS) -> Outcome:
        """Rates leave out `warmup` train steps. Raises Stuck."""
        log = logging.getLogger("buffer")
        level, collects = log.level, gc.isenabled()
        log.setLevel(logging.ERROR)  # it warns of stalls after seconds that pass in no time here
        gc.disable()  # nothing here leaves cycles behind, and the collector would look at millions of sequences
        try:
            return self._run(warmup)
        finally:
            log.setLevel(level)
            if collects:
                gc.enable()

    def _run(self, warmup: int) -> Outcome:
        self._begin()
        patience = Patience(self.config, self.costs, self.state, self._world)
        while self.learner.report is None:
            if not self.timeline.run(EVENTS_PER_LOOK):
                raise Stuck("no event is left")
            if self.router.refusals:
                raise Stuck(f"the buffer refused a message: {self.router.refusals[0]}")
            learner, ready = self.learner, self.state.store.count(Stage.WAITING)
            failed = self.failing.deaths, self.failing.taken, self.failing.crashes
            if patience.ends(self.timeline, (learner.progress.steps, ready), learner.saved.steps, failed):
                raise Stuck(f"{patience.told(self.timeline, failed)}; {in_short(waits(self.state))}")
        return self._outcome(warmup)

    def _outcome(self, warmup: int) -> Outcome:
        learner, report, progress = self.learner, self.learner.report, self.learner.progress
        assert report is not None
        evaluations = self._evaluated + learner.since_begin(report["evaluations"])
        return Outcome(
            (report["trained_seconds"] or 0.0) + learner.offset,
            progress.rate(warmup),
            self._idle_share(report.get("rollout/idle_share", 0.0)),
            learner.idle_share,
            dict(sorted(progress.ages.items())),
            progress.tokens,
            report | {"evaluations": evaluations},
            self.timeline.events,
            self.turns,
            self.failing.deaths,
            self.failing.taken,
            self.failing.crashes,
            self.repeated,
            self._pushed + report.get("rollout/tokens", 0),
            learner.reason,
        )
