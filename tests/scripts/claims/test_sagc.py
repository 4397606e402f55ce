"""The study of group sizes: its rounds take as long as those of a simulated run of the production buffer."""

import numpy as np
import pytest

from areal_like.config.run_config import load
from scripts.claims import kept, sagc
from scripts.claims.sagc import GROUP_SIZE, SAMPLES, Rounds, Setting, mean_over, train
from scripts.claims.studies import Cell
from scripts.simulation import costs
from scripts.simulation.run import Simulation

STEPS = 60


@pytest.mark.parametrize("tail", [1.0, 1.25])
def test_its_rounds_take_as_long_as_those_of_the_production_buffer(tail: float) -> None:
    setting = Setting(tail=tail)
    rounds = Rounds(f"static {GROUP_SIZE}", setting, 0)
    for _ in range(STEPS):
        groups, size = rounds.open()
        rounds.close([[0.0] * size] * groups)
    config = load(
        [
            *("configs/bench/modes.yaml", "mode=sync", f"scheduler.oversample_prompts={tail}", f"run.steps={STEPS}"),
            *(f"groups_per_batch={SAMPLES // GROUP_SIZE}", f"sizing.group_size={GROUP_SIZE}", "engine.slots=320"),
            *(f"engine.median={sagc.MEDIAN}", f"engine.sigma={setting.tau}", f"engine.noise={setting.sigma}"),
            *(f"sampling.max_new_tokens={sagc.LONGEST}", f"engine.base={sagc.STEP}", f"engine.per_sequence={2e-6}"),
            *("learner.base=0", f"learner.per_token={sagc.PER_TOKEN}"),
        ]
    )
    seconds = Simulation(config, costs.of_timed(config)).run().seconds
    assert rounds.seconds == pytest.approx(seconds, rel=0.12), "other prompts, and two actors instead of one"


def test_a_barrier_per_group_adds_up() -> None:
    rounds = Rounds("static 32", Setting(barrier=True, tau=0.0, sigma=1e-9), 0)
    groups, size = rounds.open()
    rounds.close([[0.0] * size] * groups)
    decoded = sagc.MEDIAN * groups * size
    assert rounds.seconds == pytest.approx(
        sagc.STEP * sagc.MEDIAN * groups + (sagc.PER_RESPONSE + sagc.PER_TOKEN) * decoded, rel=2e-3
    )


def test_learners_of_all_methods_train_beside_each_other() -> None:
    cells = [Cell(method, 1e-2, seed) for method in sagc.METHODS for seed in (0, 1)]
    rows = train(cells, Setting(), steps=4, every=2)
    assert all([entry[0] for entry in row["curve"]] == [2, 4] for row in rows)
    sizes = {cell.algorithm: row["size"] for cell, row in zip(cells, rows, strict=True)}
    assert [sizes[f"static {size}"] for size in sagc.SIZES] == list(sagc.SIZES)
    alone = train(cells[:1], Setting(), steps=4, every=2)
    assert alone[0]["curve"][-1] == pytest.approx(rows[0]["curve"][-1], abs=1e-6), "nobody depends on the others"


def test_the_mean_is_over_seconds_not_steps() -> None:
    assert mean_over([(1, 1.0, 1.0), (2, 9.0, 1.0)], 9.0) > mean_over([(1, 8.0, 1.0), (2, 9.0, 1.0)], 9.0) + 0.3
    assert np.isclose(mean_over([(1, 10.0, 1.0)], 10.0), (1 + 2.0**-6) / 2, atol=0.01)


def results(better: float, stragglers: float) -> list[dict[str, object]]:
    """Two seeds of each method; `static 16` is the best by 0.1, SAGC by `better` more."""
    means = {"static 16": 0.5, "sagc": 0.5 + better}
    return [
        {"condition": "c", "phase": "fresh", "algorithm": method, "rate": 0.01, "seed": seed}
        | {"mean": means.get(method, 0.4) + seed / 100, "equal": 0.5, "seconds": 10.0, "size": 8.0}
        | {"stragglers": stragglers if method == "static 16" else 0.1}
        for method in sagc.METHODS
        for seed in (0, 1)
    ]


def test_sagc_is_held_against_the_best_static_size_of_its_results(tmp_path) -> None:
    kept.write(tmp_path / "results.csv", sagc.COLUMNS, results(0.2, stragglers=0.6))
    found = sagc.tables(sagc.read(tmp_path / "results.csv"))
    best, holding = (found[f"Against the best static size {of}"] for of in ("of all", "that holds the budget"))
    assert "16: 0.505, 0.60" in best and "+0.200 [+0.200, +0.200]" in best
    assert "16:" not in holding and "+0.300 [+0.300, +0.300]" in holding, "groups of 16 have too many stragglers"
    assert "0.505 [0.500, 0.510]" in found["Held-out reward, averaged over equal seconds"]
