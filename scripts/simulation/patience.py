"""When a simulated run is stuck: for how long to wait for the next group that is ready for training."""

from __future__ import annotations

import math
from functools import cached_property

from areal_like.config.run_config import Config, actors_of
from buffer.run_state import RunState

from .actors import World
from .closed_form import predict
from .costs import Costs
from .timeline import Timeline

TIMES = 100
"""So many times the time of a whole train step, and of all that may go wrong, may pass without another ready group."""
TIMES_AGAIN = 2
"""More of them for each train step that a crash has cost."""
FEWEST_EVENTS, EVENTS_PER_SAMPLE, IDLE_TURNS = 50_000, 20, 5
"""Without another ready group: events in any case, those that a sample takes at most, turns of an idle buffer a
second."""
LOOKS_FROM = 10_000
"""Events without another ready group before anything is computed."""

Mark = tuple[int, int]
"""How far a run has come: train steps, and groups that are ready for the next ones."""
Failed = tuple[int, int, int]
"""Actors that have died, nodes that were taken, crashes of the learner."""


class Patience:
    """Remembers how far the run was at most, and since when. Train steps that are repeated after a crash don't count.
    `saved`: train steps of the newest checkpoint."""

    def __init__(self, config: Config, costs: Costs, state: RunState, world: World):
        self._config, self._costs, self._world = config, costs, world
        self._samples, self._heldout = state.samples_per_batch, state.evaluation.places
        self._mark, self._at, self._events = (-1, 0), 0.0, 0
        self._failed: Failed = (0, 0, 0)
        self._each, self._events_each = 0.0, 0.0  # seconds and events per train step so far

    def ends(self, timeline: Timeline, mark: Mark, saved: int, failed: Failed) -> bool:
        """Is the run stuck?"""
        if mark > self._mark:
            self._note(timeline, mark, failed)
            return False
        events, seconds = timeline.events - self._events, timeline.now - self._at
        if events < LOOKS_FROM:
            return False
        again = self._mark[0] - saved if self._costs.failures.learner else 0
        times = TIMES + TIMES_AGAIN * again
        if seconds > times * (max(self.usual, self._each) + self._setback):
            return True
        return events > FEWEST_EVENTS + times * max(self._events_each, self._usual_events)

    def _note(self, timeline: Timeline, mark: Mark, failed: Failed) -> None:
        if mark[0] > self._mark[0] >= 0 and not self._costs.failures.learner:  # else crashes would teach patience
            self._each, self._events_each = timeline.now / mark[0], timeline.events / mark[0]
        self._mark, self._at, self._events, self._failed = mark, timeline.now, timeline.events, failed

    def told(self, timeline: Timeline, failed: Failed) -> str:
        """What has not happened, and what has meanwhile."""
        steps, _ = self._mark
        after = f"after train step {steps}" if steps else "before the first train step"
        words = f"stuck {after}: no further one, and no further group that is ready for one, in "
        words += f"{timeline.now - self._at:.0f} s of the run, where a train step takes some {self.usual:.2g} s"
        names = ("actors died", "nodes were taken", "crashes of the learner")
        counts = [now - before for now, before in zip(failed, self._failed, strict=True)]
        found = [f"{count} {name}" for count, name in zip(counts, names, strict=True) if count]
        return f"{words}; meanwhile {', '.join(found)}" if found else words

    @cached_property
    def usual(self) -> float:
        """Seconds of a train step and a round of evaluation, one after the other, if nothing fails."""
        costs, prompts = self._costs, self._world.prompts
        prompt, _, longest = prompts.of("train", 0)
        most, samples = self._world.most or longest, self._samples + self._heldout
        actors, bound = actors_of(self._config), 0.0
        predicted = predict(costs, actors, samples, bound, sync=True, prompt=prompt, most=most)
        handled = costs.sample.begin + costs.sample.actor + costs.sample.buffer + costs.latency + costs.buffer
        turns, verifier = costs.answers.turns, costs.verifier
        waits = turns.most * turns.tool * math.exp(3 * turns.sigma) if turns.most > 1 else 0.0
        waits += min(self._world.verify_within, verifier.median * math.exp(3 * verifier.sigma))
        learner = costs.learner.publish + costs.learner.after + costs.learner.checkpoint
        weights = costs.weights.seconds(actors - 1, actors, self._config.weights.fanout)
        return samples / predicted.throughput + samples * handled + waits + weights + learner + costs.journal.write

    @cached_property
    def _setback(self) -> float:
        """Seconds that one failure of each kind takes, as far as there are any."""
        failures, buffer = self._costs.failures, self._config.buffer
        unseen = failures.mtbf is not None and (failures.silent or failures.hangs)
        found = failures.restart if failures.mtbf else 0.0
        found += buffer.heartbeat_timeout + buffer.lease_timeout if unseen else 0.0
        found += failures.warning + failures.away if failures.spot else 0.0
        found += failures.learner_restart if failures.learner else 0.0
        return found + (self._costs.journal.stall if self._costs.journal.every else 0.0)

    @property
    def _usual_events(self) -> float:
        """Of a train step."""
        failures, turns = self._costs.failures, self._costs.answers.turns.most
        beats = actors_of(self._config) / failures.heartbeat if failures.silent or failures.hangs else 0.0
        samples = (self._samples + self._heldout) * turns
        return EVENTS_PER_SAMPLE * samples + (IDLE_TURNS + beats) * (self.usual + self._setback)


def in_short(lines: list[str], most: int = 3, longest: int = 160) -> str:
    """The first of several lines, each cut."""
    return "; ".join(line if len(line) <= longest else f"{line[:longest]} ..." for line in lines[:most])
