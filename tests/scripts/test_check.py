"""`areal-like check`: shipped components keep their contracts, and each broken one is found."""

import random
import time
from typing import Any

import pytest
import torch

import areal_like as al
from actors.tools import Tools
from areal_like.config.registry import COMPONENTS, ConfigError
from areal_like.interfaces import Outcome
from learners.losses.contract import LossBatch, ratio, total
from scripts import check

HELP = {
    "exact": {"response": "42"},
    "unit_tests": {
        "answer": '{"function": "f", "cases": [[[1], 2]], "isolation": "weak"}',
        "response": "def f(x):\n    return x + 1",
    },
}
SERVERS = {"verifiers"}
SHIPPED = [(kind, name) for kind in check.CLAIMS for name in COMPONENTS[kind] if name not in SERVERS]


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_what_is_shipped_keeps_its_contract(kind: str, name: str) -> None:
    assert not [each for each in check.results(kind, {"name": name}, **HELP.get(name, {})) if each[1]]


# What is wrong with each is in its name


def mean_loss(batch: LossBatch, denominator: float):
    return -(batch.current * batch.advantages)[batch.mask].mean(), {}


def wrong_sign(batch: LossBatch, denominator: float):
    return -total(batch.current * batch.advantages, batch, denominator), {}


def trains_masked_tokens(batch: LossBatch, denominator: float):
    return -(batch.current * batch.advantages).sum() / denominator, {}


def without_clamp(batch: LossBatch, denominator: float):
    ratios = (batch.current - batch.behaviour).exp()
    return total(torch.where(batch.mask, ratios * batch.advantages, 0.0), batch, denominator), {}


def without_shares(batch: LossBatch, denominator: float):
    moved = ratio(batch.current, batch.behaviour, batch.mask) * batch.advantages
    return -torch.where(batch.mask, moved, 0.0).sum() / denominator, {}


def loss_that_draws(batch: LossBatch, denominator: float):
    return total(batch.current * batch.advantages * random.random(), batch, denominator), {}


def divides_by_zero(rewards, groups):
    return (rewards - rewards.mean()) / rewards.std()


def upside_down(rewards, groups):
    return -rewards


def not_a_number(answer, response):
    return 1.0 if response else float("nan")


def pays_for_nothing(answer, response):
    return 1.0


def looks_at_the_clock(answer, response):
    return time.perf_counter()


class Moody(Tools):
    async def step(self, action):
        return Outcome(str(random.random()), 0.0, False)


BROKEN = [
    (mean_loss, "loss", "the cut into micro-batches"),
    (wrong_sign, "loss", "better answers become more likely"),
    (trains_masked_tokens, "loss", "masked tokens change nothing"),
    (without_clamp, "loss", "far off-policy"),
    (without_shares, "loss", "weighed by shares"),
    (loss_that_draws, "loss", "the same bits"),
    (divides_by_zero, "advantage", "stay finite"),
    (upside_down, "advantage", "the better answer"),
    (not_a_number, "reward", "earns a finite number"),
    (pays_for_nothing, "reward", "more than an empty one"),
    (looks_at_the_clock, "reward", "twice the same"),
    (Moody, "environment", "the same outcomes"),
]


@pytest.mark.parametrize(("component", "kind", "claim"), BROKEN, ids=lambda each: getattr(each, "__name__", None))
def test_a_broken_component_is_found_out(component: Any, kind: str, claim: str) -> None:
    name = f"{component.__module__}:{component.__name__}"
    assert check.kind_of(name) == kind
    broken = [each for each, problem in check.results(kind, {"name": name}) if problem]
    assert any(claim in each for each in broken), broken


def good_loss(batch: LossBatch, denominator: float, *, power: float = 1.0):
    moved = ratio(batch.current, batch.behaviour, batch.mask)
    return total(moved * batch.advantages * power, batch, denominator), {"ratio": moved.detach()}


def with_a_positional_knob(batch: LossBatch, denominator: float, clip: float = 0.2):
    return total(batch.current, batch, denominator), {}


def test_exit_codes_of_the_command_and_a_test_of_the_users_own() -> None:
    assert check.main([f"{__name__}:good_loss", "power=2"]) == 0
    assert check.main([f"{__name__}:mean_loss"]) == 1
    for arguments in (
        [f"{__name__}:good_loss", "pwoer=2"],
        ["lsos"],
        ["nowhere:f"],
        [f"{__name__}:nothing"],
        [f"{__name__}:with_a_positional_knob"],
    ):
        with pytest.raises(SystemExit):
            check.main(arguments)
    assert len(al.check(f"{__name__}:good_loss", knobs={"power": 0.5})) == 6
    with pytest.raises(AssertionError, match="better answers become more likely"):
        al.check(f"{__name__}:wrong_sign")
    with pytest.raises(ConfigError):
        al.check(f"{__name__}:with_a_positional_knob")
