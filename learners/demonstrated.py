"""Batches of demonstrations for a learner that trains alone (`loss=sft`): `LearnerClient`'s methods without a buffer.

Batch k takes the places from k · groups_per_batch on of the rows of all epochs, each epoch shuffled anew by `run.seed`.
So a resume continues with the same batches. Every rank takes its share; the first also measures the held-out loss,
every `eval.every` steps.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from areal_like import turns
from areal_like.config.registry import is_supervised
from areal_like.config.run_config import Config, ranks_of
from areal_like.interfaces import Demonstration, Task
from areal_like.run.process import Role
from areal_like.types import Batch, Group, Sample
from areal_like.wire.learner_client import LearnerClient, Stopped

Score = Callable[[list[list[int]]], tuple[list[list[float]], str]]
"""`TorchLearner.logprobs_of`."""
SHOWN = "demonstrated"
"""Stands for the digest of the weights that sampled the tokens."""
TURN_SECONDS = 1e-4
"""Pause before a batch, so that roles in one process can take turns."""


class Demonstrated:
    """Serves rank `rank` its shares of the batches. `score` is the trainer's, on the first rank alone."""

    def __init__(self, task: Any, config: Config, score: Score | None, rank: int = 0):
        self._task, self._config, self._score = task, config, score
        self._rank, self._ranks = rank, ranks_of(config)
        self._index, self.redo, self.pausing = 0, 0, False
        self._begin = time.monotonic()
        self._evaluations: list[dict[str, float]] = []

    def want(self, index: int, version: int, until: float | None = None) -> None:
        self._index = index

    want_share = want

    def batch(self, may_pause: bool = True) -> tuple[Batch, dict[str, Any]]:
        """The requested batch (or this rank's share), and the measures before it. Raises Stopped."""
        turns.sleep(TURN_SECONDS)
        if self.pausing and may_pause:
            raise Stopped(by_signal=True)
        known, every = len(self._evaluations), self._config.eval.every
        if self._score and (self._index % every == 0 if every else self._index == 0):
            self._evaluate(self._index // self._config.weight_sync_interval)
        batch = self._made(self._index)
        return batch, {"seconds": time.monotonic() - self._begin, "evaluations": self._evaluations[known:]}

    def finish(self, reason: str, steps: int) -> dict[str, Any]:
        """Measure once more; returns a report as the buffer's."""
        self._evaluate(-(-steps // self._config.weight_sync_interval))
        return {"trained_seconds": time.monotonic() - self._begin, "evaluations": self._evaluations}

    def pause(self) -> None:
        """Make `batch` raise Stopped. For signal handlers."""
        self.pausing = True

    def shall_stop(self) -> bool:
        return self.pausing

    def hello(self, *_: object) -> None: ...
    def stops(self) -> None: ...
    def published(self, manifest: object) -> None: ...
    def trained(self, index: int) -> None: ...
    def checkpointed(self, step: int) -> None: ...
    def close(self) -> None: ...

    def _made(self, index: int) -> Batch:
        count, version = self._config.groups_per_batch, index // self._config.weight_sync_interval
        rows = rows_of(self._config.run.seed, index * count, count, self._task.size("train"))
        groups = []
        for group_id, row in enumerate(rows, index * count):
            shown: Demonstration = self._task.demonstration("train", row)
            tokens = np.concatenate([shown.prompt.tokens, shown.tokens]).astype(np.int32)
            size, logprobs = len(shown.tokens), np.zeros(len(shown.tokens), np.float32)  # no policy sampled it
            runs = [(version, size)]
            sample = Sample(tokens, len(shown.prompt.tokens), logprobs, shown.trained, runs, 0.0, "stop")
            groups.append(Group(group_id, [sample], {version: SHOWN}))
        if self._ranks == 1:
            return Batch(index, version, groups)
        longest_first = sorted(range(count), key=lambda place: -len(groups[place].samples[0].tokens))
        places = sorted(longest_first[self._rank :: self._ranks])
        return Batch(index, version, [groups[place] for place in places], places=places)

    def _evaluate(self, version: int) -> None:
        """Record the mean negative log likelihood, in nats, of the trained tokens of held-out rows."""
        assert self._score
        rows = range(min(self._config.eval.prompts, self._task.size("heldout")))
        shown = [self._task.demonstration("heldout", row) for row in rows]
        logprobs, _ = self._score([[*each.prompt.tokens.tolist(), *each.tokens.tolist()] for each in shown])
        losses = [
            -np.array(values[len(each.prompt.tokens) - 1 :])[each.trained]
            for values, each in zip(logprobs, shown, strict=True)
        ]
        every = np.concatenate(losses)
        found = {"version": version, "seconds": time.monotonic() - self._begin, "loss": float(every.mean())}
        self._evaluations.append(found | {"tokens": len(every)})


def client_of(role: Role, task: Task | None, score: Score | None = None, rank: int = 0) -> LearnerClient | Demonstrated:
    """Where the batches, or shares of batches, of a rank come from. `task` is read if it demonstrates."""
    if is_supervised(role.config):
        assert task
        return Demonstrated(task, role.config, score, rank)
    link_timeout = role.config.buffer.heartbeat_timeout
    return LearnerClient(role.find("buffer"), role.name, link_timeout=link_timeout, keys=role.keys)


def rows_of(seed: int, first: int, count: int, size: int) -> list[int]:
    """`count` rows from place `first` on, in the sequence of all epochs; an epoch has each of `size` rows once."""
    epochs = {place // size for place in range(first, first + count)}
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(size) for epoch in epochs}
    return [int(orders[place // size][place % size]) for place in range(first, first + count)]
