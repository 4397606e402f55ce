"""Injects staleness: exactly the right version samples each group, so that its staleness is `inject_staleness`.

A slot of train version V with age d *needs* version V − d. The buffer announces new weights only when all slots that
need the present version have been rolled out. So no group sees an update, and a group that is lost, fails or is
filtered is replaced while its version still exists. Training continues meanwhile, one version ahead at most (the
publisher keeps two): while the actors sample with version v, the learner trains v + 1 on groups of their ages.

A run begins at version 0, or at the checkpoint of a resume without those groups. If V − d is before that, the group is
as old as possible. So all first batches come from version 0, and are rolled out before the actors leave it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from areal_like.config.conflicts import AGES, shares_of
from areal_like.config.registry import ConfigError
from areal_like.run.checkpoints import is_due
from areal_like.sampling import stream_key, uniforms
from areal_like.wire.groups import Head
from buffer.staleness import Bound, Slots, SlotsState

_STREAM = 3


class Ages:
    """The age, in versions, of each place in a batch. It depends on the seed alone, so runs repeat. Systematic sampling
    divides a batch: each age gets its share to within one group, and on average exactly its share. `spec`: see
    `areal_like.config.conflicts.shares_of`."""

    def __init__(self, spec: object, seed: int = 0):
        shares = shares_of(spec)
        self._ages: NDArray[np.int64] = np.array([age for age, _ in shares], np.int64)
        self._until = np.cumsum([share for _, share in shares])
        self._seed = seed

    @property
    def oldest(self) -> int:
        return int(self._ages[-1])

    def of_batch(self, batch: int, size: int) -> NDArray[np.int64]:
        """[size]: the age of each place in a batch, youngest first."""
        key = np.array([stream_key(self._seed, _STREAM)], np.uint64)
        places = (np.arange(size) + uniforms(key, np.array([batch]))) / size * self._until[-1]
        found = np.searchsorted(self._until, places, side="right")
        ages: NDArray[np.int64] = self._ages[np.minimum(found, len(self._ages) - 1)]
        return ages


class InjectionBroken(RuntimeError):
    """A group does not have the age that it should have: measurements with it would be wrong."""


class AgedSlots(Slots):
    """Slots that are open to one version at a time. `free`: slots that need `version` and that no group holds.
    `passed`: all slots below it have been rolled out. `floor`: the version at which the run began or was resumed.
    `checkpoint_every`: as in the config."""

    def __init__(self, ages: Ages, bound: Bound, checkpoint_every: int = 0):
        super().__init__()
        self.ages, self.bound, self.checkpoint_every = ages, bound, checkpoint_every
        self.version = self.floor = self.passed = 0
        self._taken: set[int] = set()
        self._ages_of = lru_cache(4096)(lambda batch: ages.of_batch(batch, bound.groups_per_batch))

    @property
    def used(self) -> int:
        return self.passed + len(self._taken)

    def needs(self, slot: int) -> int:
        """The version that must sample the group in `slot`."""
        return max(self.floor, self._wanted_version(slot))

    def _wanted_version(self, slot: int) -> int:
        batch, place = divmod(slot, self.bound.groups_per_batch)
        return self.bound.slot_version(slot) - int(self._ages_of(batch)[place])

    def begin(self, version: int) -> None:
        self.floor = version
        self._open(version)

    def advance(self, version: int) -> None:
        self._open(version)
        self.passed = max(self.passed, self._first_of(version))
        self._taken = {slot for slot in self._taken if slot >= self.passed}

    def is_rolled_out(self, unfinished: Iterable[int]) -> bool:
        return not self.free and not any(self.needs(slot) == self.version for slot in unfinished)

    def may_train(self, batch: int, unfinished: Iterable[int]) -> bool:
        """The version that the batch publishes must not overtake the version that the actors still need. After a resume
        only the checkpoint's version exists, so before a checkpoint no slot may need an earlier one."""
        version = self.bound.batch_version(batch)
        if is_due(batch + 1, self.checkpoint_every, self.bound.interval):
            return version == self.version and self.is_rolled_out(unfinished)
        return version <= self.version or (version == self.version + 1 and self.is_rolled_out(unfinished))

    def _first_of(self, version: int) -> int:
        return version * self.bound.interval * self.bound.groups_per_batch

    def _open(self, version: int) -> None:
        self.version = version
        size = self.bound.groups_per_batch
        batches = range(self._first_of(version) // size, self._first_of(version + self.ages.oldest + 1) // size)
        needs = [np.maximum(self.floor, self.bound.batch_version(batch) - self._ages_of(batch)) for batch in batches]
        found = self._first_of(version) + np.flatnonzero(np.concatenate(needs) == version)
        self.free = [slot for slot in found.tolist() if slot >= self.passed and slot not in self._taken]
        self.end = self._first_of(version + self.ages.oldest + 1)

    def take(self) -> int:
        slot = heapq.heappop(self.free)
        self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self._taken.discard(slot)
        heapq.heappush(self.free, slot)

    def open_to(self, version: int, deadline: float) -> float:
        return len(self.free) if version == self.version else 0

    def fits(self, slot: int, version: int) -> bool:
        return version == self.version == self.needs(slot)

    def unfilled(self, below: int) -> set[int]:
        return set(self.free) | {slot for slot in range(self.passed, below) if slot not in self._taken}

    def check(self, group_id: int, slot: int, head: Head | None, version: int) -> None:
        """Raises InjectionBroken if a token of the group is not of the version that the slot needs."""
        assert head is not None
        oldest, newest, wanted = head.oldest, head.newest, self._wanted_version(slot)
        if oldest != newest or not (oldest == wanted or wanted < oldest <= self.floor):
            raise InjectionBroken(
                f"group {group_id} was sampled by versions {oldest} to {newest}; to be {version - wanted} old at "
                f"version {version} it needs version {wanted}"
            )

    def check_memory(self, limit: int) -> None:
        groups = self.ages.oldest * self.bound.interval * self.bound.groups_per_batch
        raise ConfigError(
            f"buffer.max_bytes={limit}: inject_staleness keeps {groups} groups waiting, and they take more", AGES
        )

    def state(self) -> SlotsState:
        return self.end, list(self.free), int(self.version), self.floor, self.passed, sorted(self._taken)

    def load(self, state: SlotsState) -> None:
        self.end, free, self.version, self.floor, self.passed, taken = state
        self.free, self._taken = list(free), set(taken)
