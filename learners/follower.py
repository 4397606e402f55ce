"""A learner of several ranks: rank 0 commands, the other ranks execute.

    rank 0: train k             → all: fetch their share of batch k from the buffer, make the same train step together
    rank 0: publish version v   → all: each encodes and serves its own part of the weights, beside the next train step
    rank 0: save_beside         → all: each copies its part and writes it in a thread, beside the next train steps
    rank 0: load_state          → all: each its own part
    rank 0: logprobs_of         → all: the same forward pass together
    rank 0: save                → all: hand over their parts of the weights, tensor by tensor

Rank 0 broadcasts each command first (`Ranks.broadcast`), so all ranks enter the same collectives in the same order.
`LeadingTrainer` does so in place of a trainer, `OtherRanks` for a publisher. A rank that loses another one ends with an
error, a little later than the lost rank, so the launcher sees the cause first. Ranks wait for the next command without
a limit. Within a step no rank waits longer than `learner.collective_timeout` for a live rank: then all end.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from areal_like.config.registry import knobs, resolve
from areal_like.config.run_config import ranks_of
from areal_like.run.checkpoints import Saving, in_thread
from areal_like.run.process import Role, run_role
from areal_like.run.run_folder import RENDEZVOUS
from areal_like.types import Batch
from areal_like.weights.state import State
from areal_like.wire.learner_client import LearnerClient
from learners.attestation import Attestation
from learners.build import build_trainer
from learners.collectives import LOST_RANK_GRACE_SECONDS, Ranks, is_lost_rank, join
from learners.learner import TorchLearner
from learners.publication import Alone, Coding, PartReport, Publisher
from learners.untrainable import Untrainable


class LostRankError(RuntimeError):
    """Another rank died, is unreachable, or was late for a collective."""


def build_rank(role: Role, rank: int) -> TorchLearner:
    """Wait for all ranks, then build the trainer of `rank`."""
    across = resolve("launcher", role.config.launcher["name"]).ACROSS_HOSTS
    seconds = role.config.learner.get("collective_timeout", knobs("learner", "torch")["collective_timeout"])
    with naming_lost_ranks():
        join(rank, ranks_of(role.config), role.run / RENDEZVOUS / "ranks", local=not across, seconds=seconds)
    trainer = build_trainer(role.config, rank)
    assert isinstance(trainer, TorchLearner)  # no other learner has ranks
    return trainer


def lead(role: Role) -> tuple[LeadingTrainer, OtherRanks]:
    """Build the learner, with this process as rank 0, and wait for the other ranks."""
    trainer = build_rank(role, 0)
    return LeadingTrainer(trainer), OtherRanks(trainer.ranks)


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turn a collective's error about another rank into LostRankError."""
    try:
        yield
    except Exception as error:
        if not is_lost_rank(error):
            raise
        time.sleep(LOST_RANK_GRACE_SECONDS)
        raise LostRankError(
            "another rank of the learner died, is unreachable, or did not come within learner.collective_timeout: see "
            "logs/learner*.log"
        ) from error


class LeadingTrainer:
    """Rank 0's trainer: all ranks execute each of its calls."""

    def __init__(self, trainer: TorchLearner):
        self._trainer, self.facts, self._parts = trainer, trainer.facts, PartsBeside(trainer)
        self.sizing = trainer.sizing
        self.numbers = trainer.numbers  # of its own share of the batch
        self.staleness, self.shall_stop = trainer.staleness, trainer.shall_stop

    def train(self, batch: Batch) -> dict[str, Any]:
        self._trainer.shall_stop = self.shall_stop
        with self._all("train", [batch.index, batch.redo]):
            return self._trainer.train(batch)

    def snapshot(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
        """The state of this rank's part. `OtherRanks.begin` has sent the command."""
        with naming_lost_ranks():
            return self._trainer.snapshot(into, done)

    def save(self, folder: str) -> None:
        with self._all("hand_over"):
            self._trainer.save(folder)

    def save_beside(self) -> Saving:
        with naming_lost_ranks():
            self._trainer.ranks.broadcast(("save_beside", None))
        return self._parts.begin()

    def save_state(self, folder: Path) -> None:
        with self.save_beside() as fill:
            fill(folder)

    def load_state(self, folder: Path) -> None:
        self._both("load_state", folder)

    def logprobs_of(self, sequences: list[list[int]]) -> tuple[list[list[float]], str]:
        return self._both("logprobs_of", sequences)

    def _both(self, what: str, about: Any) -> Any:
        """Returns when each rank has called the trainer's method of this name."""
        with self._all(what, str(about) if isinstance(about, Path) else about):
            return getattr(self._trainer, what)(about)

    @contextlib.contextmanager
    def _all(self, what: str, about: Any = None) -> Iterator[None]:
        with naming_lost_ranks():
            self._trainer.ranks.broadcast((what, about))
            try:
                yield
            except Untrainable:  # all ranks raise it
                self._trainer.ranks.barrier()
                raise
            self._trainer.ranks.barrier()


class PartsBeside:
    """Each rank writes its part of a checkpoint in a thread. All must create theirs at the same time."""

    def __init__(self, trainer: TorchLearner):
        self._trainer, self._side_channel = trainer, trainer.ranks.side_channel()

    @contextlib.contextmanager
    def begin(self) -> Iterator[Callable[[Path], None]]:
        """Its value returns when all parts are in the folder that rank 0 passes to it. Raises LostRankError, OSError
        for a part that could not be written."""
        channel = self._side_channel

        def fill(folder: Path) -> None:
            fault = 0, ""
            with naming_lost_ranks():
                whole = Path(channel.gathered(str(folder))[0])
                try:
                    save(whole)
                except Exception as error:
                    fault = getattr(error, "errno", None) or errno.EIO, f"{type(error).__name__}: {error}"
                for rank, (code, text) in enumerate(channel.gathered(fault)):
                    if text:
                        raise OSError(code, f"rank {rank} of the learner can't write its part of a checkpoint: {text}")

        with self._trainer.save_beside() as save:
            yield fill


class OtherRanks(Alone):
    """Each rank publishes its part when rank 0 does. All must create theirs at the same time."""

    def __init__(self, ranks: Ranks):
        self._ranks, self._side_channel = ranks, ranks.side_channel()

    def begin(self, version: int) -> None:
        if self._ranks.rank == 0:
            with naming_lost_ranks():
                self._ranks.broadcast(("publish", version))

    def gathered(self, report: PartReport) -> list[PartReport]:
        with naming_lost_ranks():
            reports = self._side_channel.gathered(msgspec.to_builtins(report))
        return msgspec.convert(reports, list[PartReport])


def follow(
    trainer: TorchLearner,
    parts: PartsBeside,
    client: LearnerClient,
    publisher: Publisher,
    published: Attestation,
) -> None:
    """Execute rank 0's commands until this process ends. It asks for its share of the next batch before it trains this
    one, and trains none that was made by weights that are not among those `published`."""
    trainer.distrust = published.fault  # rank 0's loop compares rank 0's share
    asked, rank = [-1, 0], trainer.ranks.rank
    while True:
        what, about = trainer.ranks.broadcast(None)
        if what == "publish":  # rank 0 continues as soon as its own part is cast
            publisher.publish(about, trainer.snapshot)
            continue
        if what == "save_beside":
            in_thread(parts.begin(), lambda fill: fill(Path()))
            continue
        if what == "train":
            index, client.redo = about
            if about != asked:
                client.want_share(index, rank)
            batch, _ = client.batch()
            client.want_share(index + 1, rank)
            asked = [index + 1, client.redo]
            with contextlib.suppress(Untrainable):  # all ranks raise it; rank 0 asks for another batch
                trainer.train(batch)
        elif what == "hand_over":
            trainer.saving.hand_over()
        elif what == "logprobs_of":
            trainer.logprobs_of(about)
        else:
            {"load_state": trainer.load_state}[what](Path(about))
        trainer.ranks.barrier()


def main(role: Role) -> None:
    # Python code cannot run during a collective. A rank with time left lets rank 0 write its checkpoint, and ends then.
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN if role.grace else signal.SIG_DFL)
    rank = int(role.name.removeprefix("learner-"))
    trainer = build_rank(role, rank)
    parts = PartsBeside(trainer)
    coding, endpoint = Coding.of(role.config.weights), role.endpoint(f"weights-{rank}")
    publisher = Publisher(endpoint, coding, lambda _: None, role.keys, OtherRanks(trainer.ranks))
    timeout = role.config.buffer.heartbeat_timeout
    client = LearnerClient(role.find("buffer"), role.name, link_timeout=timeout, keys=role.keys)
    replay = Path(role.config.replay) if role.config.replay else None
    published = Attestation(role.run, replay, writes=False)
    try:
        with naming_lost_ranks():
            follow(trainer, parts, client, publisher, published)
    finally:
        publisher.close()
        client.close()


if __name__ == "__main__":
    run_role(main)
