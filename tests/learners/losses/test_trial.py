"""Trying a loss before a run: every shipped loss passes, and one that can't be trained with is refused by name."""

from bdb import BdbQuit

import pytest
import torch
import yaml

from areal_like.config.layers import CONFIGS
from areal_like.config.registry import COMPONENTS, bind
from areal_like.run.process import explain
from learners.losses.clipped import ppo
from learners.losses.contract import total
from learners.losses.trial import BadLoss, try_loss
from tests.learners.losses.token_batches import LOSSES


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_passes(name: str) -> None:
    try_loss(LOSSES[name], name)


SPECS = {name: {"name": name} for name in COMPONENTS["loss"]}
SPECS |= {path.stem: yaml.safe_load(path.read_text())["loss"] for path in (CONFIGS / "loss").glob("*.yaml")}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_loss_passes_as_it_is_shipped(spec) -> None:
    try_loss(bind("loss", spec), spec["name"])


def detached(batch, denominator):
    return total(batch.current.detach() * batch.advantages, batch, denominator), {}


def of_something_else(batch, denominator):
    weight = torch.ones(2, dtype=batch.current.dtype, requires_grad=True)
    return total(weight * batch.advantages, batch, denominator), {}


def constant(batch, denominator):
    return (batch.current * 0.0).sum(), {}


def without_a_number(batch, denominator):
    return total(batch.current * float("nan"), batch, denominator), {}


def steep(batch, denominator):
    return (batch.current - batch.current.detach()).abs().sqrt().sum(), {}


def per_token(batch, denominator):
    return batch.current * batch.advantages, {}


def alone(batch, denominator):
    return total(batch.current * batch.advantages, batch, denominator)


def observing_a_mean(batch, denominator):
    return ppo(batch, denominator)[0], {"ratio": torch.ones(())}


def raising(batch, denominator):
    return batch.advantage, {}


def test_a_debugger_that_is_quit_says_so() -> None:
    """In a process of its own it quits at once, as there is no terminal."""

    def stops(batch, denominator):
        raise BdbQuit

    with pytest.raises(BdbQuit) as found:
        try_loss(stops, "mine:loss")
    assert "launcher=inline" in explain(found.value)[0]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (detached, "gives no gradient to batch.current"),
        (of_something_else, "gives no gradient to batch.current"),
        (constant, "gives no gradient to batch.current"),
        (without_a_number, "is nan on a batch"),
        (steep, "has the gradient"),
        (per_token, r"a tensor of shape \[2\]: it must be a tensor without axes"),
        (alone, r"it must be \(loss, observed\)"),
        (observing_a_mean, r"'ratio' must be a tensor with one number per token, got a tensor of shape \[\]"),
        (raising, "AttributeError"),
    ],
)
def test_what_nobody_could_train_with_is_refused_with_its_name(loss, words: str) -> None:
    with pytest.raises(BadLoss, match=f"loss mine:loss.*{words}"):
        try_loss(loss, "mine:loss")
