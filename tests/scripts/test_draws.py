"""Lengths of answers in a simulation."""

from scripts.simulation.draws import Dealt

TRACE = [[10 * n, 10 * n + 1] for n in range(1, 8)]


def firsts(lengths: Dealt, prompts: range) -> list[int]:
    """Which of the traces each prompt has."""
    return [lengths.drawn(prompt, [0.0])[0] // 10 for prompt in prompts]


def test_prompts_get_all_traces_equally_often() -> None:
    lengths = Dealt(1.0, 1.0, 0.0, 0, TRACE)
    dealt = firsts(lengths, range(21))
    assert sorted(dealt) == sorted(3 * list(range(1, 8))) and dealt[:7] == dealt[7:14] != sorted(dealt[:7])
    assert firsts(lengths, range(21)) == dealt, "a prompt keeps its own"
    assert firsts(Dealt(1.0, 1.0, 0.0, 0, TRACE), range(21)) == dealt
    assert firsts(Dealt(1.0, 1.0, 0.0, 1, TRACE), range(21)) != dealt
    assert lengths.drawn(3, [0.0, 0.0]) == [10 * dealt[3], 10 * dealt[3] + 1], "samples of one group differ"


def test_one_trace_and_none() -> None:
    assert Dealt(1.0, 1.0, 0.0, 0, [5, 6]).drawn(0, [0.0, 0.9]) == [5, 6]
    assert Dealt(50.0, 0.0, 0.0, 0, None).drawn(0, [0.5]) == [50]
