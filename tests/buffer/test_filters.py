"""Which groups the filters reject."""

import pytest

from buffer.filters import none, zero_variance


@pytest.mark.parametrize(
    ("rewards", "tolerance", "reason"),
    [
        ([0.0, 0.0], 0.0, "zero variance"),
        ([1.0], 0.0, "zero variance"),
        ([0.5, 0.5, 0.5], 0.0, "zero variance"),
        ([0.0, 1.0, 0.0], 0.0, ""),
        ([0.5, 0.5000001], 0.0, ""),
        ([0.5, 0.5000001], 1e-6, "zero variance"),
    ],
)
def test_groups_without_variance_are_left_out(rewards, tolerance, reason) -> None:
    lengths = [4] * len(rewards)
    assert zero_variance(rewards, lengths, tolerance=tolerance) == reason
    assert none(rewards, lengths) == ""
