"""Answers to prompts of held-out sets, for evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from actors.failures import Failures, check_rewards
from actors.recorder import Recorder
from actors.reward_pool import NoReward
from areal_like.interfaces import RewardFunction, RolloutEngine, Workflow
from areal_like.sampling import stream_key
from areal_like.stops import Stops
from areal_like.types import Group, Lease, Limits, Prompt, Sample
from areal_like.wire.actor_client import ActorClient

STREAM = 1
Compare = Callable[[Prompt, list[Sample], Iterable[Recorder]], Awaitable[list[Sample]]]
"""Samples of one prompt, with their group's rewards."""


class Heldout(NamedTuple):
    """How prompts of a held-out set are made, answered and scored."""

    prompt: Callable[[int], Prompt]
    workflow: Workflow
    reward: RewardFunction


@dataclass
class Answers:
    """Answers leases of the `sets` (by name) and reports to the buffer. `limits`: from a prompt, a temperature and a
    key of random numbers. `digests`: of versions. `open`: lease → the requests of its prompt, and their calls."""

    sets: Mapping[str, Heldout]
    engine: RolloutEngine
    client: ActorClient
    seed: int
    limits: Callable[[Prompt, float, int], Limits]
    digests: Mapping[int, str]
    compare: Compare
    failures: Failures
    stops: Stops
    open: dict[int, list[tuple[str, Recorder]]] = field(default_factory=dict)

    async def evaluate(self, leases: list[Lease]) -> None:
        """All answers to one prompt. One that fails counts as reward 0: it must not hold up the others."""
        version = self.engine.version
        try:
            answers = await self._answers(leases)
        except Exception:
            self.failures.log(f"{leases[0].split}: prompt {leases[0].row}")
            answers = {}
        finally:
            for lease in leases:
                self.open.pop(lease.group_id, None)
        for lease in leases:
            self.client.evaluated(lease.group_id, version, answers.get(lease.group_id))

    async def _answers(self, leases: list[Lease]) -> dict[int, Group]:
        """Lease → its sample, as a group; without those that failed or were rejected. Their group reward sees all."""
        prompt = self.stops.cut(self.sets[leases[0].split].prompt(leases[0].row))
        recorders = [Recorder(self.engine, self.sets[each.split].reward) for each in leases]
        named = [(f"e{lease.group_id}", recorder) for lease, recorder in zip(leases, recorders, strict=True)]
        self.open |= {lease.group_id: named for lease in leases}
        asked = [self._answer(prompt, *each) for each in zip(leases, recorders, strict=True)]
        found = await asyncio.gather(*asked, return_exceptions=True)  # one may be cancelled from within
        good = [(lease, sample) for lease, sample in zip(leases, found, strict=True) if isinstance(sample, Sample)]
        if not good:
            return {}
        samples = await self.compare(prompt, [sample for _, sample in good], recorders)
        answers = {lease.group_id: sample for (lease, _), sample in zip(good, samples, strict=True)}
        return {
            number: Group(number, [sample], {version: self.digests[version] for version, _ in sample.runs})
            for number, sample in answers.items()
        }

    async def _answer(self, prompt: Prompt, lease: Lease, recorder: Recorder) -> Sample | None:
        """A sample; None if it fails, or the workflow rejects it."""
        key = stream_key(self.seed, STREAM, lease.row, *([lease.sample] if lease.sample else []))
        limits = replace(self.limits(prompt, lease.temperature or 0.0, key), trained=False)
        workflow, request = self.sets[lease.split].workflow, f"e{lease.group_id}"
        try:
            sample = await workflow(recorder, recorder.reward, prompt, limits, request)
            if sample is not None:
                sample.parts = recorder.parts | sample.parts
                check_rewards(sample)
            return sample
        except NoReward:
            return None
        except Exception:
            self.failures.log(f"{lease.split}: prompt {lease.row}, answer {lease.sample}")
            return None
