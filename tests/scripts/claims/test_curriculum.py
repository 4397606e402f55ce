"""The study of samplers: its table policy learns, its reward is exact, and each row repeats."""

import numpy as np
import pytest

from scripts.claims.curriculum import ARMS, LONGEST, SAMPLES, World, bias_of, run


def test_the_expected_reward_is_what_sampling_earns() -> None:
    world = World(0)
    assert world.reward() == pytest.approx(sum(0.1**n for n in range(1, LONGEST + 1)) / LONGEST)
    place, digit = np.indices(world.right.shape)
    world.logits[place, digit, world.right] = 2.0
    world.forward()
    earned = [world.answers(row)[1].mean() for row in range(240) for _ in range(4)]
    assert np.mean(earned) == pytest.approx(world.reward(), abs=0.05)


@pytest.mark.parametrize("name", ["in_order", "thompson", "in_order, retire_at 1"])
def test_each_row_repeats_and_its_record_shows_what_was_drawn(name: str) -> None:
    first, again = (run(ARMS[name], 3, 1000.0, steps=6) for _ in range(2))
    assert first == again and first.reward > World(3).reward() * 1.2 and first.samples >= SAMPLES
    ratios, teach = bias_of(first.records)
    assert ratios.count("/") == 2 and teach.endswith("%")
