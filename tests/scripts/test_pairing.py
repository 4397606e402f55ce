"""Two models, prompt by prompt, against simulation."""

import numpy as np
import pytest

from scripts.eval import paired


def test_a_difference_is_counted_by_prompt_in_both_directions() -> None:
    before, after = [0] * 9 + [1] * 2 + [1] * 5 + [0] * 4, [1] * 9 + [0] * 2 + [1] * 5 + [0] * 4
    found, back = paired(before, after), paired(after, before)
    assert [found[key] for key in ("before", "after", "better", "worse")] == [7 / 20, 14 / 20, 9, 2]
    assert found["difference"] == pytest.approx(7 / 20) and found["low"] < 7 / 20 < found["high"] and found["p"] < 0.05
    assert (back["p"], back["low"], back["high"]) == pytest.approx((found["p"], -found["high"], -found["low"]))
    assert paired([0, 1, 1, 0], [0, 1, 1, 0])["p"] == 1.0


def test_without_a_difference_one_of_twenty_is_significant_and_intervals_hold_it() -> None:
    """4 answers to each of 40 prompts by the same model, twice: answers of one prompt are alike."""
    draw, times = np.random.default_rng(0), 400
    pairs = [paired(*(draw.binomial(4, easy) / 4 for _ in range(2))) for easy in draw.random((times, 40))]
    assert 4 <= sum(each["p"] < 0.05 for each in pairs) <= 38, "5 %, within four deviations"
    assert sum(each["low"] <= 0 <= each["high"] for each in pairs) >= times - 38
