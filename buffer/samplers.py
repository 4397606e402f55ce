"""Which prompt is next. Pure functions: (known, dice, *, knobs) → place of a prompt that was drawn before, or NEW.

`known` (`buffer.results.Known`) is the record of the task's prompts; `dice` is made from the run's seed and the group's
id. So the choice follows from recorded events, and the audit makes it again. A sampler trains preferred prompts more
often than they occur in the data: `areal-like ledger` shows this bias.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from buffer.results import CLASSES, EASY, HARD, RIGHT, Known, classes, pass_rates
from buffer.results import NEW as UNMEASURED

NEW = -1
"""The choice of the next prompt that was never drawn. Allowed if `known.new` is above 0."""
Sampler = Callable[[Known, np.random.Generator], int]
Places = NDArray[np.int64]
MOST_CANDIDATES = 4096
"""A lease looks at this many prompts: its time does not grow with the data."""


def in_order(known: Known, dice: np.random.Generator) -> int:
    """Every prompt once per epoch, in an order shuffled for each. `buffer.prompts` computes it from the seed alone."""
    return NEW


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
) -> int:
    """Prompts in pools by pass rate: hard (at most `hard_to`), easy (at least `easy_from`), right (between), new. How
    often to draw from each pool, relative to the others that are not empty: `new`, `right`, `easy`, `hard`. `memory`:
    an earlier result counts that many times as much as the next one."""
    allowed = drawable(known, dice)
    seen = known._replace(rates=known.rates[allowed], answers=known.answers[allowed])
    kinds = classes(pass_rates(seen, memory), hard_to, easy_from)
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


def drawable(known: Known, dice: np.random.Generator) -> Places:
    """Places of prompts that may be drawn again: free ones, at most MOST_CANDIDATES by chance. If there are none, and
    no new prompts, also those in progress: a run continues until its last step."""
    count = len(known.rows)
    places = np.arange(count) if count <= MOST_CANDIDATES else dice.integers(count, size=MOST_CANDIDATES)
    free = places[known.free[places]]
    return free if known.new or len(free) else places


def needs_results(sampler: partial[int]) -> bool:
    """Does the sampler need recorded results? The default order does not."""
    return sampler.func is not in_order
