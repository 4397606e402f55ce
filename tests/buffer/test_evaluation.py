"""Rounds of held-out prompts: when one is due, which actor gets which rows, and its result."""

import pytest

from buffer.evaluation import Asked, Evaluation


def heldout(every: int, prompts: int, temperature: float) -> Evaluation:
    """Of one set."""
    return Evaluation([Asked("heldout", prompts, temperature=temperature, every=every)] if prompts else [])


def answer(evaluation: Evaluation, version: int, *newer: int):
    """One actor answers all rows; the tokens of row i are of `version` to `newer[i]`."""
    leases = evaluation.leases("actor-0", version, actors_to_come=1)
    ends = newer or (version,) * len(leases)
    results = [
        evaluation.record("actor-0", lease.group_id, 1.0, 4, version, newest)
        for lease, newest in zip(leases, ends, strict=True)
    ]
    assert not any(results[:-1]), "a result comes with the last row"
    return results[-1]


@pytest.mark.parametrize(("every", "due"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_a_round_is_due_before_training_and_every_so_many_steps_once_each(every: int, due: list[int]) -> None:
    evaluation = heldout(every, 2, 0.0)
    for steps in range(5):
        for _ in range(2):
            evaluation.start_if_due(steps, steps)
            if evaluation.has_rows:
                answer(evaluation, steps)
    assert [result["version"] for result in evaluation.results] == due


@pytest.mark.parametrize(("measured", "rounds"), [(None, [5]), (4, [4, 5]), (5, [5])])
def test_the_final_weights_are_measured_once(measured: int | None, rounds: list[int]) -> None:
    evaluation = heldout(0, 1, 0.0)
    if measured is not None:
        evaluation.start(measured)
        evaluation.finish_with(5)
        evaluation.tick()
        assert evaluation.round is not None and evaluation.round.version == measured, "the one that runs ends first"
        answer(evaluation, measured)
    evaluation.finish_with(5)
    assert not evaluation.finished
    evaluation.tick()
    if evaluation.has_rows:
        answer(evaluation, 5)
    evaluation.tick()
    assert evaluation.finished and [result["version"] for result in evaluation.results] == rounds


def test_what_comes_late_from_another_round_or_another_actor_does_not_count() -> None:
    evaluation = heldout(0, 2, 0.0)
    evaluation.start(0)
    (old, _) = evaluation.leases("a", 0, actors_to_come=1)
    evaluation.round = None
    evaluation.start(1)
    mine = evaluation.leases("a", 1, actors_to_come=1)
    assert evaluation.row_of("a", old.group_id) is None and evaluation.row_of("b", mine[0].group_id) is None
    assert evaluation.row_of("a", mine[0].group_id) == mine[0].row
    assert evaluation.record("a", old.group_id, 9.0, 1, 0, 0) is None
    assert [evaluation.record("a", each.group_id, 1.0, 4, 1, 1) for each in mine][-1]["reward"] == 1.0


def test_a_row_is_overdue_after_the_time_out_and_at_last_counts_as_nothing() -> None:
    evaluation = heldout(0, 2, 0.0)
    assert evaluation.overdue(100.0, 1.0) == []
    evaluation.start(0)
    first, second = evaluation.leases("a", 0, actors_to_come=1, now=10.0)
    assert evaluation.overdue(15.0, 5.0) == [], "not before the time-out is over"
    evaluation.note_moved("a", [second.group_id], 12.0)
    assert evaluation.overdue(16.0, 5.0) == [(first.row, "a")]
    assert evaluation.take_back(first.row, most=2) is None and evaluation.has_rows
    assert evaluation.row_of("a", first.group_id) is None
    (again,) = evaluation.leases("b", 0, actors_to_come=1, now=20.0)
    assert again.row == first.row
    evaluation.restart_clocks(30.0, "b")
    assert evaluation.overdue(31.0, 5.0) == [(second.row, "a")], "only the clock of that actor began anew"
    evaluation.restart_clocks(30.0)
    assert evaluation.overdue(31.0, 5.0) == []
    assert evaluation.record("a", second.group_id, 1.0, 6, 0, 0) is None
    result = evaluation.take_back(again.row, most=2)
    assert result is not None and (result["reward"], result["length"]) == (0.5, 3.0)


def test_sets_are_asked_as_often_as_each_of_them_says_and_only_the_own_ones_make_the_reward() -> None:
    sets = [Asked("mine", 1, every=1), Asked("rare", 2, samples=2, every=2, own=False)]
    evaluation = Evaluation(sets)
    asked = []
    for steps in range(1, 4):
        evaluation.start_if_due(steps, steps)
        leases = evaluation.leases("a", steps, actors_to_come=1)
        asked.append(sorted((lease.split, lease.row, lease.sample) for lease in leases))
        for lease in leases:
            result = evaluation.record("a", lease.group_id, float(lease.split == "mine"), 4, steps, steps)
        assert result is not None and result["reward"] == 1.0
    rare = [("rare", row, sample) for row in range(2) for sample in range(2)]
    assert asked == [[("mine", 0, 0)], [("mine", 0, 0), *rare], [("mine", 0, 0)]]
    evaluation.finish_with(3)
    evaluation.tick()
    assert not evaluation.finished, "one set was not asked about the final weights"
