"""Samples and groups that fail: reasons for the ledger, and words for the log and the console."""

from __future__ import annotations

import logging
import re

from actors.agents.programs import AgentError
from actors.reward_pool import RewardError
from areal_like.errors import EpisodeError
from areal_like.rewards import LARGEST_REWARD, MOST_PARTS, PART
from areal_like.types import Sample

log = logging.getLogger(__name__)
CRASHES = {RewardError: "reward crashed", AgentError: "agent crashed", EpisodeError: "environment crashed"}
"""Errors that cost a sample, and not yet its group → the reason in the ledger."""
REASON_CHARACTERS, DETAIL_CHARACTERS = 200, 1000
CRASHES_IN_A_ROW = 3
"""After this many samples in a row crash, the run's console has the reason: their groups may take long."""
MOST_LOGGED = 5


class Failures:
    """`redrawn`: samples drawn again, since their reward had crashed."""

    def __init__(self) -> None:
        self.redrawn = 0
        self._logged = self._in_a_row = 0
        self._last = ""

    def crashed(self, error: BaseException) -> str:
        """A sample has crashed. Returns the reason, in words."""
        self._in_a_row, self._last = self._in_a_row + 1, printable(f"{reason_of(error)}: {error}", REASON_CHARACTERS)
        return self._last

    def ended(self) -> None:
        self._in_a_row = 0

    @property
    def note(self) -> str:
        """Why no recent sample has ended; "": nothing is wrong, or only a few crashed."""
        return f"no sample ends: {self._last}" if self._in_a_row >= CRASHES_IN_A_ROW else ""

    def log(self, what: str) -> None:
        """Log the first few with their tracebacks: the same error may come thousands of times."""
        self._logged += 1
        if self._logged <= MOST_LOGGED:
            log.exception("%s failed", what)


def reason_of(error: BaseException) -> str:
    return next((reason for kind, reason in CRASHES.items() if isinstance(error, kind)), "failed")


def printable(text: str, most: int = DETAIL_CHARACTERS) -> str:
    """The first `most` characters, with spaces for unprintable ones: no message can carry half a surrogate pair."""
    return "".join(each if each.isprintable() else " " for each in text[:most])


def check_rewards(sample: Sample) -> None:
    """Raises RewardError for a reward, or parts of it, that no message carries or the learner cannot compute with."""
    if len(sample.parts) > MOST_PARTS or not all(re.search(PART, name) for name in sample.parts):
        expected = f"at most {MOST_PARTS} names of letters, digits, '_', '.' and '-'"
        raise RewardError(f"the workflow gave the parts {', '.join(sample.parts)} of the reward, expected {expected}")
    for reward in (sample.reward, *sample.parts.values(), *(earned for _, earned in sample.turn_rewards)):
        if not abs(reward) <= LARGEST_REWARD:
            raise RewardError(f"the workflow gave the reward {reward:g}, expected a finite number in float32")
