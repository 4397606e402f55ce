"""Held-out sets: due rounds, their leases, and figures that follow only from the answers."""

from pathlib import Path

import pytest

from areal_like.config import run_config as configs
from areal_like.config.registry import ConfigError, build
from areal_like.tasks.heldout import sets_of
from buffer.evaluation import Asked, Evaluation, asked
from learners.main import heldout_metrics

OWN = Asked("heldout", 3, every=2)
SAMPLED = Asked("sampled", 2, samples=4, temperature=1.0, every=4, ks=(1, 4), own=False)


def answered(evaluation: Evaluation, rewards: dict[tuple[str, int, int], float]):
    """Hand out the whole round to one actor, answer it, and return its result."""
    leases = evaluation.leases("a", evaluation.round.version, 1)
    assert len({lease.group_id for lease in leases}) == len(leases)
    said = {(lease.split, lease.row, lease.sample): lease.group_id for lease in leases}
    version = evaluation.round.version
    told = [evaluation.record("a", each, rewards.get(key, 0.0), 5, version, version) for key, each in said.items()]
    assert all(each is None for each in told[:-1])
    return said, told[-1]


def test_a_round_asks_the_sets_that_are_due_and_the_last_one_asks_all():
    evaluation, due = Evaluation([OWN, SAMPLED]), []
    for steps in range(7):
        evaluation.start_if_due(steps, steps)
        if evaluation.round:
            said, result = answered(evaluation, {})
            due.append((steps, len(said)))
            assert set(result["sets"]) == ({"heldout", "sampled"} if steps % 4 == 0 else {"heldout"})
    assert due == [(0, 11), (2, 3), (4, 11), (6, 3)]
    evaluation.finish_with(6)
    evaluation.tick()
    assert len(evaluation.round.unassigned) == 11, "the sampled set was not asked at the last version"
    answered(evaluation, {})
    evaluation.finish_with(6)
    evaluation.tick()
    assert evaluation.finished


def test_an_actor_gets_all_answers_of_a_prompt_also_of_one_that_is_handed_out_again():
    evaluation = Evaluation([OWN, Asked("sampled", 5, samples=4, temperature=1.0, own=False)])
    evaluation.start(0)
    shares = {name: evaluation.leases(name, 0, left) for name, left in (("a", 3), ("b", 2), ("c", 1))}
    assert sum(map(len, shares.values())) == 23 and max(map(len, shares.values())) <= 8 + 3
    for leases in shares.values():
        asked_of = {(lease.split, lease.row): 0 for lease in leases}
        for lease in leases:
            asked_of[lease.split, lease.row] += 1
        assert all(count == (4 if name == "sampled" else 1) for (name, _), count in asked_of.items())
    lost = {lease.group_id for lease in shares["b"]}
    evaluation.lost("b")
    assert {lease.group_id for lease in evaluation.leases("d", 0, 1)} == lost


def test_figures_are_those_of_the_answers_and_the_rounds_reward_that_of_the_own_set():
    evaluation = Evaluation([OWN, SAMPLED])
    evaluation.start(7)
    right = {("heldout", 0, 0): 1.0, ("heldout", 2, 0): 1.0, ("sampled", 1, 3): 1.0, ("sampled", 1, 0): 0.5}
    said, result = answered(evaluation, right)
    assert {sample for name, _, sample in said if name == "sampled"} == {0, 1, 2, 3}
    assert result["reward"] == pytest.approx(2 / 3)
    sampled = result["sets"]["sampled"]
    assert sampled["reward"] == pytest.approx(1.5 / 8)
    assert sampled["pass@1"] == pytest.approx((0 + 1 / 4) / 2) and sampled["pass@4"] == pytest.approx(1 / 2)
    assert (sampled["prompts"], sampled["samples"], sampled["length"]) == (2, 4, 5.0)
    told = heldout_metrics(result["sets"])
    assert told["heldout/sampled"] == sampled["reward"] and told["heldout/sampled/pass@4_low"] < 0.5
    assert told["eval/reward"] == result["reward"] and told["eval/reward_low"] < 2 / 3 < told["eval/reward_high"]


def loaded(*overrides: str):
    return configs.load(["configs/quickstart.yaml", *overrides])


def test_a_mixture_has_a_set_for_each_task_and_others_come_beside_them(tmp_path: Path):
    tasks = "{short: {name: copy, digits: 2, heldout_size: 5}, long: {name: copy, digits: 4}}"
    sets = "{again: {samples: 2, temperature: 1}, one: {task: long, prompts: 3}, more: {task: {name: copy, digits: 3}}}"
    config = loaded(f"task={{name: mixture, tasks: {tasks}}}", "eval.prompts=7", f"eval.sets={sets}")
    found = {each.name: each for each in sets_of(config, build("task", config.task, 0))}
    assert {name: len(each.rows) for name, each in found.items()} == {
        **{"short": 5, "long": 7},
        **{"again": 12, "one": 3, "more": 7},
    }
    assert [found[name].own for name in ("short", "long", "again")] == [True, True, False]
    assert found["one"].prompt(0).tokens.tolist() == found["long"].prompt(0).tokens.tolist()
    assert len(found["more"].prompt(0).tokens) == 4 and found["again"].ks == (1, 2)
    assert [each.answers for each in asked(found.values())] == [5, 7, 24, 3, 7]
    with pytest.raises(ConfigError, match="another one"):
        loaded(f"task={{name: mixture, tasks: {tasks}}}", "eval.sets={long: {}}")
    with pytest.raises(ConfigError, match="can't be mixed: vocab_size"):
        config = loaded("eval.sets={sums: {task: arithmetic}}")
        sets_of(config, build("task", config.task, 0))
