"""Token reversal: rewards, faults of actors, exact staleness, and that it learns."""

import pytest
import torch

from scripts.claims import tokens
from scripts.claims.studies import Cell
from scripts.claims.tokens import Draws, Frictions, History, Rollouts, Task, roll_out, train

TASK = Task(length=3)
DENSE, TERMINAL = TASK, Task(length=3, terminal=True)


def rolled(frictions: Frictions, task: Task = TASK, seeds=(0, 1)) -> Rollouts:
    parameters = tokens.transformer(list(seeds), task.shape)
    return roll_out(parameters, task, frictions, Draws(seeds))


def test_the_reverse_is_right_and_anything_else_is_not():
    prompts = torch.tensor([[[0, 1, 1]]])
    answers = torch.tensor([[[[1, 1, 0], [1, 1, 1], [0, 0, 1]]]])
    assert DENSE.rewards(prompts, answers).tolist() == [[[1.0, pytest.approx(2 / 3), 0.0]]]
    assert TERMINAL.rewards(prompts, answers).tolist() == [[[1.0, 0.0, 0.0]]]


def test_the_optimal_policy_makes_no_error(monkeypatch):
    def perfect(parameters, shape, prompts, uniform, forced=None):
        answers = prompts.flip(-1)[:, :, None].expand(uniform.shape)
        return answers, torch.zeros(answers.shape)

    monkeypatch.setattr(tokens, "answer", perfect)
    numbers = train([Cell("dg", 1e-3, 0)], TASK, Frictions(), steps=2, every=1)[0]
    assert numbers["sequence_error"] == numbers["token_error"] == 0.0


def test_the_first_policy_errs_on_half_of_the_tokens():
    numbers = train([Cell("dg", 0.0, 0)], TASK, Frictions(), steps=1, every=1)[0]
    assert numbers["token_error"] == pytest.approx(0.5, abs=0.06)
    assert numbers["sequence_error"] == pytest.approx(1 - 0.5**3, abs=0.06)


def test_advantages_are_rewards_less_the_prompts_mean():
    batch = rolled(Frictions())
    rewards = TASK.rewards(batch.prompts, batch.answers)
    torch.testing.assert_close(batch.advantages, rewards - rewards.mean(-1, keepdim=True))
    assert batch.advantages.any()


def test_a_buggy_actor_says_zeros_and_is_sure_of_them():
    clean, broken = rolled(Frictions()), rolled(Frictions(bug=0.3))
    hit = (broken.behaviour == 0).all(-1)
    assert 0.15 < hit.float().mean() < 0.45
    assert not broken.answers[hit].any()
    assert torch.equal(broken.answers[~hit], clean.answers[~hit])
    torch.testing.assert_close(broken.behaviour[~hit], clean.behaviour[~hit])


def test_discovered_answers_are_right_and_beat_the_bug():
    batch = rolled(Frictions(bug=1.0, discovery=0.3))
    rewards = TASK.rewards(batch.prompts, batch.answers)
    found = (batch.behaviour != 0).any(-1)
    assert 0.15 < found.float().mean() < 0.45
    assert (rewards[found] == 1).all()
    assert (batch.behaviour[found] < -0.1).all(), "the actor's own logprobs, which are near log ½"


def test_corrupted_rewards_are_fair_coins():
    task = Task(length=3, prompts=50)
    batch = rolled(Frictions(bug=1.0, corruption=1.0), task)
    rewards = batch.advantages - batch.advantages.amin(-1, keepdim=True)
    assert set(rewards.round(decimals=4).unique().tolist()) == {0.0, 1.0}
    assert rewards.mean() == pytest.approx(0.5, abs=0.06)


def test_staleness_is_exact():
    history = History(2, torch.zeros(3, 1))
    for version in range(5):
        history.add(torch.full((3, 1), float(version)))
        picked = history.pick(torch.tensor([0.0, 0.34, 0.99]))[:, 0].tolist()
        assert picked == [version, max(0, version - 1), max(0, version - 2)]


def test_a_run_depends_on_its_seed_and_not_on_its_neighbours():
    both = train([Cell("dg", 1e-3, 0), Cell("dg", 1e-3, 1)], TASK, Frictions(staleness=2), steps=4, every=2)
    alone = train([Cell("dg", 1e-3, 1)], TASK, Frictions(staleness=2), steps=4, every=2)
    assert both[1] == alone[0] != both[0]


def test_groups_without_an_advantage_may_be_left_out():
    """With and without the shortcut: the same gradient."""
    task = Task(length=2, samples=2)
    stack = tokens.Stack(tokens.transformer([0, 1], task.shape), torch.tensor([1e-3, 1e-3]))
    batch = roll_out(stack.views(stack.flat), task, Frictions(), Draws([0, 1]))
    idle = (batch.advantages == 0).all(-1).sum(1)
    assert 0 < idle[0] != idle[1] > 0
    for name, when in (("ppo", "always"), ("tpo", "on_policy")):
        algorithm = tokens.ALGORITHMS[name]
        short, long = (
            tokens._gradient(algorithm, stack, slice(0, 2), batch, task.shape, idle) for idle in ({when}, set())
        )
        assert long.abs().max() > 1e-3
        torch.testing.assert_close(short, long, atol=1e-6, rtol=1e-4)


def test_it_learns():
    numbers = train([Cell("dg", 3e-3, 0)], Task(length=2), Frictions(), steps=60, every=60)[0]
    assert numbers["token_error"] < 0.1
