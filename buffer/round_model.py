"""How long a batch of groups of some size will take, by the scheduler's own rules. No I/O, no clock.

Lengths are log-normal: ln L = mu + tau · (the prompt) + sigma · (the response), fitted to the groups that ended
(`LengthFit`). `RoundModel` simulates rounds with fixed standard normal draws. They are the same at each call, so a
decision depends on its evidence alone. The costs of a batch beside its responses are measured (`CostFit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_like.normal_scores import line
from buffer.sizing import GroupLengths, Rounds

DRAWS = 1 << 16
"""Responses that are drawn per size; at least LEAST_ROUNDS and at most MOST_ROUNDS rounds of them."""
LEAST_ROUNDS, MOST_ROUNDS = 20, 256
LEAST_FIT = 8
"""Fewer timed batches give no estimate of a batch's costs beside its responses."""


def fit_group(group: GroupLengths) -> tuple[float, float] | None:
    """(mean, standard deviation) of ln length in a group whose longest responses may be cut. A line fitted to the
    sorted lengths of finished responses, over the normal scores of their ranks among all started ones. None:
    unknown."""
    logs = sorted(math.log(max(1, tokens)) for tokens in group.done)
    if len(logs) < 2 or not (group.closed or len(logs) == len(group.tokens)):
        return None
    return line(logs, len(group.tokens))


class LengthFit:
    """The log-normal of lengths. Evidence fades by `forget` per batch; with `state` plain numbers."""

    def __init__(self, forget: float):
        self.forget = forget
        self.groups = self.mean_sum = self.square_sum = self.inverse_sum = 0.0
        self.responses = self.sigma_sum = self.longest = 0.0

    def note(self, seen: Sequence[GroupLengths]) -> None:
        found = [(fit, group) for group in seen if (fit := fit_group(group))]
        if not found:
            return
        for name in ("groups", "mean_sum", "square_sum", "inverse_sum", "responses", "sigma_sum"):
            setattr(self, name, self.forget * getattr(self, name))
        for (mean, sigma), group in found:
            done = len(group.done)
            self.groups += 1
            self.mean_sum += mean
            self.square_sum += mean * mean
            self.inverse_sum += 1 / done
            self.responses += done - 1
            self.sigma_sum += sigma * (done - 1)
            self.longest = max(self.longest, *group.tokens)

    @property
    def mu(self) -> float:
        return self.mean_sum / self.groups

    @property
    def sigma(self) -> float:
        """Within a prompt."""
        return self.sigma_sum / self.responses

    @property
    def tau(self) -> float:
        """Over prompts: the spread of groups' means, less what their own responses add to it."""
        spread = self.square_sum / self.groups - self.mu**2 - self.sigma**2 * self.inverse_sum / self.groups
        return math.sqrt(max(0.0, spread))


class CostFit:
    """Seconds of a batch against the decode steps that its responses took: a line, by least squares. `extra`: what is
    not responses (training, weights, what each sample costs), in decode steps."""

    def __init__(self, forget: float):
        self.forget = forget
        self.batches = 0
        self.n = self.x = self.y = self.xx = self.xy = 0.0
        self.ended = math.nan  # lost in a crash: another process has another clock

    def note(self, seen: Sequence[GroupLengths], rounds: Rounds) -> None:
        groups = [group for group in seen if group.closed and group.done and not math.isnan(group.at)]
        if not groups or not (rounds.waits or rounds.at_once):
            return
        before, self.ended = self.ended, max(group.at for group in groups)
        if not self.ended > before:  # the first batch
            return
        ends = [max(group.done) for group in groups]
        self.batches += 1
        steps, seconds = float(_barrier(np.array([ends], np.float64), rounds)[0]), self.ended - before
        self.n, self.x, self.y = self.forget * self.n + 1, self.forget * self.x + steps, self.forget * self.y + seconds
        self.xx, self.xy = self.forget * self.xx + steps * steps, self.forget * self.xy + steps * seconds

    @property
    def extra(self) -> float:
        if self.batches < LEAST_FIT:
            return 0.0
        x, y = self.x / self.n, self.y / self.n
        spread = self.xx / self.n - x * x
        slope = (self.xy / self.n - x * y) / spread if spread > 1e-6 * x * x else 0.0
        return min(max(0.0, y / slope - x), 100.0 * x) if slope > 0 else 0.0


class _Drawn(NamedTuple):
    """Standard normals of each round [rounds, groups]: of the prompt, of the response that ends its group where more
    are started than needed, and where all are needed. `is_long` [rounds]: a round of groups that were cut."""

    prompts: NDArray[np.float64]
    short: NDArray[np.float64]
    long: NDArray[np.float64]
    is_long: NDArray[np.bool_]


class RoundModel:
    """Decode steps of a batch, on average, by the rules of `buffer.schedulers`."""

    def __init__(self, rounds: Rounds, size: int, groups: int):
        self.rounds, self.size, self.groups = rounds, size, groups
        self.launch = math.ceil(size * rounds.responses)
        self._drawn = _draw(rounds, size, groups)

    def steps(self, fit: LengthFit) -> float:
        """With neither `waits` nor `at_once`, actors are always full: the result is the share of their time."""
        rounds, drawn = self.rounds, self._drawn
        if not (rounds.waits or rounds.at_once):
            return self.groups * self.launch / rounds.samples
        starts = fit.mu + fit.tau * drawn.prompts
        ends = np.minimum(np.exp(starts + fit.sigma * drawn.short), fit.longest)
        if rounds.prompts == 1:
            return float(_barrier(ends, rounds).mean())
        return self._tail_batching(ends, np.exp(starts), np.exp(fit.sigma * drawn.long), fit.longest)

    def _tail_batching(
        self, ends: NDArray[np.float64], prompts: NDArray[np.float64], again: NDArray[np.float64], most: float
    ) -> float:
        """Short rounds keep the first groups to finish. When the cut ones fill a batch, a long round runs only them."""
        is_long = self._drawn.is_long
        is_short = ~is_long
        order = np.argsort(ends[is_short], axis=1, kind="stable")
        kept, cut = order[:, : self.groups], order[:, self.groups :]
        total = np.take_along_axis(ends[is_short], kept[:, -1:], axis=1).sum()
        queue = np.take_along_axis(prompts[is_short], np.sort(cut, axis=1), axis=1).ravel()
        waited = queue[: is_long.sum() * self.groups].reshape(-1, self.groups)
        total += np.minimum(most, (waited * again[is_long, : self.groups]).max(axis=1)).sum()
        return float(total / len(ends))


def _long_rounds(count: int, groups: int, cut: int) -> NDArray[np.bool_]:
    """Which of `count` rounds are long, if each short one cuts `cut` groups."""
    found, queued = np.zeros(count, np.bool_), 0
    for number in range(count):
        found[number] = queued >= groups
        queued += -groups if found[number] else cut
    return found


@lru_cache(64)
def _draw(rounds: Rounds, size: int, groups: int) -> _Drawn:
    launch, started = math.ceil(size * rounds.responses), math.ceil(groups * rounds.prompts)
    count = min(MOST_ROUNDS, max(LEAST_ROUNDS, DRAWS // (launch * started)))
    dice = np.random.default_rng(0)
    prompts = dice.standard_normal((count, started))
    responses = dice.standard_normal((count, started, launch))
    short = np.partition(responses, size - 1, axis=2)[:, :, size - 1]
    if rounds.prompts == 1:
        return _Drawn(prompts, short, short, np.zeros(count, np.bool_))
    again = dice.standard_normal((count, started, launch if rounds.long_responses else size))
    long = np.partition(again, size - 1, axis=2)[:, :, size - 1]
    return _Drawn(prompts, short, long, _long_rounds(count, groups, started - groups))


def _barrier(ends: NDArray[np.float64], rounds: Rounds) -> NDArray[np.float64]:
    """Decode steps of rounds whose groups take `ends` [rounds, groups]: all at once, or `at_once` at a time."""
    longest: NDArray[np.float64] = ends.max(axis=1)
    if rounds.at_once is None:
        return longest
    share: NDArray[np.float64] = ends.sum(axis=1) / min(rounds.at_once, ends.shape[1])
    return np.maximum(share, longest) if rounds.waits else share
