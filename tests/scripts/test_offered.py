"""The lengths that cut responses would have had, against synthetic ones whose whole lengths are known."""

import numpy as np
import pytest

from scripts.analysis.offered import Offer, lengths


def made(prompts: int, launch: int, need: int, seed: int = 0) -> tuple[list[Offer], np.ndarray]:
    """Each prompt is closed at its first `need` responses; returned with all whole lengths."""
    random = np.random.default_rng(seed)
    whole = np.exp(4.6 + 0.9 * random.standard_normal((prompts, 1)) + 0.5 * random.standard_normal((prompts, launch)))
    whole = np.sort(np.maximum(1, np.rint(whole)), axis=1)
    offers = [Offer(row[:need].tolist(), [int(row[need - 1])] * (launch - need)) for row in whole]
    return offers, whole


def test_the_mean_of_what_was_offered_is_found_though_the_longest_were_cut() -> None:
    offers, whole = made(400, 10, 8)
    kept = np.mean([n for offer in offers for n in offer.whole])
    assert kept / whole.mean() - 1 < -0.15, "the cut is a strong bias"
    assert lengths(offers).mean() == pytest.approx(whole.mean(), rel=0.03)


def test_prompts_of_which_nothing_is_whole_count_as_long_ones() -> None:
    """A queue of cut prompts: they have no whole response."""
    offers, whole = made(400, 8, 8)
    last = whole.max(1)
    closed_at = np.quantile(last, 0.8)
    cut = [
        offer if last[i] <= closed_at else Offer([], np.minimum(whole[i], closed_at).astype(int).tolist())
        for i, offer in enumerate(offers)
    ]
    found = lengths(cut)
    assert len(found) == whole.size
    kept = np.mean([n for offer in cut for n in offer.whole])
    assert kept < 0.75 * whole.mean() and found.mean() == pytest.approx(whole.mean(), rel=0.2)


def test_with_nothing_cut_nothing_is_estimated() -> None:
    assert lengths([Offer([3, 5], []), Offer([7], [])]).tolist() == [3, 5, 7]
    assert lengths([Offer([], [4])]).tolist() == [4] and len(lengths([])) == 0
