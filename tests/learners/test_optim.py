"""MasterAdamW against torch's AdamW, and the invariant parameters == round(master)."""

import math

import pytest
import torch
from torch import nn

from learners import optim
from learners.collectives import Ranks
from learners.optim import MasterAdamW
from learners.schedules import Schedule
from tests.seeds import shifted, torch_seeded

KNOBS = {
    "ranks": Ranks(1),
    "schedule": Schedule(1e-2),
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "publish_dtype": torch.float32,
}


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shifted(5))
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 6, generator=torch_seeded(step))
    return (model(inputs) ** 2).sum() * 3


def half_loss(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 6, generator=torch_seeded(step)).bfloat16()
    return (model(inputs) ** 2).float().sum()


def take_steps(model: nn.Module, optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def test_equals_torch_adamw_with_clipping_warm_up_and_decay_of_matrices():
    ours, theirs, warmed = network(), network(), Schedule(1e-2, warmup_steps=4)
    optimizer = MasterAdamW(ours, **KNOBS | {"weight_decay": 0.1, "schedule": warmed, "clip_grad": 1.0})
    truth = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for step in range(8):
        take_steps(ours, optimizer, range(step, step + 1))
        truth.zero_grad()
        loss_of(theirs, step).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in truth.param_groups:
            group["lr"] = 1e-2 * min(1, (step + 1) / 4)
        truth.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_parameters_are_the_rounded_master_and_small_steps_add_up():
    """Steps of 1e-4 round away in bfloat16 near 1; on the master weights they add up to a visible one."""
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = MasterAdamW(model, **KNOBS | {"schedule": Schedule(1e-4), "publish_dtype": torch.bfloat16})
    seen = {model.weight[0, 0].item()}
    for _ in range(100):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, model.weight.bfloat16().float())
        seen.add(model.weight[0, 0].item())
    assert seen == {1.0, 0.99609375, 0.9921875, 0.98828125}


@pytest.mark.parametrize("at_once", [1, 40, optim.ADDED])
def test_gradients_in_half_precision_add_up_in_float32(monkeypatch, at_once):
    monkeypatch.setattr(optim, "ADDED", at_once)
    model = network()
    optimizer = MasterAdamW(model, **KNOBS | {"publish_dtype": torch.bfloat16}, hold_in=torch.bfloat16)
    optimizer.zero_grad()
    expected = torch.zeros_like(optimizer.gradient)
    for step in range(3):
        parts = torch.autograd.grad(half_loss(model, step), optimizer._parameters)
        expected += torch.cat([part.flatten() for part in parts]).float()
        half_loss(model, step).backward()
    assert torch.equal(optimizer.collect(), expected) and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(poison):
    model, undisturbed = network(), network()
    optimizer, other = MasterAdamW(model, **KNOBS), MasterAdamW(undisturbed, **KNOBS)
    take_steps(model, optimizer, range(2))
    optimizer.zero_grad()
    optimizer.gradient[3] = poison
    optimizer.step()
    assert optimizer.skipped_steps == 1
    take_steps(model, optimizer, range(2, 4))
    take_steps(undisturbed, other, range(4))
    for p, q in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_state_takes_no_memory_of_its_own_until_another_optimizer_loads_it():
    model, other = network(), network()
    optimizer, loaded = MasterAdamW(model, **KNOBS), MasterAdamW(other, **KNOBS)
    take_steps(model, optimizer, range(2))
    state = optimizer.state_dict()
    held = [optimizer._master, *(t for s in optimizer._adamw.state.values() for t in s.values())]
    found = [state["master"], *(t for s in state["adamw"] for t in s.values())]
    assert [t.data_ptr() for t in found] == [t.data_ptr() for t in held]
    before = [t.clone() for t in found]
    loaded.load_state_dict(state)
    take_steps(other, loaded, range(2, 4))
    assert all(map(torch.equal, found, before)), "the other's steps are its own"
    take_steps(model, optimizer, range(2, 4))
    assert torch.equal(loaded._master, optimizer._master)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4, 0, 0]),
        ("cosine", [1 / 3, 2 / 3, 1] + [(1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3)] + [0, 0]),
    ],
)
def test_a_rate_rises_over_the_warm_up_and_falls_to_the_end(name, shares):
    schedule = Schedule(0.5, name, warmup_steps=3, total_steps=6)
    assert [schedule.rate(step) for step in range(8)] == pytest.approx([0.5 * share for share in shares], abs=1e-12)
