"""How many samples a group has: the same always, or as stragglers allow. No I/O, no clock.

A batch keeps its number of samples whatever the groups' size, so a batch of larger groups has fewer prompts. The size
is settled when a batch is opened, so it changes at step boundaries only. Your own controller is a class that inherits
from `Sizing`; `module:Name` names it in a config.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple


class Lengths(NamedTuple):
    """One group as it ended or was broken off: `tokens` of each response so far; `cut`: it was not done (the length is
    censored: the true one is larger); `closed`: the group has all responses that it needs, and what was cut had been
    started besides (`oversample_responses`)."""

    tokens: tuple[int, ...]
    cut: tuple[bool, ...]
    closed: bool = False

    @property
    def median_at_most(self) -> float:
        """Upper bound of the median: that of the responses as they are, if fewer than half were cut; else infinity."""
        return median(math.inf if cut else tokens for tokens, cut in zip(self.tokens, self.cut, strict=True))

    def of(self, launch: int) -> Lengths:
        """With those of `launch` responses that had not begun: cut after no token."""
        missing = max(0, launch - len(self.tokens))
        return Lengths(self.tokens + (0,) * missing, self.cut + (True,) * missing, self.closed)


class Sizing:
    """`group_size` samples are in a group unless `next_size` says otherwise; groups_per_batch of that size make up the
    number of samples of every batch. `sizes`: all that there may ever be. `looks`: wants to see what has ended."""

    looks = True

    def __init__(self, *, group_size: int = 8):
        if group_size < 1:
            raise ValueError(f"sizing.group_size must be at least 1, not {group_size}")
        self.group_size = group_size

    @property
    def sizes(self) -> Sequence[int]:
        return (self.group_size,)

    def next_size(self, seen: Sequence[Lengths]) -> int:
        """The size of the next batch's groups; `seen` is what has ended since the call before."""
        return self.group_size

    def metrics(self) -> dict[str, float]:
        """What led to the newest size."""
        return {}

    def state_dict(self) -> object:
        """Plain data; None: there is nothing to be remembered."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` gave."""


class Fixed(Sizing):
    """The same group size always."""

    looks = False


class Sagc(Sizing):
    """Straggler-aware group control (after arXiv 2606.02218): the largest groups that keep the long-run share of groups
    with a straggler at `budget`.

    A group has a straggler if its longest response is more than `straggler_ratio` times its median. No formula of the
    paper is public; this is a reconstruction. p, the risk that one response is a straggler, has a Beta posterior whose
    evidence fades by `forget` per step, and every candidate G learns from every step:
    risk(G) = 1 − E[(1 − p)^G] = 1 − Π_{i<G} (b + i) / (a + b + i). A virtual queue, the dual variable of the budget,
    grows by what a step's share s exceeds it: Q ← max(0, Q + s − budget). The next size is
    argmax_G weight · log G / log G_max − Q · risk(G). So the mean share is at most budget + Q / steps.

    Lengths of responses that were cut are lower bounds; left out, they would hide the stragglers. Of a group that was
    broken off the median is known between two bounds. A response that is past the threshold already, however long the
    cut ones were to become, counts as a straggler; one that is not says nothing, and a group without a straggler so far
    counts only if all its responses were done: it is judged when it comes again. A group that was closed at its first
    responses does not come again, and those that were cut are its longest. They count by the probability that they
    would have become stragglers, given how long they were: P(L > ratio · median) / P(L > length), for lengths that are
    log-normal within a prompt, with one spread that the responses below the medians tell
    (E[ln(median / L) | L < median] = sigma · sqrt(2 / pi)); those are all done.

    `group_size` (times groups_per_batch) only says how many samples a batch has; each of `candidates` must divide that.
    """

    def __init__(
        self,
        *,
        candidates: Sequence[int] = (4, 8, 16, 32),
        budget: float = 0.3,
        straggler_ratio: float = 3.0,
        group_size: int = 8,
        forget: float = 0.98,
        weight: float = 1.0,
    ):
        super().__init__(group_size=group_size)
        whole = [type(each) is int and each >= 2 for each in candidates]
        if not whole or not all(whole) or sorted(set(candidates)) != list(candidates):
            raise ValueError(f"sizing.candidates are ascending whole numbers of at least 2, not {list(candidates)}")
        if not 0 < budget < 1 or straggler_ratio <= 1 or not 0 < forget <= 1 or weight <= 0:
            raise ValueError("sizing: want 0 < budget < 1, straggler_ratio > 1, 0 < forget <= 1 and weight > 0")
        self.candidates = tuple(candidates)
        self.budget, self.straggler_ratio, self.forget, self.weight = budget, straggler_ratio, forget, weight
        self.a = self.b = 1.0
        self.below = self.below_sum = 0.0  # responses shorter than their median, and the sum of ln(median / length)
        self.queue = 0.0
        self.share = 0.0
        self.share_sum = 0.0
        self.steps = 0
        self.chosen = self.candidates[-1]

    @property
    def sizes(self) -> Sequence[int]:
        return self.candidates

    @property
    def share_mean(self) -> float:
        """Over all steps: what the budget is for."""
        return self.share_sum / max(1, self.steps)

    def next_size(self, seen: Sequence[Lengths]) -> int:
        self._note_spread(seen)
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

    @property
    def spread(self) -> float:
        """Sigma of log-normal lengths within a prompt; 0 as long as nothing is known."""
        return math.sqrt(math.pi / 2) * self.below_sum / max(self.below, 1.0)

    def _note_spread(self, seen: Sequence[Lengths]) -> None:
        if not any(group.closed and any(group.cut) for group in seen):
            return
        below = []
        for group in seen:
            middle = group.median_at_most
            if middle < math.inf:
                below += [math.log(middle / tokens) for tokens in group.tokens if 0 < tokens < middle]
        self.below = self.forget * self.below + len(below)
        self.below_sum = self.forget * self.below_sum + sum(below)

    def _judge(self, group: Lengths) -> tuple[float | None, float, float]:
        """(has it a straggler? None: that can't be known; stragglers; responses that are none)."""
        most = self.straggler_ratio * group.median_at_most
        stragglers = sum(tokens > most for tokens in group.tokens)
        if group.closed and any(group.cut) and most < math.inf:
            chances = [self._chance(tokens, most) for tokens, cut in zip(group.tokens, group.cut, strict=True) if cut]
            done = sum(not cut and tokens > most for tokens, cut in zip(group.tokens, group.cut, strict=True))
            none = math.prod(1.0 - chance for chance in chances) * (done == 0)
            return 1.0 - none, done + sum(chances), len(group.tokens) - done - sum(chances)
        least = self.straggler_ratio * median(group.tokens)
        pairs = zip(group.tokens, group.cut, strict=True)
        surely_none = sum(tokens <= least and not cut for tokens, cut in pairs)
        known = stragglers > 0 or not any(group.cut)
        return (float(stragglers > 0) if known else None), stragglers, surely_none

    def _chance(self, tokens: int, most: float) -> float:
        """That a response which was cut after so many tokens would have become longer than `most`."""
        if tokens > most:
            return 1.0
        if not self.spread:
            return 0.0
        middle = most / self.straggler_ratio
        longer = _tail(math.log(max(tokens, 1) / middle) / self.spread)
        return _tail(math.log(self.straggler_ratio) / self.spread) / longer

    def metrics(self) -> dict[str, float]:
        found = {f"sizing/risk_{size}": self.risk(size) for size in self.candidates}
        return found | {
            "sizing/group_size": float(self.chosen),
            "sizing/dual": self.queue,
            "sizing/straggler_share": self.share,
            "sizing/straggler_share_mean": self.share_mean,
            "sizing/budget": self.budget,
            **({"sizing/spread": self.spread} if self.below else {}),
        }

    def state_dict(self) -> object:
        return {name: getattr(self, name) for name in _REMEMBERED}

    def load_state_dict(self, state: Any) -> None:
        for name in _REMEMBERED:
            setattr(self, name, state.get(name, getattr(self, name)))


def _tail(z: float) -> float:
    """P(standard normal > z)."""
    return math.erfc(z / math.sqrt(2)) / 2


_REMEMBERED = ("a", "b", "below", "below_sum", "queue", "share", "share_sum", "steps", "chosen")


def check_sizes(sizing: Sizing, groups_per_batch: int) -> int:
    """The samples of a batch. Raises ValueError unless groups of every size can make it up."""
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
