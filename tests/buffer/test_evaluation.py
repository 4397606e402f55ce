"""Rounds of held-out prompts: the sets that are due, their leases, and figures that follow only from the answers."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.config.registry import ConfigError, build
from areal_like.tasks.heldout import sets_of
from buffer.evaluation import AnswerResult, Evaluation
from learners.progress import heldout_metrics
from tests.buffer.house import heldout_set

OWN = heldout_set("heldout", 3, every=2)
SAMPLED = heldout_set("sampled", 2, samples=4, every=4, ks=(1, 4), own=False)


def answered(evaluation: Evaluation, rewards: dict[tuple[str, int, int], float] | None = None):
    """Hand out the whole round to one actor and answer it. Returns the leases by answer, and the round's result."""
    version = evaluation.round.version
    leases = {(each.split, each.row, each.sample): each.group_id for each in evaluation.leases("a", version, 1)}
    assert len(set(leases.values())) == len(leases)
    results = [
        evaluation.record("a", lease, AnswerResult((rewards or {}).get(key, 0.0), 5, version, version))
        for key, lease in leases.items()
    ]
    assert not any(results[:-1]), "a result comes with the last row"
    return leases, results[-1]


@pytest.mark.parametrize(("every", "due"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_a_round_is_due_before_training_and_every_so_many_steps_once_each(every: int, due: list[int]) -> None:
    evaluation = Evaluation([heldout_set("heldout", 2, every=every)])
    for steps in range(5):
        for _ in range(2):
            evaluation.start_if_due(steps, steps)
            if evaluation.has_rows:
                answered(evaluation)
    assert [result["version"] for result in evaluation.results] == due


def test_a_round_asks_the_sets_that_are_due_and_the_last_one_asks_all_unless_all_were_asked():
    evaluation, due = Evaluation([OWN, SAMPLED]), []
    for steps in range(7):
        evaluation.start_if_due(steps, steps)
        if evaluation.round:
            leases, result = answered(evaluation)
            due.append((steps, len(leases)))
            assert set(result["sets"]) == ({"heldout", "sampled"} if steps % 4 == 0 else {"heldout"})
    assert due == [(0, 11), (2, 3), (4, 11), (6, 3)]
    evaluation.start_if_due(8, 8)
    for rows in (11, 11, 0):  # the round that runs ends first
        evaluation.finish_with(9)
        evaluation.tick()
        assert not evaluation.finished or not rows
        assert len(evaluation.round.unassigned if evaluation.round else []) == rows
        if evaluation.round:
            answered(evaluation)
    assert [result["version"] for result in evaluation.results[-2:]] == [8, 9]


def test_late_answers_of_another_round_or_another_actor_do_not_count() -> None:
    evaluation = Evaluation([heldout_set("heldout", 2)])
    evaluation.start_if_due(0, 0)
    (old, _) = evaluation.leases("a", 0, actors_to_come=1)
    evaluation.round = None
    evaluation.finish_with(1)
    evaluation.tick()
    mine = evaluation.leases("a", 1, actors_to_come=1)
    assert evaluation.row_of("a", old.group_id) is None and evaluation.row_of("b", mine[0].group_id) is None
    assert evaluation.row_of("a", mine[0].group_id) == mine[0].row
    assert evaluation.record("a", old.group_id, AnswerResult(9.0, 1, 0, 0)) is None
    assert [evaluation.record("a", each.group_id, AnswerResult(1.0, 4, 1, 1)) for each in mine][-1]["reward"] == 1.0


def test_a_row_is_overdue_after_the_time_out_and_at_last_counts_as_nothing() -> None:
    evaluation = Evaluation([heldout_set("heldout", 2)])
    evaluation.start_if_due(0, 0)
    first, second = evaluation.leases("a", 0, actors_to_come=1, now=10.0)
    assert evaluation.overdue(15.0, 5.0) == []
    evaluation.note_moved("a", {second.row: 0}, 12.0, 5.0)
    assert evaluation.overdue(16.0, 5.0) == [(first.row, "a")]
    assert evaluation.take_back(first.row, most=2) is None and evaluation.has_rows
    (again,) = evaluation.leases("b", 0, actors_to_come=1, now=20.0)
    assert again.row == first.row and evaluation.row_of("a", first.group_id) is None
    evaluation.restart_clocks(30.0, "b")
    assert evaluation.overdue(31.0, 5.0) == [(second.row, "a")], "only the clock of that actor began anew"
    evaluation.restart_clocks(30.0)
    assert evaluation.overdue(31.0, 5.0) == []
    assert evaluation.record("a", second.group_id, AnswerResult(1.0, 6, 0, 0)) is None
    result = evaluation.take_back(again.row, most=2)
    assert result is not None and (result["reward"], result["length"]) == (0.5, 3.0)


def test_without_a_token_or_an_answer_more_of_any_row_reports_of_progress_count_for_a_while_only() -> None:
    evaluation = Evaluation([heldout_set("heldout", 3)])
    evaluation.start_if_due(0, 0)
    first, second, third = evaluation.leases("a", 0, actors_to_come=1, now=0.0)
    for now, tokens in ((4.0, 0), (8.0, 1), (16.0, 1), (19.0, 1)):
        evaluation.note_moved("a", {first.row: 0, second.row: tokens}, now, 10.0)
    late = lambda now: {row for row, _ in evaluation.overdue(now, 5.0)}  # noqa: E731
    assert late(22.0) == {first.row, second.row, third.row}, "the one token more came at 8 s"
    evaluation.record("a", third.group_id, AnswerResult(1.0, 4, 0, 0))
    evaluation.note_moved("a", {first.row: 0}, 23.0, 10.0)
    assert late(24.0) == {second.row}, "an answer came, and the first waits for its place"


def test_an_actor_gets_all_answers_of_a_prompt_also_of_one_that_is_handed_out_again():
    evaluation = Evaluation([OWN, heldout_set("sampled", 5, samples=4, own=False)])
    evaluation.start_if_due(0, 0)
    shares = {name: evaluation.leases(name, 0, left) for name, left in (("a", 3), ("b", 2), ("c", 1))}
    assert sum(map(len, shares.values())) == 23 and max(map(len, shares.values())) <= 8 + 3
    for leases in shares.values():
        prompts = [(lease.split, lease.row) for lease in leases]
        assert all(prompts.count(each) == (4 if each[0] == "sampled" else 1) for each in prompts)
    lost = {lease.group_id for lease in shares["b"]}
    evaluation.lost("b")
    assert {lease.group_id for lease in evaluation.leases("d", 0, 1)} == lost


def test_figures_are_those_of_the_answers_and_the_rounds_reward_that_of_the_own_set():
    evaluation = Evaluation([OWN, SAMPLED])
    evaluation.start_if_due(7, 0)
    right = {("heldout", 0, 0): 1.0, ("heldout", 2, 0): 1.0, ("sampled", 1, 3): 1.0, ("sampled", 1, 0): 0.5}
    _, result = answered(evaluation, right)
    assert result["reward"] == pytest.approx(2 / 3)
    sampled = result["sets"]["sampled"]
    assert sampled["reward"] == pytest.approx(1.5 / 8)
    assert sampled["pass@1"] == pytest.approx((0 + 1 / 4) / 2) and sampled["pass@4"] == pytest.approx(1 / 2)
    assert (sampled["prompts"], sampled["samples"], sampled["length"]) == (2, 4, 5.0)
    metrics = heldout_metrics(result["sets"])
    assert metrics["heldout/sampled"] == sampled["reward"] and metrics["heldout/sampled/pass@4_low"] < 0.5
    assert (
        metrics["eval/reward"] == result["reward"] and metrics["eval/reward_low"] < 2 / 3 < metrics["eval/reward_high"]
    )


def test_a_mixture_has_a_set_for_each_task_and_others_come_beside_them(tmp_path: Path):
    tasks = "{short: {name: copy, digits: 2, heldout_size: 5}, long: {name: copy, digits: 4}}"
    mixture = f"task={{name: mixture, tasks: {tasks}}}"
    sets = "{again: {samples: 2, temperature: 1}, one: {task: long, prompts: 3}, more: {task: {name: copy, digits: 3}}}"
    config = configs.load(["quickstart", mixture, "eval.prompts=7", f"eval.sets={sets}"])
    found = {each.name: each for each in sets_of(config, build("task", config.task, 0))}
    sizes = {name: len(each.rows) for name, each in found.items()}
    assert sizes == {"short": 5, "long": 7, "again": 12, "one": 3, "more": 7}
    assert [found[name].own for name in ("short", "long", "again")] == [True, True, False]
    assert found["one"].prompt(0).tokens.tolist() == found["long"].prompt(0).tokens.tolist()
    assert len(found["more"].prompt(0).tokens) == 4 and found["again"].ks == (1, 2)
    with pytest.raises(ConfigError, match="another one"):
        configs.load(["quickstart", mixture, "eval.sets={long: {}}"])
    with pytest.raises(ConfigError, match="can't be mixed: vocab_size"):
        config = configs.load(["quickstart", "eval.sets={sums: {task: arithmetic}}"])
        sets_of(config, build("task", config.task, 0))


SETS = "eval.sets={again: {samples: 8, temperature: 1}}"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", ["checkpoint.best=heldout/reward", "run.early_stop=3"]),
        ("", [SETS, "checkpoint.best=again/pass@8"]),
        ("checkpoint.best", ["checkpoint.best=eval/reward"]),
        ("checkpoint.best", [SETS, "checkpoint.best=again/pass@3"]),
        ("checkpoint.best", ["checkpoint.best=heldout/loss"]),
        ("checkpoint.best", ["checkpoint.best=heldout/reward", "eval.every=0"]),
        ("run.early_stop", ["run.early_stop=3", "eval.every=0"]),
    ],
)
def test_the_best_checkpoint_is_by_a_measure_that_is_taken(key: str, words: list[str]) -> None:
    config = configs.load(["quickstart", *words])
    with pytest.raises(ConfigError, match=f"^{key}: got") if key else nullcontext():
        sets_of(config, build("task", config.task, 0))
