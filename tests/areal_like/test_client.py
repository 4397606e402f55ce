"""What the learner's side makes of a batch."""

import numpy as np

from areal_like.client import mask_old_tokens
from areal_like.types import Batch, Group, Sample


def sample(runs: list[tuple[int, int]]) -> Sample:
    n = sum(count for _, count in runs)
    mask = np.ones(n, bool)
    mask[-1] = False  # a token of a tool, say
    mask.flags.writeable = False  # as it comes off the wire
    return Sample(np.zeros(n + 1, np.int32), 1, np.zeros(n, np.float32), mask, runs, 1.0, "stop")


def test_tokens_older_than_allowed_are_masked_and_counted_out() -> None:
    samples = [sample([(0, 2), (3, 1), (4, 2)]), sample([(4, 3)]), sample([(0, 2)])]
    for each in samples:
        mask_old_tokens(each, 3)
    assert samples[0].loss_mask.tolist() == [False, False, True, True, False]
    assert samples[1].loss_mask.tolist() == [True, True, False]
    assert not samples[2].loss_mask.any()
    assert Batch(4, 4, [Group(0, samples)], oldest_allowed=3).staleness() == [1, 0]
    assert Batch(4, 4, [Group(0, samples)]).staleness() == [4, 0, 4]
