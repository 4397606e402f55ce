"""Advantages: pure NumPy functions from rewards to one number per sample. The learner calls one per batch."""

from __future__ import annotations

import numpy as np


def group(rewards: np.ndarray, groups: np.ndarray, *, std: bool = False, eps: float = 1e-6) -> np.ndarray:
    """Group-relative advantages of GRPO (arXiv 2402.03300): reward − mean of its group, float64 [n].

    `rewards` float [n]; `groups` int [n] names the group of each sample (any integers). With `std` the difference is
    divided by (population standard deviation of the group + `eps`), as in the paper; without, as in Dr. GRPO
    (arXiv 2503.20783). Groups whose rewards are all equal, single samples among them, get exactly 0.
    """
    rewards = np.asarray(rewards, np.float64)
    _, member = np.unique(np.asarray(groups), return_inverse=True)
    counts = np.bincount(member)
    advantages = rewards - (np.bincount(member, rewards) / counts)[member]
    if std:
        deviation = np.sqrt(np.bincount(member, advantages**2) / counts)
        advantages = advantages / (deviation[member] + eps)
    advantages[~varied(rewards, member)[member]] = 0.0
    return advantages


def varied(rewards: np.ndarray, member: np.ndarray) -> np.ndarray:
    """Per group, whether its rewards differ: bool [max(member) + 1] from rewards [n] and group numbers [n]."""
    first = np.unique(member, return_index=True)[1]
    return np.bincount(member, rewards != rewards[first][member]) > 0
