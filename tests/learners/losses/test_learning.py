"""Every loss improves a two-armed softmax bandit, on-policy."""

import pytest
import torch

from learners.losses.contract import LossBatch, is_supervised, with_plan
from tests.learners.losses.token_batches import LOSSES
from tests.seeds import torch_seeded

REWARDED = {name: loss for name, loss in LOSSES.items() if not is_supervised(loss)}


@pytest.mark.parametrize("loss", REWARDED.values(), ids=REWARDED)
def test_the_better_arm_wins(loss):
    """The right arm starts at probability .27; 100 steps of 64 pulls in groups of 8, advantage reward − group mean."""
    generator = torch_seeded(0)
    logits = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    group = torch.arange(64) // 8
    for _ in range(100):
        arms = torch.multinomial(logits.detach().softmax(0), 64, replacement=True, generator=generator)
        reward = arms.double()
        current = logits.log_softmax(0)[arms]
        known = current.detach().clone()
        batch = LossBatch(
            current=current,
            behaviour=known,
            proximal=known,
            advantages=reward - reward.view(8, 8).mean(1)[group],
            mask=torch.ones(64, dtype=torch.bool),
            sequence=torch.arange(64),
            staleness=torch.zeros(64, dtype=torch.int64),
            group=group,
            uniform=torch.rand(64, generator=generator, dtype=torch.float64),
        )
        value, _ = loss(with_plan(loss, batch), 64.0)
        (gradient,) = torch.autograd.grad(value, logits)
        logits.data -= 0.5 * gradient
    assert logits.detach().softmax(0)[1] > 0.8
