"""Limits of rewards."""

LARGEST_REWARD = 1e9
"""Sums of squares over a batch stay finite in float32, in which the learner computes."""
PART, MOST_PARTS = r"^[A-Za-z_][\w.-]{0,63}\Z", 32
"""Names of a reward's parts, and their number."""
