"""Corrections in a train step: what leaves the batch is as if it had not been there; configs say them."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from areal_like.config.registry import ConfigError, bind
from areal_like.config.run_config import load
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo, gspo
from learners.losses.corrections import Corrected, capped, ratio, tis
from learners.losses.delightful import dg_kondo
from learners.losses.trusted import dppo, m2po
from learners.losses.weighted import reinforce
from tests.learners.batches import make_batch, tiny_model
from tests.seeds import seeded

BOUND = 1.1


def learner_of(loss, **knobs) -> TorchLearner:
    knobs = {"num_minibatches": 1, "publish_dtype": "float32", "clip_grad": 0.0} | knobs
    return TorchLearner(tiny_model().double(), loss, partial(group), 1.0, 0, **knobs)


def logprobs(learner: TorchLearner, batch) -> np.ndarray:
    step = learner._begin(batch)
    found = np.empty(len(step.behaviour))
    for part, current in learner._passes.logprobs(step.columns, [np.arange(len(batch.samples))]):
        found[part.trained.numpy()] = current.numpy()
    return found


def stale_batch(learner: TorchLearner):
    """A batch whose ratios lie on both sides of the bound, and the same without the tokens above it."""
    batch, rng = make_batch(seeded(0), groups=4), seeded(1)
    current = np.split(logprobs(learner, batch), np.cumsum([s.loss_mask.sum() for s in batch.samples])[:-1])
    less = copy.deepcopy(batch)
    for sample, without, known in zip(batch.samples, less.samples, current, strict=True):
        moved = rng.normal(0, 0.2, len(known))
        for each in (sample, without):
            each.logprobs[each.loss_mask] = known - moved
        without.loss_mask[np.flatnonzero(sample.loss_mask)[np.exp(moved) > BOUND]] = False
    return batch, less


@pytest.mark.parametrize("normalise", ["token_mean", "sequence_mean", 16.0])
@pytest.mark.parametrize("loss", [reinforce, m2po, partial(dg_kondo, keep=0.5)], ids=["plain", "m2po", "kondo"])
def test_what_is_dropped_is_as_if_it_had_not_been_in_the_batch(loss, normalise):
    knobs = {"normalise": normalise, "entropy_bonus": 0.1, "kl_loss": 0.1, "micro_batch_tokens": 40}
    dropping = ratio(loss, weight="none", reject="ratio", high=BOUND, rejected="drop")
    learner, plain = learner_of(dropping, **knobs), learner_of(loss, **knobs)
    batch, less = stale_batch(learner)
    metrics, expected = learner.train(batch), plain.train(less)
    torch.testing.assert_close(learner.optimizer.gradient, plain.optimizer.gradient, rtol=1e-5, atol=1e-7)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert 0.1 < metrics["loss/masked_share"] < 0.9 and metrics["backward_share"] < 1


@pytest.mark.parametrize("rejected", ["mask", "drop"])
@pytest.mark.parametrize("loss", ["m2po", "dppo"])
def test_a_token_left_out_by_the_correction_or_the_loss_counts_once(loss, rejected):
    """m2po sees what the correction masks, not what it drops."""
    own = partial(m2po, threshold=0.01) if loss == "m2po" else partial(dppo, tv=0.01)
    learner = learner_of(
        ratio(own, weight="none", reject="ratio", high=BOUND, rejected=rejected), micro_batch_tokens=30
    )
    batch, _ = stale_batch(learner)
    current, behaviour = logprobs(learner, batch), np.concatenate([s.logprobs[s.loss_mask] for s in batch.samples])
    gains = learner._begin(batch).advantages.numpy()
    gone = np.exp(current - behaviour) > BOUND
    if loss == "m2po":
        seen = np.flatnonzero(~gone if rejected == "drop" else np.ones_like(gone))
        ranked = seen[np.argsort(squared := (current - behaviour)[seen] ** 2)]
        out = np.setdiff1d(seen, ranked[np.cumsum(np.sort(squared)) / np.arange(1, len(seen) + 1) <= 0.01])
    else:
        risen = np.exp(current) - np.exp(behaviour)
        out = np.flatnonzero(np.where(gains > 0, risen > 0.01, (gains < 0) & (risen < -0.01)))
    if rejected == "mask" or loss == "dppo":
        assert 0 < gone[out].sum() < len(out), "some are left out by both, some by the loss alone"
    gone[out] = True
    assert learner.train(batch)["loss/masked_share"] == pytest.approx(gone.mean(), rel=1e-9)


def test_what_is_masked_stays_in_the_denominator():
    rejecting = ratio(reinforce, weight="none", reject="ratio", high=BOUND)
    learner, plain = learner_of(rejecting), learner_of(reinforce)
    batch, less = stale_batch(learner)
    learner.train(batch), plain.train(less)
    tokens, kept = (sum(s.loss_mask.sum() for s in each.samples) for each in (batch, less))
    expected = plain.optimizer.gradient * (kept / tokens)
    torch.testing.assert_close(learner.optimizer.gradient, expected, rtol=1e-5, atol=1e-7)


def test_a_batch_of_which_nothing_is_left_has_no_gradient():
    nothing = ratio(reinforce, weight="none", reject="ratio", low=0.999, high=1.0, over="max", rejected="drop")
    learner = learner_of(nothing)
    batch = make_batch(seeded(3), groups=2)
    for sample in batch.samples:
        sample.logprobs[:] = -50.0
    metrics = learner.train(batch)
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0 and metrics["loss/masked_share"] == 1.0


@pytest.mark.parametrize(
    "loss",
    [
        capped(decoupled_ppo, self_normalise=True),
        capped(partial(gspo, proximal="recompute", clip=0.2), high=1.2, rejected="drop", over="max"),
    ],
    ids=["normalised", "dropping"],
)
def test_neither_micro_batches_nor_later_minibatches_change_what_is_planned(loss):
    """The proximal policy of the second minibatch is that before the first."""
    knobs = {"num_minibatches": 2, "lr": 1e-2}
    whole, pieces = learner_of(loss, **knobs), learner_of(loss, micro_batch_tokens=30, **knobs)
    batch, _ = stale_batch(whole)
    expected, metrics = whole.train(batch), pieces.train(batch)
    torch.testing.assert_close(pieces.optimizer.gradient, whole.optimizer.gradient, rtol=1e-5, atol=1e-7)
    names = ("loss", "loss/masked_share", "loss/behaviour_weight/mean", "loss/factor/ess", "chi2", "sequence/chi2")
    for name in (*names, "sequence/ess"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6), name


def test_the_effective_sample_size_behind_a_corrections_bounds_is_that_of_its_factors():
    correction = ratio(reinforce, weight_high=1.05, reject="ratio", low=0.9)
    learner = learner_of(correction, micro_batch_tokens=30)
    batch, _ = stale_batch(learner)
    known = logprobs(learner, batch)
    weight = np.exp(known - np.concatenate([s.logprobs[s.loss_mask] for s in batch.samples]))
    factor = np.where(weight < 0.9, 0.0, np.minimum(weight, 1.05))
    metrics = learner.train(batch)
    assert metrics["loss/factor/mean"] == pytest.approx(factor.mean(), rel=1e-6)
    assert metrics["loss/factor/ess"] == pytest.approx(factor.mean() ** 2 / (factor**2).mean(), rel=1e-6)
    assert not [name for name in metrics if "squared" in name]


# In configs

OF_PROXIMAL = ("behaviour_proximal", "token", "ratio", 5.0)


@pytest.mark.parametrize(
    ("argv", "loss", "links"),
    [
        ([], decoupled_ppo, [OF_PROXIMAL]),
        (["loss=decoupled_ppo", "loss.correction.high=2"], decoupled_ppo, [(*OF_PROXIMAL[:3], 2)]),
        (["loss=icepop", "loss.dual_clip=3"], decoupled_ppo, [OF_PROXIMAL]),
        (["loss=tis"], reinforce, [("behaviour_current", "token", "none", None)]),
        (["loss=is_pg", "loss.correction.weight=token"], reinforce, [("behaviour_current", "token", "none", None)]),
        (["loss={name: gspo, proximal: recompute, correction: icepop}"], gspo, [OF_PROXIMAL]),
        (
            ["loss={name: dg_kondo, correction: {reject: k3, high: 1, correction: tis}}"],
            dg_kondo,
            [("behaviour_current", "token", "k3", 1), ("behaviour_current", "token", "none", None)],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and isinstance(value[0], str) else "",
)  # fmt: skip
def test_a_config_says_any_correction_for_any_loss(argv, loss, links):
    bound = bind("loss", load(["quickstart", *argv]).loss)
    assert isinstance(bound, Corrected) and getattr(bound.loss, "func", bound.loss) is loss
    assert [(link.pair, link.weight, link.reject, link.high) for link in bound.links] == links


def test_a_loss_may_go_without_its_usual_correction():
    bound = bind("loss", load(["quickstart", "loss.correction=none"]).loss)
    assert bound.func is decoupled_ppo


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["loss=ppo", "loss.correction=tis"], "loss.correction.weight: the loss has the whole ratio"),
        (
            ["loss=decoupled_ppo", "loss.correction.pair=behaviour_current"],
            "loss.correction.pair: the loss has",
        ),
        (["loss=dg", "loss.correction={reject: k3}"], "loss.correction.high: reject=k3 needs a bound"),
        (["loss=dg", "loss.correction={over: max}"], "loss.correction.over: nothing is rejected"),
        (
            ["loss=dg", "loss.correction={correction: {name: ratio, low: 2}}"],
            "loss.correction.correction.low: nothing",
        ),
        (
            ["loss=dg", "loss.correction=tiss"],
            "correction.name: there is no correction 'tiss'. Did you mean 'tis'",
        ),
        (["loss=dg", "loss.correction=7"], "loss.correction: expected a name"),
        (["loss=tis", "loss.correction.weight_high=0.5"], "loss.correction.weight_high: must be at least 1"),
        (["algorithm=sft", "loss.correction=tis"], "loss.correction: demonstrations were sampled by no policy"),
        (["loss=tis", "loss.cap=3"], "Here that is loss.correction.weight_high, of loss=tis"),
        (
            ["loss=reinforce", "loss.correction={self_normalise: true}", "learner.stream=true"],
            "loss.correction.self_normalise: learner.stream takes gradients before",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_senseless_correction_is_refused_when_the_config_is_read(argv, told):
    with pytest.raises(ConfigError) as refused:
        load(["quickstart", "learner.num_minibatches=1", *argv])
    assert told in str(refused.value)


def test_an_interpolated_proximal_policy_is_the_corrections_as_well():
    bound = tis(partial(decoupled_ppo, proximal="interpolate"))
    assert not bound.needs_proximal and bound.links[0].pair == "behaviour_proximal"
