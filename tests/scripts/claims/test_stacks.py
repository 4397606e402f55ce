"""Many learners in one tensor compute what each would compute alone: Adam, the cached transformer, the losses."""

from functools import partial

import pytest
import torch

from learners.losses.contract import with_plan
from scripts.claims.algorithms import ALGORITHMS, Algorithm, loss_of
from scripts.claims.stacks import Shape, Stack, perceive, perceptron, transformer
from scripts.claims.tokens import answer, score

SHAPE = Shape(vocabulary=3, positions=8, layers=2, heads=2, width=8, hidden=12)


def test_adam_is_that_of_torch_with_a_rate_for_each_learner():
    start, rates = perceptron([0, 1], (3, 4)), torch.tensor([1e-2, 1e-3])
    stack = Stack(start, rates)
    alone = [row.clone().requires_grad_() for row in stack.flat]
    optimizers = [torch.optim.Adam([row], lr=float(rate)) for row, rate in zip(alone, rates, strict=True)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        gradient = torch.randn(stack.flat.shape, generator=generator)
        stack.step(gradient)
        for row, optimizer, own in zip(alone, optimizers, gradient, strict=True):
            row.grad = own.clone()
            optimizer.step()
    torch.testing.assert_close(stack.flat, torch.stack(alone).detach())


def test_the_perceptron_is_that_of_torch():
    start = perceptron([3], (5, 4, 2))
    inputs = torch.randn(7, 5)
    hidden = torch.relu(inputs @ start["w0"][0] + start["b0"][0])
    torch.testing.assert_close(perceive(start, inputs.T[None])[0].T, hidden @ start["w1"][0] + start["b1"][0])


def sampled(seeds: list[int]):
    parameters = transformer(seeds, SHAPE)
    parameters["head"] *= 10  # far from uniform
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 3, (1, 2, 4), generator=generator).expand(len(seeds), -1, -1)
    uniform = torch.rand(1, 2, 3, 4, generator=generator).expand(len(seeds), -1, -1, -1)
    return parameters, prompts, *answer(parameters, SHAPE, prompts, uniform)


def test_logprobs_while_sampling_are_those_of_the_whole_answers():
    parameters, prompts, answers, logprobs = sampled([0, 1])
    assert len(answers.flatten(0, -2).unique(dim=0)) > 2
    torch.testing.assert_close(score(parameters, SHAPE, prompts, answers), logprobs)


def test_attention_is_causal_and_samples_do_not_see_each_other():
    parameters, prompts, answers, _ = sampled([0])
    before = score(parameters, SHAPE, prompts, answers)
    changed = answers.clone()
    changed[0, 1, 2, 2] = (changed[0, 1, 2, 2] + 1) % 3
    moved = ~torch.isclose(score(parameters, SHAPE, prompts, changed), before, atol=1e-6)
    expected = torch.zeros_like(moved)
    expected[0, 1, 2, 2:] = True
    assert torch.equal(moved, expected)


def test_a_learner_in_a_stack_is_the_one_that_stands_alone():
    _, _, answers, logprobs = sampled([0, 1])
    for row, seed in enumerate([0, 1]):
        _, _, own, own_logprobs = sampled([seed])
        assert torch.equal(own[0], answers[row])
        torch.testing.assert_close(own_logprobs[0], logprobs[row])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_loss_of_a_stack_has_each_learners_own_gradient(name):
    generator = torch.Generator().manual_seed(0)
    current = (torch.rand(3, 4, 2, 5, generator=generator) - 2).requires_grad_()
    behaviour = current.detach() + 0.5 * torch.randn(current.shape, generator=generator)
    advantages = torch.randn(3, 4, 2, generator=generator)
    (stacked,) = torch.autograd.grad(loss_of(ALGORITHMS[name], current, behaviour, advantages, 40.0), current)
    assert stacked.abs().sum() > 0
    for row in range(3):
        own = current.detach()[row : row + 1].requires_grad_()
        rows = slice(row, row + 1)
        loss = loss_of(ALGORITHMS[name], own, behaviour[rows], advantages[rows], 40.0)
        torch.testing.assert_close(torch.autograd.grad(loss, own)[0][0], stacked[row])


def test_losses_that_are_said_to_be_idle_at_zero_are():
    current = torch.full((1, 4, 2, 5), -1.0).requires_grad_()
    other, nothing = torch.randn(current.shape) - 2.0, torch.zeros(1, 4, 2)
    for name, algorithm in ALGORITHMS.items():
        for when, behaviour in (("always", other), ("on_policy", current.detach())):
            (gradient,) = torch.autograd.grad(loss_of(algorithm, current, behaviour, nothing, 40.0), current)
            idle = algorithm.idle in ("always", when)
            assert gradient.abs().max() < 1e-7 if idle else gradient.any(), (name, when)


def test_the_learners_loss_is_given_what_it_asks_for():
    seen = []

    def loss(batch, denominator):
        seen.append((batch, denominator))
        return with_plan(loss, batch).current.sum(), {}

    current = torch.zeros(1, 2, 2, 3, requires_grad=True)
    loss_of(Algorithm(partial(loss)), current, current.detach(), torch.tensor([[[1.0, -1.0], [0.5, 0.0]]]), 12.0)
    ((batch, denominator),) = seen
    assert denominator == 12.0 and batch.mask.all()
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert batch.group.tolist() == [0] * 6 + [1] * 6
    assert batch.advantages.tolist() == [1.0] * 3 + [-1.0] * 3 + [0.5] * 3 + [0.0] * 3
