"""How many samples a group has. No I/O, no clock.

The size is fixed when a batch is opened, so it changes only between steps. A batch keeps its number of samples: with
larger groups it has fewer prompts. Your own controller inherits from `Sizing`; name it in the config as `module:Name`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any, NamedTuple


class GroupLengths(NamedTuple):
    """One group as it ended or was broken off. `tokens`: of each response so far. `cut`: the response was not done (its
    length is censored: the true one is larger)."""

    tokens: tuple[int, ...]
    cut: tuple[bool, ...]

    @property
    def median_at_most(self) -> float:
        """Upper bound of the median length: counts a response that was cut as infinitely long."""
        return median(math.inf if cut else tokens for tokens, cut in zip(self.tokens, self.cut, strict=True))

    def of(self, launch: int) -> GroupLengths:
        """The same group with all `launch` responses: those that had not begun are cut after 0 tokens."""
        missing = max(0, launch - len(self.tokens))
        return self._replace(tokens=self.tokens + (0,) * missing, cut=self.cut + (True,) * missing)


class Sizing:
    """A group has `group_size` samples unless `next_size` returns another size. `sizes`: all possible sizes; with a
    single one the buffer measures no lengths. A batch has groups_per_batch · group_size samples."""

    def __init__(self, *, group_size: Annotated[int, "[1, inf)"] = 8):
        self.group_size = group_size

    @property
    def sizes(self) -> Sequence[int]:
        return (self.group_size,)

    def next_size(self, seen: Sequence[GroupLengths]) -> int:
        """The size of the next batch's groups. `seen`: groups that ended since the last call."""
        return self.group_size

    def metrics(self) -> dict[str, float]:
        """Metrics that explain the newest size."""
        return {}

    def state_dict(self) -> object:
        """The state as plain data, as the journal keeps it; None: no state."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore the state that `state_dict` gave."""


class Fixed(Sizing):
    """A fixed group size."""


class Sagc(Sizing):
    """Straggler-aware group control (after arXiv 2606.02218): the largest groups at a straggler share of `budget`.

    A group has a straggler if its longest response is more than `straggler_ratio` times its median. The paper publishes
    no formula; this is a reconstruction. p, the risk that one response is a straggler, has a Beta posterior. Its
    evidence fades by `forget` per step, and every candidate G learns from every step:
    risk(G) = 1 − E[(1 − p)^G] = 1 − Π_{i<G} (b + i) / (a + b + i). A virtual queue Q is the dual variable of the
    budget. It grows by the excess of a step's share s over the budget: Q ← max(0, Q + s − budget). The next size is
    argmax_G weight · log G / log G_max − Q · risk(G). So the mean share is at most budget + Q / steps.

    Lengths of responses that were cut are lower bounds. A response of a group that was broken off counts only where the
    side of the threshold is sure, however long the cut ones would become. Such a group without a straggler is judged
    when it comes again. Responses that a group did not wait for (`oversample_responses`) delay nobody and do not count.

    `group_size` (times groups_per_batch) only sets how many samples a batch has; each of `candidates` must divide that.
    """

    def __init__(
        self,
        *,
        candidates: Sequence[Annotated[int, "[2, inf)"]] = (4, 8, 16, 32),
        budget: Annotated[float, "(0, 1)"] = 0.3,
        straggler_ratio: Annotated[float, "(1, inf)"] = 3.0,
        group_size: Annotated[int, "[1, inf)"] = 8,
        forget: Annotated[float, "(0, 1]"] = 0.98,
        weight: Annotated[float, "(0, inf)"] = 1.0,
    ):
        super().__init__(group_size=group_size)
        whole = [type(each) is int and each >= 2 for each in candidates]
        if not whole or not all(whole) or sorted(set(candidates)) != list(candidates):
            raise ValueError(f"sizing.candidates must be ascending whole numbers >= 2, not {list(candidates)}")
        self.candidates = tuple(candidates)
        self.budget, self.straggler_ratio, self.forget, self.weight = budget, straggler_ratio, forget, weight
        self.a = self.b = 1.0
        self.queue = 0.0
        self.share = 0.0
        self.share_sum = 0.0
        self.steps = 0
        self.chosen = self.candidates[-1]

    @property
    def sizes(self) -> Sequence[int]:
        return self.candidates

    def next_size(self, seen: Sequence[GroupLengths]) -> int:
        judged = [self._judge(group) for group in seen]
        events = [event for event, _, _ in judged if event is not None]
        if judged:
            self.a = self.forget * self.a + sum(count for _, count, _ in judged)
            self.b = self.forget * self.b + sum(count for _, _, count in judged)
        if events:
            self.share = sum(events) / len(events)
            self.share_sum += self.share
            self.steps += 1
            self.queue = max(0.0, self.queue + self.share - self.budget)
        self.chosen = max(self.candidates, key=self._score)
        return self.chosen

    def risk(self, size: int) -> float:
        """Posterior probability that a group of `size` has a straggler."""
        return 1.0 - math.prod((self.b + i) / (self.a + self.b + i) for i in range(size))

    def _score(self, size: int) -> float:
        return self.weight * math.log(size) / math.log(self.candidates[-1]) - self.queue * self.risk(size)

    def _judge(self, group: GroupLengths) -> tuple[float | None, int, int]:
        """(Does it have a straggler? None: unknown; number of stragglers; number of responses that are surely none)."""
        most = self.straggler_ratio * group.median_at_most
        least = self.straggler_ratio * median(group.tokens)
        stragglers = sum(tokens > most for tokens in group.tokens)
        surely_none = sum(tokens <= least and not cut for tokens, cut in zip(group.tokens, group.cut, strict=True))
        known = stragglers > 0 or not any(group.cut)
        return (float(stragglers > 0) if known else None), stragglers, surely_none

    def metrics(self) -> dict[str, float]:
        found = {f"sizing/risk_{size}": self.risk(size) for size in self.candidates}
        return found | {
            "sizing/group_size": float(self.chosen),
            "sizing/dual": self.queue,
            "sizing/straggler_share": self.share,
            "sizing/straggler_share_mean": self.share_sum / max(1, self.steps),  # which the budget limits
            "sizing/budget": self.budget,
        }

    def state_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _REMEMBERED}

    def load_state_dict(self, state: Any) -> None:
        for name in _REMEMBERED:
            setattr(self, name, state[name])


_REMEMBERED = ("a", "b", "queue", "share", "share_sum", "steps", "chosen")


def check_sizes(sizing: Sizing, groups_per_batch: int) -> int:
    """The number of samples of a batch. Raises ValueError if groups of some size can't make up a batch."""
    samples = groups_per_batch * sizing.group_size
    for size in sizing.sizes:
        if samples % size:
            fitting = [each for each in sizing.sizes if samples % each == 0]
            raise ValueError(
                f"sizing.candidates: groups of {size} can't make up a batch of {samples} samples (groups_per_batch="
                f"{groups_per_batch} times sizing.group_size={sizing.group_size}); set sizing.candidates={fitting} or "
                f"others that divide {samples}, or make the batch a multiple of {math.lcm(*sizing.sizes)}"
            )
    return samples
