"""The digest by its definition: the mixer of SplitMix64, two sums, the number of words."""

import numpy as np

from areal_like.weights.digest import K, mixed, sweep, text_of

SPLITMIX = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
"""What the published generator gives first from seed 0."""
NOTHING = np.zeros(2, np.uint64)


def test_zeros_are_mixed_into_the_numbers_of_splitmix() -> None:
    assert [int(mixed(np.zeros(1, np.uint64), position)[0]) for position in (1, 2, 3)] == list(SPLITMIX)


def test_the_lanes_are_the_sum_and_the_sum_of_products_of_halves() -> None:
    sums = sum(SPLITMIX), sum((x & 0xFFFFFFFF) * (x >> 32) for x in SPLITMIX)
    assert sweep(np.zeros(3, np.uint64), 1).tolist() == [each % 2**64 for each in sums]


def test_the_text_is_both_lanes_in_hexadecimal() -> None:
    assert text_of(np.array([1, 0xAB << 56], np.uint64), 0) == "0000000000000001ab00000000000000"


def test_the_number_of_words_is_added_mixed_to_both_lanes() -> None:
    assert text_of(NOTHING + np.uint64(5), int(K)) == 2 * f"{SPLITMIX[0] + 5:016x}"
    assert text_of(NOTHING, 1) != text_of(NOTHING, 2)
