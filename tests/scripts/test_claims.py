"""Studies of the papers' claims: tuning, many learners in one tensor, exact staleness, faults of actors, gradients."""

from functools import partial

import pytest
import torch

from learners.losses.corrections import exact
from learners.losses.delightful import dg
from learners.losses.weighted import reinforce
from scripts.claims import digits, reversal, single_arm
from scripts.claims.algorithms import ALGORITHMS, loss_of
from scripts.claims.reversal import Frictions, Task, picked, roll_out, train
from scripts.claims.stacks import Draws, Shape, transformer
from scripts.claims.studies import Cell, Study, percent_table

SHAPE = Shape(vocabulary=3, positions=8, layers=2, heads=2, width=8, hidden=12)
RIGHT_RATE = {"a": 0.1, "b": 0.2}


def test_every_algorithm_is_tuned_on_the_same_grid_and_measured_with_fresh_seeds():
    asked = []

    def measure(cells):
        asked.extend(cells)
        return [{"error": abs(cell.rate - RIGHT_RATE[cell.algorithm]) + cell.seed / 1000} for cell in cells]

    study = Study(("a", "b"), (0.1, 0.2, 0.4), "error", tuning=2, fresh=3)
    rows = study.run("c", measure)
    tuning = [tuple(cell) for cell in asked if cell.seed < 100]
    assert tuning == [(name, rate, seed) for name in "ab" for rate in (0.1, 0.2, 0.4) for seed in (0, 1)]
    fresh = [(row["algorithm"], row["rate"], row["seed"]) for row in rows if row["phase"] == "fresh"]
    assert fresh == [(name, RIGHT_RATE[name], seed) for name in "ab" for seed in (100, 101, 102)]
    assert "10.1 [" in percent_table(rows, "error") and "@1e-1" in percent_table(rows, "error")
    asked.clear()
    study.run("d", measure, {"a": 0.4, "b": 0.4})
    assert {cell.rate for cell in asked} == {0.4} and min(cell.seed for cell in asked) == 100


def test_logprobs_while_sampling_are_those_of_the_whole_answers():
    parameters = transformer([0, 1], SHAPE)
    parameters["head"] *= 10  # far from uniform
    prompts = torch.tensor([[[0, 1, 2, 0], [2, 2, 1, 0]]]).expand(2, -1, -1)
    answers, logprobs = reversal.answer(parameters, SHAPE, prompts, Draws([0, 1])(2, 3, 4))
    torch.testing.assert_close(reversal.score(parameters, SHAPE, prompts, answers), logprobs)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_loss_of_a_stack_has_each_learners_own_gradient(name):
    generator = torch.Generator().manual_seed(0)
    current = (torch.rand(3, 4, 2, 5, generator=generator) - 2).requires_grad_()
    behaviour = current.detach() + 0.5 * torch.randn(current.shape, generator=generator)
    advantages = torch.randn(3, 4, 2, generator=generator)
    (stacked,) = torch.autograd.grad(loss_of(ALGORITHMS[name], current, behaviour, advantages, 40.0), current)
    assert stacked.abs().sum() > 0
    for row in range(3):
        rows = slice(row, row + 1)
        own = current.detach()[rows].requires_grad_()
        loss = loss_of(ALGORITHMS[name], own, behaviour[rows], advantages[rows], 40.0)
        torch.testing.assert_close(torch.autograd.grad(loss, own)[0][0], stacked[row])


@pytest.mark.parametrize("delay", [0, 4])
def test_the_digits_actor_is_exactly_so_many_steps_old(monkeypatch, delay):
    images = torch.rand(64, 30, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 10
    act, gradient, made, trained = digits.act, digits._gradient, {}, []

    def noting(stack, found, draws):
        actions = act(stack, found, draws)
        made[id(actions)] = actions, len(trained)  # held, so that no other has its id
        return actions

    def training(stack, loss, found, batch):
        trained.append((len(trained), made[id(batch)][1]))
        return gradient(stack, loss, found, batch)

    monkeypatch.setattr(digits, "act", noting)
    monkeypatch.setattr(digits, "_gradient", training)
    (row,) = digits.train([Cell("dg_kondo", 1e-3, 0)], delay, 8, dict.fromkeys(("train", "tune", "test"), images))
    assert trained == [(step, max(0, step - delay)) for step in range(8)]
    assert row["backward_share"] == pytest.approx(0.03)


def test_faults_of_actors_and_rewards():
    kept = [torch.full((3, 1), float(version)) for version in range(3)]
    assert picked(kept, torch.tensor([0, 1, 9]))[:, 0].tolist() == [2, 1, 0]

    def rolled(**frictions):
        task = Task(length=3, prompts=40)
        return task, roll_out(transformer([0], task.shape), task, Frictions(**frictions), Draws([0]))

    task, clean = rolled()
    rewards = task.rewards(clean.prompts, clean.answers)
    torch.testing.assert_close(clean.advantages, rewards - rewards.mean(-1, keepdim=True))
    _, broken = rolled(bug=0.3)
    hit = (broken.behaviour == 0).all(-1)
    assert 0.2 < hit.float().mean() < 0.4 and not broken.answers[hit].any()
    assert torch.equal(broken.answers[~hit], clean.answers[~hit])
    _, discovered = rolled(bug=1.0, discovery=0.3)
    found = (discovered.behaviour != 0).any(-1)
    assert 0.2 < found.float().mean() < 0.4
    assert (task.rewards(discovered.prompts, discovered.answers)[found] == 1).all()
    answers = torch.tensor([[[[1, 1, 0], [1, 1, 1]]]])
    assert Task(3, terminal=True).rewards(torch.tensor([[[0, 1, 1]]]), answers).tolist() == [[[1.0, 0.0]]]


def test_reversal_learns_and_does_not_depend_on_its_neighbours():
    learned = train([Cell("dg", 3e-3, seed) for seed in (0, 1)], Task(length=2), Frictions(staleness=1), 60)
    assert learned[0]["token_error"] < 0.1
    assert train([Cell("dg", 3e-3, 1)], Task(length=2), Frictions(staleness=1), 60)[0] == learned[1]


def test_gradients_of_the_single_arm_are_those_of_the_formula():
    now, later = single_arm.policy(0.3, 0), single_arm.policy(0.9, 0)
    rewards = torch.eye(10, dtype=torch.float64)[0] - 0.5
    expected = rewards[:, None] * (torch.eye(10, dtype=torch.float64) - now)
    torch.testing.assert_close(single_arm.gradients(reinforce, now, now), expected)
    gate = torch.sigmoid(-rewards * now.log())
    torch.testing.assert_close(single_arm.gradients(dg, now, now), gate[:, None] * expected)
    gated = partial(dg, gate_temperature=0.5)
    exactly, plain, sharper = (
        single_arm.moments(loss, later, single_arm.UNIFORM) for loss in (exact(reinforce), reinforce, gated)
    )
    assert exactly[1] == pytest.approx(1.0) and exactly[0] < plain[0] / 10 and sharper[0] < plain[0] / 1000
