"""When the processes of a simulated run fail, and who then starts another. What is lost the production code decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from .actors import SimulatedActor
from .costs import Failures
from .timeline import Timeline


@dataclass
class Failing:
    """Failures of `actors`, by place. `new` builds an actor for a place, `lost` tells the buffer of one that has died,
    `crash` ends all processes of the run (False: it is over), `resume` starts them again."""

    timeline: Timeline
    failures: Failures
    actors: list[SimulatedActor]
    new: Callable[[int], SimulatedActor]
    lost: Callable[[str], None]
    crash: Callable[[], bool]
    resume: Callable[[], None]
    deaths: int = 0
    taken: int = 0
    crashes: int = 0
    down: bool = False  # between a crash and the resume
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.failures.seed)

    def begin(self) -> None:
        """The first lease is due, at the begin or after a resume: until then nothing fails."""
        self.down = False
        for place in range(len(self.actors)):
            self._plan(place)
        if self.failures.learner:
            self._after(self.failures.learner, self._crash)

    def _after(self, mean: float, call: Callable[..., object], *arguments: object) -> None:
        self.timeline.after(self._dice.expovariate(1.0 / mean), call, *arguments)

    def _is_there(self, place: int, actor: SimulatedActor) -> bool:
        return not self.down and self.actors[place] is actor

    def _plan(self, place: int) -> None:
        failures, actor = self.failures, self.actors[place]
        if failures.mtbf:
            self._after(failures.mtbf, self._fail, place, actor)
        if failures.spot:
            self._after(failures.spot, self._take, place, actor)
        if failures.silent or failures.hangs:
            phase = failures.heartbeat * (place + 1) / len(self.actors)
            self.timeline.after(phase, self._beat, place, actor)

    def _beat(self, place: int, actor: SimulatedActor) -> None:
        if self._is_there(place, actor) and not actor.dead:
            actor.report()
            self.timeline.after(self.failures.heartbeat, self._beat, place, actor)

    def _fail(self, place: int, actor: SimulatedActor) -> None:
        if not self._is_there(place, actor) or actor.dead:
            return
        self.deaths += 1
        silent, hangs = self.failures.silent, self.failures.hangs
        draw = self._dice.random() if silent or hangs else 1.0
        if draw < hangs:
            actor.hang()
        else:
            self._end(place, actor, seen=draw >= hangs + silent)

    def quits(self, actor: SimulatedActor) -> None:
        """The buffer has told a hung actor to quit."""
        for place, each in enumerate(self.actors):
            if each is actor and not actor.dead:
                self._end(place, actor, seen=True)

    def _end(self, place: int, actor: SimulatedActor, seen: bool) -> None:
        """`seen`: by the starter, which tells the buffer."""
        if seen:
            actor.report()
        actor.die()
        if seen:
            self.lost(actor.name)
        self.timeline.after(self.failures.restart, self._restart, place, actor)

    def _take(self, place: int, actor: SimulatedActor) -> None:
        if not self._is_there(place, actor) or actor.dead:
            return
        self.taken += 1
        if self.failures.warning:
            actor.leave()
        else:
            actor.die()
            self.lost(actor.name)
        self.timeline.after(self.failures.warning + self.failures.away, self._restart, place, actor)

    def _restart(self, place: int, actor: SimulatedActor) -> None:
        if self._is_there(place, actor):
            self.actors[place] = self.new(place)
            self.actors[place].hello()
            self._plan(place)

    def _crash(self) -> None:
        if not self.crash():
            return
        self.crashes += 1
        self.down = True
        self.timeline.after(self.failures.learner_restart, self.resume)
