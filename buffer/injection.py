"""Injects staleness: exactly the right version samples each group, so that its staleness is `inject_staleness`.

A slot of train version V *needs* version V − age. The buffer announces new weights only when all slots that need the
present version, or an earlier one, have been rolled out. So no group sees an update, and a lost, failed or filtered
group is replaced while its version exists. Training goes at most one version ahead: the publisher keeps two.

A run begins at version 0, or at the checkpoint of a resume. A slot that needs an earlier version gets that one.
"""

from areal_like.config.conflicts import AGES
from areal_like.config.registry import ConfigError
from areal_like.run.checkpoints import is_due
from buffer.entries import UNFINISHED, Entries, Entry
from buffer.staleness import Bound, Slots


class InjectionBroken(RuntimeError):
    """A group does not have the age that it should have: measurements with it would be wrong."""


class FixedAge:
    """All groups are `bound.max_staleness` versions old. `version`: the one announced; `floor`: the first one."""

    def __init__(self, bound: Bound, checkpoint_every: int = 0):
        self.bound, self.checkpoint_every = bound, checkpoint_every
        self.age = int(bound.max_staleness)
        self.version = self.floor = 0

    def begin(self, version: int) -> None:
        self.version = self.floor = version

    def _is_rolled_out(self, slots: Slots, entries: Entries) -> bool:
        """Are all slots done that need `version`?"""
        end = self.bound.deadline(self.version)
        return slots.next >= end and all(entry.slot >= end for entry in entries.of(*UNFINISHED))

    def may_announce(self, version: int, slots: Slots, entries: Entries) -> bool:
        """May the actors get this version? If so, it is the one announced from now on."""
        if version > self.version:
            if not self._is_rolled_out(slots, entries):
                return False
            self.version = version
        return True

    def may_train(self, batch: int, slots: Slots, entries: Entries) -> bool:
        """The version that the batch publishes must not overtake the one that the actors still need. After a resume
        only the checkpoint's version exists, so before a checkpoint no slot may need an earlier one."""
        version, rolled_out = self.bound.batch_version(batch), self._is_rolled_out(slots, entries)
        if is_due(batch + 1, self.checkpoint_every, self.bound.interval):
            return version == self.version and rolled_out
        return version <= self.version + rolled_out

    def check(self, entry: Entry) -> None:
        """Raises InjectionBroken if a token of the group is not of the version that its slot needs."""
        version = self.bound.slot_version(entry.slot)
        wanted = version - self.age
        if entry.oldest != entry.newest or not (entry.oldest == wanted or wanted < entry.oldest <= self.floor):
            raise InjectionBroken(
                f"group {entry.id} was sampled by versions {entry.oldest} to {entry.newest}; to be {self.age} old at "
                f"version {version} it needs version {wanted}"
            )

    def refuse_waiting(self, limit: int) -> None:
        """Raises ConfigError: the buffer holds more than `limit` bytes, and waiting would never free memory."""
        groups = self.age * self.bound.interval * self.bound.groups_per_batch
        raise ConfigError(
            f"buffer.max_bytes={limit}: inject_staleness keeps {groups} groups waiting, and they take more", AGES
        )
