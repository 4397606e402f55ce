"""Where numerical tests get their random numbers. `AREAL_TEST_SEED=7 python -m pytest tests/learners` gives all of them
other ones: what holds for one draw alone is no property of the code. Child processes inherit it."""

import os

import numpy as np
import torch

_SHIFT = 1_000_003 * int(os.environ.get("AREAL_TEST_SEED", "0"))


def shifted(seed: int) -> int:
    """The seed itself unless AREAL_TEST_SEED is set."""
    return seed + _SHIFT


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(shifted(seed))


def torch_seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(shifted(seed))
