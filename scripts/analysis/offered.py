"""Estimates the whole length of responses that were cut off. Pure.

Closing a group at its first responses, or a round at its first groups, leaves out long answers; only a lower bound of
their length is known. The model: lengths are log-normal within a prompt, with one spread for all prompts, around
medians that are log-normal as well (roughly true in RL of reasoning models). An EM algorithm over whole and cut lengths
finds the parameters. Without cut responses it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROUNDS = 200
_erfc = np.vectorize(math.erfc, otypes=[float])


class Offer(NamedTuple):
    """One prompt's samples, in tokens: `whole` responses, and the lengths at which others were `cut`."""

    whole: Sequence[int]
    cut: Sequence[int]


def lengths(offers: Sequence[Offer]) -> np.ndarray:
    """Lengths of all samples, prompt by prompt: whole ones as they are, cut ones by their expected final length (at
    most the longest whole one, or the known length): float64 [samples]."""
    tokens = np.array([n for offer in offers for n in (*offer.whole, *offer.cut)], np.float64)
    cut = np.array([i >= len(offer.whole) for offer in offers for i in range(len(offer.whole) + len(offer.cut))], bool)
    if not cut.any() or cut.all():
        return tokens
    group = np.repeat(np.arange(len(offers)), [len(offer.whole) + len(offer.cut) for offer in offers])
    centre, spread = _fit(np.log(tokens), cut, group)
    above = (np.log(tokens[cut]) - centre[group[cut]]) / spread
    expected = np.exp(centre[group[cut]] + spread**2 / 2) * _tail(above - spread) / np.maximum(_tail(above), 1e-300)
    longest = tokens[~cut].max()
    tokens[cut] = np.maximum(tokens[cut], np.minimum(expected, longest))
    return tokens


def _tail(z: np.ndarray) -> np.ndarray:
    """P(standard normal > z)."""
    return _erfc(z / math.sqrt(2)) / 2


def _fit(logs: np.ndarray, cut: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, float]:
    """Centre of each group and spread within groups, of logarithms of lengths that are lower bounds where `cut`."""
    sizes = np.bincount(group)
    middle, between, within = float(logs.mean()), float(logs.var()) + 1e-6, float(logs.var()) + 1e-6
    centre = np.full(len(sizes), middle)
    for _ in range(ROUNDS):
        spread = math.sqrt(within)
        above = np.clip((logs[cut] - centre[group[cut]]) / spread, -30, 30)
        hazard = np.exp(-(above**2) / 2) / math.sqrt(2 * math.pi) / np.maximum(_tail(above), 1e-300)
        mean, square = logs.copy(), np.zeros(len(logs))
        mean[cut] += spread * (hazard - above)
        square[cut] = within * np.maximum(0.0, 1 + above * hazard - hazard**2)
        sure = 1 / (sizes / within + 1 / between)  # variance of a group's centre, given its samples
        centre = sure * (np.bincount(group, mean) / within + middle / between)
        within = float(np.mean((mean - centre[group]) ** 2 + square + sure[group])) + 1e-9
        middle = float(centre.mean())
        between = float(np.mean((centre - middle) ** 2 + sure)) + 1e-9
    return centre, math.sqrt(within)
