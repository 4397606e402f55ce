"""Which prompt is next. Pure functions: (known, dice, *, knobs) → place of a prompt that was drawn before, or NEW.

`known` (`buffer.results.Known`) is what the run has recorded of the task's prompts; `dice` is made from the run's seed
and the group's id. So the choice follows from recorded events, and the audit makes it again. In a mixture the ratios
decide whose turn it is, and the sampler chooses within that task.

All samplers can retire solved prompts: those whose newest `retire_after` results were all at least `retire_at`. When
nothing else is left, retired prompts are drawn again. A sampler trains preferred prompts more often than they occur in
the data: `areal-like ledger` shows this bias.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from buffer.results import CLASSES, EASY, HARD, RIGHT, Known, classes, pass_rates, weighed
from buffer.results import NEW as UNMEASURED

NEW = -1
"""The choice of the next prompt that was never drawn. Allowed if `known.new` is above 0."""
Sampler = Callable[[Known, np.random.Generator], int]
Places = NDArray[np.int64]
_MOST_NEW = 10**8  # numpy's hypergeometric takes less than 10^9


def in_order(
    known: Known,
    dice: np.random.Generator,
    *,
    retire_at: Annotated[float, "(0, 1]"] | None = None,
    retire_after: Annotated[int, "[1, 4]"] = 2,
) -> int:
    """Every prompt once per epoch, in an order shuffled for each.

    Without `retire_at` the order follows from the seed alone: `buffer.prompts` computes it, and nothing is recorded.
    With it: new prompts first, then those that were drawn least.
    """
    if known.new:
        return NEW
    allowed = drawable(known, retire_at, retire_after)
    draws = known.draws[allowed]
    return int(dice.choice(allowed[draws == draws.min()]))


def pass_rate_pools(  # noqa: PLR0913 (knobs)
    known: Known,
    dice: np.random.Generator,
    *,
    hard_to: Annotated[float, "[0, 1]"] = 0.2,
    easy_from: Annotated[float, "[0, 1]"] = 0.8,
    new: Annotated[float, "[0, inf)"] = 0.3,
    right: Annotated[float, "[0, inf)"] = 0.5,
    easy: Annotated[float, "[0, inf)"] = 0.1,
    hard: Annotated[float, "[0, inf)"] = 0.1,
    memory: Annotated[float, "[0, 1]"] = 0.5,
    retire_at: Annotated[float, "(0, 1]"] | None = None,
    retire_after: Annotated[int, "[1, 4]"] = 2,
) -> int:
    """Prompts in pools by pass rate: hard (at most `hard_to`), easy (at least `easy_from`), right (between), new.

    `new`, `right`, `easy`, `hard`: how often to draw from each pool, relative to the others; an empty pool gives its
    part to the others. Within a pool all prompts are equally likely. `memory`: an earlier result counts that many times
    as much as the next one.
    """
    allowed = drawable(known, retire_at, retire_after)
    kinds = classes(pass_rates(known, memory)[allowed], hard_to, easy_from)
    pools = {name: allowed[kinds == CLASSES.index(name)] for name in (RIGHT, EASY, HARD)}
    unmeasured = allowed[kinds == CLASSES.index(UNMEASURED)]  # drawn, but dropped before a result
    wanted = {UNMEASURED: new, RIGHT: right, EASY: easy, HARD: hard}
    there = [each for each in wanted if (known.new or len(unmeasured) if each == UNMEASURED else len(pools[each]))]
    weights = np.array([wanted[each] for each in there])
    ends = np.cumsum(weights if weights.any() else np.ones(len(there)))
    pool = there[int(np.searchsorted(ends, dice.random() * ends[-1], side="right"))]
    if pool == UNMEASURED:
        return int(dice.choice(unmeasured)) if len(unmeasured) else NEW
    return int(dice.choice(pools[pool]))


def thompson(
    known: Known,
    dice: np.random.Generator,
    *,
    target: Annotated[float, "[0, 1]"] = 0.5,
    candidates: Annotated[int, "[1, inf)"] = 32,
    memory: Annotated[float, "[0, 1]"] = 0.5,
    retire_at: Annotated[float, "(0, 1]"] | None = None,
    retire_after: Annotated[int, "[1, 4]"] = 2,
) -> int:
    """Thompson sampling over pass rates, as MoPPS (arXiv 2507.04632) has it: each prompt's pass rate has a Beta
    posterior; draw a rate from that of each of `candidates` random prompts, and take the one nearest to `target`.

    The prior is Beta(1, 1). `memory`: an earlier result counts that many times as much as the next one, since the model
    has changed. A prompt that was never drawn is a candidate like any other.
    """
    allowed = drawable(known, retire_at, retire_after)
    most = min(candidates, len(allowed) + known.new)
    fresh = int(dice.hypergeometric(min(known.new, _MOST_NEW), len(allowed), most)) if known.new else 0
    chosen = dice.choice(allowed, most - fresh, replace=False) if most > fresh else allowed[:0]
    right, answers = (np.append(each[chosen], np.zeros(fresh)) for each in weighed(known, memory))
    nearest = int(np.argmin(np.abs(dice.beta(1 + right, 1 + answers - right) - target)))
    return int(chosen[nearest]) if nearest < len(chosen) else NEW


def solved(known: Known, retire_at: float | None, retire_after: int) -> NDArray[np.bool_]:
    """Which prompts are retired, bool (n,)."""
    if retire_at is None:
        return np.zeros(len(known.draws), np.bool_)
    found: NDArray[np.bool_] = np.logical_and.reduce(known.rates[:, :retire_after] >= retire_at, axis=1)
    return found


def drawable(known: Known, retire_at: float | None, retire_after: int) -> Places:
    """Places of the prompts that may be drawn again: free ones that are not retired. If there are none, and no new
    prompts, also those in progress, and at last retired ones: a run continues until its last step."""
    unsolved = ~solved(known, retire_at, retire_after)
    for allowed in (known.free & unsolved, unsolved, known.free):
        if known.new or allowed.any():
            return np.flatnonzero(allowed)
    return np.arange(len(known.draws))


def asks(sampler: partial[int]) -> bool:
    """Does the sampler need recorded results? The default order does not."""
    return sampler.func is not in_order or sampler.keywords.get("retire_at") is not None
