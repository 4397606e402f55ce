"""Lengths of answers in a simulation."""

from collections.abc import Sequence

from areal_like.config import run_config as configs
from scripts.simulation.costs import Answers, of_timed
from scripts.simulation.draws import Dealt
from scripts.simulation.run import Simulation

TRACE = [[10 * n, 10 * n + 1] for n in range(1, 8)]
PROMPTS = [7 * n * n for n in range(21)]


def firsts(lengths: Dealt, prompts: Sequence[int]) -> list[int]:
    """Which of the traces each prompt has."""
    return [lengths.drawn(prompt, [0.0])[0] // 10 for prompt in prompts]


def test_a_simulation_deals_them_out_and_goes_on_after_a_resume() -> None:
    assert isinstance(Answers(trace=list(TRACE)).lengths, Dealt)
    config = configs.load(["configs/bench/modes.yaml", "mode=sync"])
    simulation = Simulation(config, of_timed(config))
    before = simulation._world.lengths
    simulation._build(simulation.learner.progress)
    assert simulation._world.lengths is before


def test_prompts_get_all_traces_equally_often() -> None:
    lengths = Dealt(1.0, 1.0, 0.0, 0, TRACE)
    dealt = firsts(lengths, PROMPTS)
    assert sorted(dealt) == sorted(3 * list(range(1, 8))) and dealt[:7] == dealt[7:14] != sorted(dealt[:7])
    assert firsts(lengths, PROMPTS) == dealt, "a prompt keeps its own"
    assert firsts(Dealt(1.0, 1.0, 0.0, 0, TRACE), PROMPTS) == dealt
    assert firsts(Dealt(1.0, 1.0, 0.0, 1, TRACE), PROMPTS) != dealt
    assert lengths.drawn(PROMPTS[3], [0.0, 0.0]) == [10 * dealt[3], 10 * dealt[3] + 1], "samples of one group differ"


def test_one_trace_and_none() -> None:
    assert Dealt(1.0, 1.0, 0.0, 0, [5, 6]).drawn(0, [0.0, 0.9]) == [5, 6]
    assert Dealt(50.0, 0.0, 0.0, 0, None).drawn(0, [0.5]) == [50]
