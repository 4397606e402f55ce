"""A learner of two ranks is the learner of one: the same losses, metrics and weights, up to rounding."""

import numpy as np
import pytest
import torch

from areal_like.models import state_of
from learners.ranks import Ranks
from tests.learners.batches import tiny_model
from tests.learners.ranked import CASES, train, train_on


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return train_on(2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_losses_and_weights_of_one(two, name):
    one, first = train(CASES[name], 0, 1), two[0][name]
    tolerance = {"rtol": 0.05, "atol": 2e-2} if name == "bfloat16" else {"rtol": 2e-4, "atol": 1e-5}
    for alone, together, other in zip(one["rows"], first["rows"], two[1][name]["rows"], strict=True):
        assert together == other, "ranks report the same"
        assert alone.keys() == together.keys()
        for key, value in alone.items():
            if isinstance(value, dict):
                assert together[key] == value, key
            else:
                np.testing.assert_allclose(together[key], value, err_msg=key, **tolerance)
    alone, together = (each["weights"].view(torch.float32) for each in (one, first))
    torch.testing.assert_close(together, alone, **tolerance)
    torch.testing.assert_close(first["adapters"], one["adapters"], **tolerance)
    assert bool(one["adapters"]) is ("lora" in CASES[name].knobs)
    start = torch.from_numpy(state_of(tiny_model(CASES[name].model), "float32").buffer).view(torch.float32)
    assert (alone - start).abs().max() > 1e-2, "training has moved the weights"


def test_each_rank_holds_about_half_of_the_optimizer(two):
    whole = train(CASES["plain"], 0, 1)["held"]
    parts = [rank["plain"]["held"] for rank in two]
    assert sum(parts) == pytest.approx(whole, abs=4) and max(parts) < 0.6 * whole


def test_ranks_that_have_not_met_are_refused():
    with pytest.raises(ValueError, match=r"learner.ranks is 2, but 1 processes"):
        Ranks(2)
