"""Scores against the gradients of real train steps, and against NumPy; scoring changes nothing else."""

from functools import partial

import numpy as np
import pytest
import torch

from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo, ppo
from learners.losses.corrections import capped, cispo, tis
from learners.losses.corrections import exact as product
from learners.losses.delightful import dg_kondo
from learners.losses.weighted import reinforce
from learners.scoring import ScoringLearner
from tests.learners.batches import make_batch, tiny_model
from tests.learners.exact import exact
from tests.learners.losses.token_batches import LOSSES
from tests.learners.test_learner import on_policy
from tests.learners.test_learner_losses import near_policy
from tests.rounding import assert_rounds_alike
from tests.seeds import seeded

ONE_STEP = {"num_minibatches": 1, "clip_grad": 0.0, "publish_dtype": "float32"}


def scorer(loss=ppo, **knobs) -> ScoringLearner:
    return ScoringLearner(tiny_model(), loss, partial(group), 1.0, 0, **ONE_STEP, **knobs)


def batch_near(learner, seed: int = 0):
    return near_policy(learner, make_batch(seeded(seed)))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_gradient_is_that_of_a_train_step_with_the_loss(loss, normalise: str = "sequence_mean") -> None:
    learner = scorer(normalise=normalise, micro_batch_tokens=20)
    batch = batch_near(learner)
    found = learner.score(batch, {"it": loss})["it"]
    trained = TorchLearner(tiny_model(), loss, partial(group), 1.0, 0, normalise=normalise, **ONE_STEP)
    trained.train(batch)
    truth = torch.cat([p.grad.flatten() for p in trained.model.parameters()])
    torch.testing.assert_close(found[""].gradient, truth, rtol=1e-4, atol=1e-6)
    parts = [score for bucket, score in found.items() if bucket]
    assert len(parts) > 1 and sum(score.tokens for score in parts) == found[""].tokens
    torch.testing.assert_close(sum(score.gradient for score in parts), found[""].gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "knobs", [{"compute_dtype": "bfloat16"}, {"checkpoint_activations": True, "max_logits": 40}], ids=str
)
def test_scores_are_computed_as_the_train_step_is(knobs) -> None:
    learner = scorer(**knobs)
    batch = batch_near(learner)
    gradient = learner.score(batch, {"it": reinforce})["it"][""].gradient
    found = []
    for model, more in ((tiny_model(), knobs), (exact(tiny_model()), {})):
        trained = TorchLearner(model, reinforce, partial(group), 1.0, 0, **ONE_STEP, **more)
        trained.train(batch)
        found.append(torch.cat([p.grad.flatten() for p in trained.model.parameters()]))
    assert_rounds_alike(gradient, *found)


def test_on_policy_the_ratio_losses_share_one_gradient() -> None:
    learner = scorer()
    batch = on_policy(learner, make_batch(seeded(1)))
    losses = {"reinforce": reinforce, "ppo": ppo, "decoupled": capped(decoupled_ppo)}
    losses |= {"tis": tis(reinforce), "cispo": cispo(reinforce), "is": product(reinforce)}
    scores = learner.score(batch, losses)
    for name in losses:
        assert cosine(scores[name][""].gradient, scores["reinforce"][""].gradient) == pytest.approx(1.0, abs=1e-5)
        assert scores[name][""].ess == pytest.approx(1.0, abs=1e-5)
        assert scores[name][""].weight == pytest.approx(1.0, abs=1e-5)


def test_ess_and_weight_are_those_of_the_importance_weights() -> None:
    learner = scorer()
    batch = batch_near(learner)
    ratios = []
    own = [sample.logprobs.copy() for sample in on_policy(learner, make_batch(seeded(0))).samples]
    advantages = group(np.array([s.reward for s in batch.samples]), np.repeat(np.arange(len(batch.groups)), 4))
    for sample, logprobs, advantage in zip(batch.samples, own, advantages, strict=True):
        if advantage:
            ratios.append(np.exp(logprobs - sample.logprobs)[sample.loss_mask])
    weights = np.concatenate(ratios).astype(np.float64)
    score = learner.score(batch, {"tis": tis(reinforce, weight_high=1e6)})["tis"][""]
    assert score.weight == pytest.approx(weights.mean(), rel=1e-4)
    assert score.ess == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()), rel=1e-4)
    assert 0.5 < score.ess < 0.99


def test_active_is_the_share_of_tokens_that_pull() -> None:
    learner = scorer()
    score = learner.score(batch_near(learner), {"kondo": partial(dg_kondo, keep=0.25)})["kondo"][""]
    assert score.active == pytest.approx(np.ceil(0.25 * score.tokens) / score.tokens, abs=1 / score.tokens)


def test_scoring_leaves_no_trace_in_training() -> None:
    dropping = capped(ppo, weight="none", high=1.01, rejected="drop")
    plain, scored = (scorer(capped(decoupled_ppo), lr=1e-2) for _ in range(2))
    for seed in range(3):
        batch = batch_near(plain, seed)
        scored.score(batch, {"ppo": ppo, "kondo": dg_kondo, "dropping": dropping})
        assert plain.train(batch) == scored.train(batch)
    assert plain.snapshot().digest() == scored.snapshot().digest()
