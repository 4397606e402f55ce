"""Tasks and rewards that break their contracts, for `test_check`; the fault of each is in its name.

They lie apart since processes of a check import them: these import no torch.
"""

import random
import time
from dataclasses import replace

from areal_like.tasks.copying import Copy


class Hashed(Copy):
    def prompt(self, split, row):
        return replace(super().prompt(split, row), answer=hash(f"{split} {row}"))

    async def reward(self, prompt, tokens):
        return 0.0


class SameRows(Copy):
    def prompt(self, split, row):
        return super().prompt("train", row)


class Lottery(Copy):
    async def reward(self, prompt, tokens):
        return random.random()


def not_a_number(answer: str, response: str) -> float:
    return float("nan") if not response else 1.0


def pays_for_nothing(answer: str, response: str) -> float:
    return 1.0


def looks_at_the_clock(answer: str, response: str) -> float:
    return time.perf_counter()
