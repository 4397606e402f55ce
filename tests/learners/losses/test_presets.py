"""`algorithm=grpo` and its relatives against the papers' own formulas, in plain loops over float64, value and gradient.

The loss goes the learner's whole way: preset file, advantages, shares, denominator, loss function, KL term."""

from pathlib import Path

import numpy as np
import pytest
import torch

from areal_like.config.run_config import load
from areal_like.types import Batch
from learners.build import build_trainer
from tests.learners.batches import make_batch
from tests.seeds import seeded

RESPONSE_LIMIT = 8
"""Of configs/quickstart.yaml: the constant of Dr. GRPO."""


def advantages(rewards: list[float], std: bool) -> np.ndarray:
    """The advantages of one group, as all four papers define them, with or without the deviation."""
    centred = np.array(rewards) - np.mean(rewards)
    spread = np.std(rewards)
    return centred / (spread + 1e-6) if std and spread else centred


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def k3(current: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """GRPO, equation 4: π_ref/π − log(π_ref/π) − 1."""
    return np.exp(reference - current) - (reference - current) - 1


def paper(name: str, groups: list[list[dict]]) -> float:
    """The objective of a batch, to be maximised. An answer is {reward, current, behaviour, reference}, lists of log
    probabilities of its trained tokens."""
    answers = sum(len(group) for group in groups)
    tokens = sum(len(answer["current"]) for group in groups for answer in group)
    total = 0.0
    for group in groups:
        scaled = advantages([answer["reward"] for answer in group], std=name != "dr_grpo")
        for answer, advantage in zip(group, scaled, strict=True):
            now, then = answer["current"], answer["behaviour"]
            ratios = np.exp(now - then)
            match name:
                case "grpo":  # equation 3: a mean over each answer, then over answers
                    terms = np.array([clipped(r, advantage, 0.2, 0.2) for r in ratios])
                    terms -= 0.04 * k3(now, answer["reference"])
                    total += sum(terms) / len(terms) / answers
                case "dapo":  # equation 8: a mean over all tokens
                    total += sum(clipped(r, advantage, 0.2, 0.28) for r in ratios) / tokens
                case "dr_grpo":  # a sum over each answer, by a constant
                    total += sum(clipped(r, advantage, 0.2, 0.2) for r in ratios) / RESPONSE_LIMIT / answers
                case "gspo":  # equations 5 and 7: one ratio per answer
                    ratio = np.exp(np.mean(now - then))
                    total += clipped(ratio, advantage, 3e-4, 4e-4) / answers
    return total


def trainer_of(name: str):
    """A trainer as `algorithm=NAME` builds it, with one minibatch and no other term."""
    knobs = ["learner.num_minibatches=1", "learner.entropy_bonus=0", "model.initializer_range=0.3"]
    return build_trainer(load(["quickstart", f"algorithm={name}", *knobs]))


def as_answers(step, batch: Batch, current: np.ndarray, reference: np.ndarray) -> list[list[dict]]:
    behaviour, sample = step.behaviour.double().numpy(), step.sample.numpy()
    found, place = [], 0
    for group in batch.groups:
        members = []
        for answer in group.samples:
            own = sample == place
            logprobs = {"current": current[own], "behaviour": behaviour[own], "reference": reference[own]}
            members.append({"reward": answer.reward, **logprobs})
            place += 1
        found.append(members)
    return found


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_value_and_gradient_are_the_papers(name: str) -> None:
    trainer, batch = trainer_of(name), make_batch(seeded(1), groups=4, version=0)
    for sample in batch.groups[0].samples:
        sample.reward = 0.5  # a group that teaches nothing
    step = trainer._begin(batch)
    rng, count = seeded(2), len(step.behaviour)
    behaviour = step.behaviour.double().numpy()
    current = behaviour + rng.normal(0, 0.3, count)
    reference = behaviour + rng.normal(0, 0.3, count)
    step.behaviour = step.behaviour.double()
    step.advantages = step.advantages.double()
    leaf = torch.tensor(current, requires_grad=True)
    by = trainer.objective.denominator(step.columns, np.arange(len(batch.samples)))
    places = torch.arange(count)
    micro = step.loss_batch(places, leaf, step.sample, with_proximal=False)
    loss, _ = trainer._loss(micro, by)
    known = torch.tensor(reference) if trainer.objective.needs_reference else None
    loss, _ = trainer.objective.with_terms(loss, leaf, torch.zeros(count), known, micro.share, by)

    def truth(at: np.ndarray) -> float:
        return -paper(name, as_answers(step, batch, at, reference))

    assert loss.item() == pytest.approx(truth(current), rel=1e-5, abs=1e-7)
    (gradient,) = torch.autograd.grad(loss, leaf)
    nudges = np.eye(count) * 1e-6
    expected = [(truth(current + nudge) - truth(current - nudge)) / 2e-6 for nudge in nudges]
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-4, atol=1e-7)
    assert np.count_nonzero(expected) > 5


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_a_train_step_has_the_papers_loss(name: str) -> None:
    trainer, batch = trainer_of(name), make_batch(seeded(3), groups=4, version=0)
    step = trainer._begin(batch)
    for part, logprobs in trainer._passes.logprobs(step.columns, [np.arange(len(batch.samples))]):
        step.proximal[part.trained] = logprobs
    current = step.proximal.double().numpy()  # and the reference's: the run begins here
    for number, sample in enumerate(batch.samples):
        own = current[step.sample.numpy() == number]
        sample.logprobs[sample.loss_mask] = own + 0.3 * (-1) ** number
    expected = -paper(name, as_answers(trainer._begin(batch), batch, current, current))
    assert trainer.train(batch)["loss"] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_preset_leaves_nothing_of_the_recipe_that_it_is_used_with(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "extends: quickstart\nloss: {name: ppo, clip_high: 0.5, dual_clip: 3}\n"
        "advantage: {name: batch}\nlearner: {kl_reward: 0.1, kl_loss: 1.0, normalise: 7}\n"
    )
    for name, kl, normalise in (("grpo", 0.04, "sequence_mean"), ("dr_grpo", 0, "response_limit")):
        config = load([str(recipe), f"algorithm={name}"])
        assert config.loss == {"name": "ppo", "clip": 0.2, "clip_high": None, "dual_clip": None}
        assert config.advantage == {"name": "group", "std": name == "grpo"}
        learner = config.learner
        assert (learner["kl_loss"], learner["kl_reward"], learner["normalise"]) == (kl, 0, normalise)
    assert load([str(recipe), "algorithm=dapo"]).filter["name"] == "zero_variance"
    assert load([str(recipe), "algorithm=grpo", "learner.kl_loss=0"]).learner["kl_loss"] == 0, (
        "what is said goes before"
    )
