"""The study of samplers: its table policy learns, its reward is exact, and each row repeats."""

import numpy as np
import pytest

from scripts.claims import kept
from scripts.claims.curriculum import ARMS, BIAS, COLUMNS, LONGEST, SAMPLES, World, bias_of, measured, run, tables


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
    found = bias_of(first.records)
    assert set(found) == {*BIAS, "teach"} and 0 < found["teach"] < 1


def test_its_table_is_made_from_its_results(tmp_path) -> None:
    rows = measured(2, {"in_order": ARMS["in_order"]}, (1000.0,), steps=2)
    assert [(row["seed"], row["samples"]) for row in rows] == [(0, np.inf), (1, np.inf)], "two steps reach no target"
    numbers = dict.fromkeys(("reward", *BIAS, "teach"), 0.25)
    samples = {10.0: (9000, 7000, 8000), 100.0: (1000, 2000, np.inf)}
    made = [
        {"arm": "a, b", "rate": rate, "seed": seed, "samples": count} | numbers | {"hard": float(seed)}
        for rate, counts in samples.items()
        for seed, count in enumerate(counts)
    ]
    kept.write(tmp_path / "results.csv", COLUMNS, made)
    (table,) = tables(tmp_path / "results.csv").values()
    cells = [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]
    assert cells == ["`a, b`", "8.0 [7.0, 9.0]", "2.0 [1.0, inf]", "1.00 / 0.25 / 0.25", "25%"]
