"""One actor's work: lease → rollouts → rewards → group → push; and held-out prompts for evaluation.

Waits for leases (unblocked by the buffer) and, per group, for its samples (unblocked by the engine and the reward).
All groups run concurrently in one event loop; the engine batches their tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.credit import Credit
from actors.failures import CRASHES, Failures, check_rewards, printable, reason_of
from actors.group_rewards import GroupRewards
from actors.heldout import Answers, Heldout
from actors.progress import Progress
from actors.recorder import Recorder
from actors.reward_pool import NoReward, RewardError
from actors.workflows import with_filler
from areal_like.interfaces import RewardFunction, RolloutEngine, Task, Workflow
from areal_like.run.spans import Busy, Spans
from areal_like.sampling import stream_key
from areal_like.stops import NO_STOPS, Stops
from areal_like.types import Group, Lease, Limits, Prompt, Sample
from areal_like.wire import messages
from areal_like.wire.actor_client import ActorClient

log = logging.getLogger(__name__)
RESAMPLES = 2
"""How often a sample that crashed (`failures.CRASHES`) is drawn again, in its slot, before its group is given up."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """How this run samples (`max_tokens` None: the task's limit), and answers prompts of held-out sets, by name."""

    seed: int
    temperature: float
    max_tokens: int | None
    workflow: Workflow
    heldout: Mapping[str, Heldout]
    stops: Stops = NO_STOPS


@dataclass(slots=True)
class _Running:
    """A training group: its task, those of its samples, and the recorder of each sample, by request."""

    lease: Lease
    task: asyncio.Task | None = None
    samples: list[asyncio.Task] = field(default_factory=list)
    recorders: dict[str, Recorder] = field(default_factory=dict)
    handed_back: bool = False
    cut: list[int] = field(default_factory=list)  # tokens of started samples that the group does not wait for
    redrawn: list[str] = field(default_factory=list)  # the reason of each sample that was drawn again
    unscored: int = 0  # samples without a reward

    @property
    def need(self) -> float:
        """As many samples make the group. Infinite: too few have a reward."""
        need = min(self.lease.need, self.lease.launch - self.unscored)
        return need if need >= min(2, self.lease.need) else math.inf

    @property
    def lengths(self) -> list[tuple[int, bool]]:
        """Tokens of each started sample, and whether it was cut: in a call, or between two of them."""
        return [(each.tokens, each.cut or not each.ended) for each in self.recorders.values() if each.tokens]


class Worker:
    """Runs leases on an engine and reports to the buffer through `client`. `digests` maps versions to the digest of
    their weights; the subscriber fills it before the engine samples with them."""

    def __init__(
        self,
        task: Task,
        engine: RolloutEngine,
        reward: RewardFunction,
        client: ActorClient,
        rollout: Rollout,
        digests: dict[int, str],
        spans: Spans | None = None,
        group_rewards: GroupRewards | None = None,
    ):
        self.task, self.engine, self.reward, self.client, self.rollout = task, engine, reward, client, rollout
        self.group_rewards, self.digests = group_rewards, digests
        spans = spans or Spans()
        self._generating, self._evaluating = Busy(spans, "generate"), Busy(spans, "evaluate")
        self._groups: dict[int, _Running] = {}
        self.failures = Failures()
        self.credit = Credit(engine.slots, lambda ended: client.send(messages.Credit(ended)))
        shared = client, rollout.seed, self._limits, digests, self._compared, self.failures, rollout.stops
        self.heldout = Answers(rollout.heldout, engine, *shared)
        self._progress, self._heldout_progress = Progress(engine), Progress(engine)
        self._errands: set[asyncio.Task] = set()  # evaluations, and groups that are being handed back
        self._leaving = False
        self.started_at: float | None = None

    def start(self, leases: list[Lease]) -> None:
        """Start work on leases. Returns at once."""
        if self._leaving:
            return
        self.started_at = self.started_at or time.monotonic()
        heldout: dict[tuple[str, int], list[Lease]] = {}
        for lease in leases:
            if lease.split == "train":
                self.credit.lease(lease.launch)
                self.cancel([lease.group_id])  # what an earlier session has left of it
                group = self._groups[lease.group_id] = _Running(lease)
                group.task = asyncio.ensure_future(self._run_group(group))
                group.task.add_done_callback(partial(self._forget, group))
            else:
                heldout.setdefault((lease.split, lease.row), []).append(lease)
        for of_a_prompt in heldout.values():
            self._run_errand(self._evaluate(of_a_prompt))

    async def _evaluate(self, leases: list[Lease]) -> None:
        self._evaluating.enter()
        try:
            await self.heldout.evaluate(leases)
        finally:
            self._evaluating.leave()

    def _run_errand(self, errand: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def cancel(self, group_ids: list[int], hand_back: bool = False) -> None:
        """End leases before the engine's next decode step. With `hand_back`, report how long their samples had got."""
        if hand_back:
            self._run_errand(self.hand_back(group_ids))
            return
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group and group.task:
                for sample in group.samples:
                    sample.cancel()
                self.engine.abort(group.recorders)  # now: a cancelled task takes some turns of the loop to notice
                group.task.cancel()

    async def hand_back(self, group_ids: Iterable[int] | None = None, *, leaving: bool = False) -> None:
        """End groups (None: all) within a decode step, and report it. `leaving`: take no more leases."""
        self._leaving |= leaving
        wanted = self._groups if group_ids is None else group_ids
        groups = [self._groups[each] for each in wanted if each in self._groups]
        for group in groups:
            group.handed_back = True
        await self._stop({request: recorder for group in groups for request, recorder in group.recorders.items()})
        groups = [group for group in groups if self._groups.get(group.lease.group_id) is group]  # the others are done
        for group in groups:
            assert group.task is not None
            group.task.cancel()
        self.client.hand_back({group.lease.group_id: group.lengths for group in groups}, leaving)
        for errand in self._errands if leaving else ():
            errand.cancel()  # the buffer gets no more of them

    async def _stop(self, recorders: Mapping[str, Recorder]) -> None:
        """End requests within a decode step, and wait until their tokens are counted."""
        for recorder in recorders.values():
            recorder.close()
        self.engine.abort(recorders)
        for recorder in recorders.values():
            await recorder.idle()

    def hello_again(self) -> None:
        """Void all leases: stop working on them."""
        for task in [*(group.task for group in self._groups.values()), *self._errands]:
            if task:
                task.cancel()
        self._groups.clear()
        self.credit.restart()
        self.client.hello()
        self.credit.report_soon()

    def _sample_ended(self, sample: asyncio.Task) -> None:
        self._generating.leave()
        self.credit.end()

    def look(self) -> tuple[dict[int, int], dict[int, int]]:
        """Records and reports the work so far. Returns the groups, and the held-out leases, that moved since the last
        look, with their tokens so far."""
        self._generating.so_far()
        self._evaluating.so_far()
        self.credit.report_rest()
        groups = {group_id: group.recorders.items() for group_id, group in self._groups.items()}
        return self._progress.moved(groups), self._heldout_progress.moved(self.heldout.open)

    def _forget(self, group: _Running, done: asyncio.Task) -> None:
        if self._groups.get(group.lease.group_id) is group:
            del self._groups[group.lease.group_id]

    async def _run_group(self, group: _Running) -> None:
        begin, lease = time.monotonic(), group.lease
        try:
            prompt = self.rollout.stops.cut(self.task.prompt(lease.split, lease.row))
            samples, reason, detail = await self._samples(group, prompt)
            if len(samples) >= group.need:
                samples = await self._compared(prompt, samples, group.recorders.values())
                self._push(group, samples, time.monotonic() - begin)
                return
        except Exception as error:  # a bad prompt costs its group, not the run; the ledger has the reason
            self.failures.log(f"group {lease.group_id}")
            reason = "group reward crashed" if isinstance(error, RewardError) else "failed"
            detail = printable(repr(error))
        if group.handed_back:  # not a failure of its own: `hand_back` reports it
            await asyncio.Event().wait()
        self.client.send(messages.Failed(lease.group_id, reason, detail))

    async def _compared(self, prompt: Prompt, samples: list[Sample], recorders: Iterable[Recorder]) -> list[Sample]:
        """Samples with their group's rewards. Meanwhile the lease is at work without tokens. Raises RewardError."""
        if self.group_rewards is None:
            return samples
        with ExitStack() as limits:
            for recorder in recorders:
                limits.enter_context(recorder.limited())
            return await self.group_rewards(prompt, samples)

    def _push(self, group: _Running, samples: list[Sample], seconds: float) -> None:
        versions = {version for sample in samples for version, _ in sample.runs}
        digests = {version: self.digests[version] for version in versions}
        if group.cut or group.redrawn:
            self.client.send(messages.LeftOut(group.lease.group_id, group.cut, group.redrawn))
        if counted := getattr(self.engine, "step_costs", None):
            counted.lengths.append([sample.response_length for sample in samples])
        missing = group.lease.need - len(samples)
        self.client.push(Group(group.lease.group_id, samples, digests, seconds, unscored=missing))

    async def _samples(self, group: _Running, prompt: Prompt) -> tuple[list[Sample], str, str]:
        """The first good samples that make the group, in the order of their index, and why some are missing, if so."""
        lease = group.lease
        runs = {self._spawn_sample(group, prompt, index): index for index in range(lease.launch)}
        good: dict[int, Sample] = {}
        reason, detail = "rejected", ""
        pending = set(runs)
        try:
            while pending and len(good) < group.need:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for run in done:
                    if run.cancelled():  # by itself: who cancels a group does not come here
                        reason, detail = "failed", "the sample was cancelled"
                    elif isinstance(run.exception(), NoReward):
                        group.unscored += 1
                        reason, detail = "no reward", f"{group.unscored} of {lease.launch} samples; {run.exception()}"
                    elif error := run.exception():
                        reason, detail = reason_of(error), printable(repr(error))
                    elif run.result() is not None:
                        good[runs[run]] = run.result()
                if len(good) + len(pending) < group.need:
                    break
            if pending and len(good) >= group.need:
                await self._cut(group, [runs[run] for run in pending])
        finally:
            for run in pending:
                run.cancel()
        return [good[index] for index in sorted(good)[: lease.need]], reason, detail

    async def _cut(self, group: _Running, indices: list[int]) -> None:
        """End samples that their group does not wait for, within a decode step, and note how long they had got."""
        requests = [f"{group.lease.group_id}/{index}" for index in indices]
        found = {request: group.recorders[request] for request in requests if request in group.recorders}
        await self._stop(found)
        group.cut = sorted(recorder.tokens for recorder in found.values() if recorder.tokens)

    def _spawn_sample(self, group: _Running, prompt: Prompt, index: int) -> asyncio.Task:
        sample = asyncio.ensure_future(self._run_sample(group, prompt, index))
        self.credit.begin()
        self._generating.enter()
        group.samples.append(sample)
        sample.add_done_callback(self._sample_ended)
        return sample

    async def _run_sample(self, group: _Running, prompt: Prompt, index: int) -> Sample | None:
        """Roll out a sample. After a crash of its reward, agent or environment draw another, with other random
        numbers."""
        attempt = 0
        while True:
            try:
                sample = await self._try_sample(group, prompt, index, attempt)
                self.failures.ended()
                return sample
            except NoReward:
                self.failures.ended()
                raise
            except tuple(CRASHES) as error:
                crash = self.failures.crashed(error)
                if attempt == RESAMPLES or group.handed_back or not getattr(error, "redraw", True):
                    raise
                group.redrawn.append(crash)
                attempt += 1
                self.failures.redrawn += isinstance(error, RewardError)
                log.warning("group %d: sample %d is drawn again: %s", group.lease.group_id, index, error)

    async def _try_sample(self, group: _Running, prompt: Prompt, index: int, attempt: int) -> Sample | None:
        group_id = group.lease.group_id
        key = stream_key(self.rollout.seed, group_id, index, *([attempt] if attempt else []))
        limits = self._limits(prompt, self.rollout.temperature, key)
        filler = prompt.filler[index % len(prompt.filler)] if prompt.filler else 0
        request = f"{group_id}/{index}"
        recorder = group.recorders[request] = Recorder(self.engine, self.reward)
        sample = await self.rollout.workflow(recorder, recorder.reward, prompt, limits, request)
        if sample:
            sample.parts = recorder.parts | sample.parts
            check_rewards(sample)
        if sample and filler:
            sample = await with_filler(recorder, sample, limits, request, filler)
        recorder.ended = True
        return sample

    def _limits(self, prompt: Prompt, temperature: float, key: int) -> Limits:
        longest = self.rollout.max_tokens or prompt.max_tokens
        return self.rollout.stops.within(Limits(longest, temperature, tuple(self.task.stop_tokens), key), prompt)
