"""The digits bandit: who acts with which weights, and the reward of the true digit."""

import pytest
import torch

from scripts.claims import digits
from scripts.claims.digits import BATCH, SIZES, Images, act, columns, train
from scripts.claims.stacks import Stack, perceive, perceptron
from scripts.claims.studies import Cell
from scripts.claims.tokens import Draws


def images(count: int = 30) -> Images:
    generator = torch.Generator().manual_seed(0)
    return Images(torch.rand(64, count, generator=generator), torch.arange(count) % 10)


def test_actors_report_the_logprobs_of_what_they_did():
    stack = Stack(perceptron([0, 1], SIZES), torch.tensor([1e-3, 1e-3]))
    done = act(stack, images(), Draws([0, 1]))
    logprobs = perceive(stack.views(stack.flat), columns(images(), done.images)).log_softmax(1)
    assert done.actions.shape == (2, BATCH) and done.actions.unique().numel() == 10
    for place in range(BATCH):
        assert done.behaviour[1, place] == logprobs[1, done.actions[1, place], place]


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_a_batch_is_trained_exactly_so_many_steps_after_it_was_sampled(monkeypatch, delay):
    """The actor's weights are D steps old; before step D they are the first ones."""
    made, steps_when_trained = [], []

    def noting(stack, found, draws):
        made.append((stack.steps, act(stack, found, draws)))
        return made[-1][1]

    gradient = digits._gradient

    def trained(stack, parts, found, batch):
        (version,) = [version for version, actions in made if actions is batch]
        steps_when_trained.append((stack.steps, version))
        return gradient(stack, parts, found, batch)

    monkeypatch.setattr(digits, "act", noting)
    monkeypatch.setattr(digits, "_gradient", trained)
    train([Cell("dg", 1e-3, 0)], delay, 8, images(), {})
    assert steps_when_trained == [(step, max(0, step - delay)) for step in range(8)]


def test_positive_only_and_kondo_skip_samples():
    cells = [Cell("dg", 1e-3, 0), Cell("positive_only", 1e-3, 0), Cell("dg_kondo", 1e-3, 0)]
    everything, positive, kondo = (row["backward_share"] for row in train(cells, 0, 3, images(), {}))
    assert everything == pytest.approx(1.0)
    assert positive == pytest.approx(0.1, abs=0.08)
    assert kondo == pytest.approx(0.03)


def test_the_true_digits_are_no_error(monkeypatch):
    found = images()
    right = torch.nn.functional.one_hot(found.digits, 10).T * 1e3
    monkeypatch.setattr(digits, "perceive", lambda parameters, inputs: right.expand(len(inputs), -1, -1))
    numbers = train([Cell("dg", 1e-3, 0)], 0, 0, found, {"test": found})[0]
    assert numbers["test_error"] == numbers["test_sampled_error"] == 0.0


def test_the_images_are_split_without_overlap_and_with_equal_shares():
    pytest.importorskip("sklearn")
    parts = digits.load()
    assert {name: len(part.digits) for name, part in parts.items()} == {"train": 897, "tune": 450, "test": 450}
    for part in parts.values():
        assert part.pixels.shape == (64, len(part.digits)) and 0 <= part.pixels.min() < part.pixels.max() == 1
        assert part.digits.bincount().max() - part.digits.bincount().min() <= 0.02 * len(part.digits) + 1
    everything = torch.cat([part.pixels for part in parts.values()], 1)
    assert len(everything.unique(dim=1).T) == 1797
