"""How many samples a group has: what all controllers share. No I/O, no clock.

The size is fixed when a batch is opened, so it changes only between steps. A batch keeps its number of samples: with
larger groups it has fewer prompts (`keep`). To write your own controller, inherit from `Sizing` and name the class in
the config as `module:Name`. `buffer.sagc` and `buffer.sagc_plain` have those that follow stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from areal_like.wire.messages import GradientNoise

Keep = Literal["samples", "prompts"]
State = Any
"""Plain data, as the journal keeps it."""


class GroupLengths(NamedTuple):
    """One group as it ended or was broken off. `tokens`: of each response so far. `cut`: the response was not done (its
    length is censored: the true one is larger). `closed`: the group has all responses that it needs; those that were
    cut were extra (`oversample_responses`). `rewards`: of the responses that were done, in their order; () if the group
    was broken off. `at`: when it ended, in seconds of the buffer's clock (nan: not known)."""

    tokens: tuple[int, ...]
    cut: tuple[bool, ...]
    closed: bool = False
    rewards: tuple[float, ...] = ()
    at: float = math.nan

    @property
    def median_at_most(self) -> float:
        """Upper bound of the median length: counts a response that was cut as infinitely long."""
        return median(math.inf if cut else tokens for tokens, cut in zip(self.tokens, self.cut, strict=True))

    @property
    def done(self) -> list[int]:
        """Lengths of the responses that were done."""
        return [tokens for tokens, cut in zip(self.tokens, self.cut, strict=True) if not cut]

    def of(self, launch: int) -> GroupLengths:
        """The same group with all `launch` responses: those that had not begun are cut after 0 tokens."""
        missing = max(0, launch - len(self.tokens))
        return self._replace(tokens=self.tokens + (0,) * missing, cut=self.cut + (True,) * missing)


class Rounds(NamedTuple):
    """How the scheduler will run the next batch. `samples`: of a batch of the usual groups. `waits`: the batch ends
    with its last group. `prompts`, `responses`: number started per one needed; in a long round this holds for responses
    only if `long_responses`. `at_once`: most groups in generation (None: all)."""

    samples: int = 256
    waits: bool = True
    prompts: float = 1.0
    responses: float = 1.0
    long_responses: bool = False
    at_once: int | None = None


class Sizing:
    """A group has `group_size` samples unless `next_size` says otherwise. `sizes`: all possible sizes. `looks`: does it
    use the lengths of groups that ended? `hears_gradients`: should the learner measure noise for `note_gradient`?
    `keep`: what stays equal in every batch, samples (groups_per_batch · group_size) or prompts (groups_per_batch).
    `rounds`: the scheduler sets it before it asks for a size."""

    looks = True
    hears_gradients = False
    keep: Keep = "samples"
    rounds = Rounds()

    def __init__(self, *, group_size: Annotated[int, "[1, inf)"] = 8):
        if group_size < 1:
            raise ValueError(f"sizing.group_size must be at least 1, not {group_size}")
        self.group_size = group_size

    @property
    def sizes(self) -> Sequence[int]:
        return (self.group_size,)

    def groups(self, size: int) -> int:
        """The groups of a batch whose groups have `size` samples."""
        return self.rounds.samples // (size if self.keep == "samples" else self.group_size)

    def next_size(self, seen: Sequence[GroupLengths]) -> int:
        """The size of the next batch's groups. `seen`: groups that ended since the last call."""
        return self.group_size

    def note_gradient(self, measured: GradientNoise) -> None:
        """The learner has trained a batch and measured the noise of its gradient."""

    def metrics(self) -> dict[str, float]:
        """Metrics that explain the newest size."""
        return {}

    def state_dict(self) -> object:
        """The state as plain data; None: no state."""
        return None

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` gave."""


class Fixed(Sizing):
    """A fixed group size."""

    looks = False


def check_sizes(sizing: Sizing, groups_per_batch: int) -> int:
    """The number of samples of a batch of the usual groups. Raises ValueError if groups of some size can't make up a
    batch."""
    samples = groups_per_batch * sizing.group_size
    for size in sizing.sizes if sizing.keep == "samples" else ():
        if samples % size:
            fitting = [each for each in sizing.sizes if samples % each == 0]
            raise ValueError(
                f"sizing.candidates: groups of {size} can't make up a batch of {samples} samples (groups_per_batch="
                f"{groups_per_batch} times sizing.group_size={sizing.group_size}); set sizing.candidates={fitting} or "
                f"others that divide {samples}, or make the batch a multiple of {math.lcm(*sizing.sizes)}"
            )
    return samples
