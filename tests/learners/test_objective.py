"""The terms around the policy loss, through real train steps: denominators, KL, length, the shape of rewards."""

from functools import partial

import numpy as np
import pytest
import torch

from areal_like.models.causal_lm import qwen2
from learners.advantages import Episodes, distill, group, per_token, reinforce_pp
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from learners.losses.contract import LossBatch
from learners.losses.weighted import reinforce
from learners.objective import effective_share, kl_estimate, overlong_penalty
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.learners.exact import exact
from tests.learners.test_learner import batches, on_policy
from tests.seeds import seeded


def learner_of(loss=ppo, advantage=group, **knobs) -> TorchLearner:
    return TorchLearner(exact(tiny_model()), loss, partial(advantage), 1.0, 0, **knobs)


def seen_by_advantage(batch, form=None, **knobs):
    """The input of the advantage in a train step: rewards [n], or with `per_token` the episodes; and the learner."""
    seen = []

    def of_samples(rewards, groups):
        seen.append(rewards)
        return group(rewards, groups)

    @per_token
    def of_tokens(episodes):
        seen.append(episodes)
        return reinforce_pp(episodes)

    learner = learner_of(advantage=of_tokens if form else of_samples, **knobs)
    learner.train(batch)
    return seen[0], learner


@pytest.mark.parametrize("normalise", ["token_mean", "sequence_mean", 50.0, 7])
def test_the_gradient_is_that_of_the_chosen_mean(normalise):
    """REINFORCE with an entropy bonus, sample by sample without packing."""
    learner = learner_of(reinforce, num_minibatches=1, entropy_bonus=0.3, clip_grad=0.0, normalise=normalise)
    batch = on_policy(learner, batches(1)[0])
    model = exact(tiny_model())
    model.load_state_dict(learner.model.state_dict())
    per_sequence, tokens = [], 0
    for g in batch.groups:
        baseline = np.mean([s.reward for s in g.samples])
        for s in g.samples:
            ids = torch.from_numpy(s.tokens.astype(np.int64))[None]
            logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
            terms = []
            for r in np.flatnonzero(s.loss_mask):
                row = logprobs[s.prompt_length + r - 1]
                chosen = row[ids[0, s.prompt_length + r]]
                terms.append((s.reward - baseline) * chosen - 0.3 * (row.exp() * row).sum())
            tokens += len(terms)
            total = torch.stack(terms).sum()
            per_sequence.append(total / len(terms) if normalise == "sequence_mean" else total)
    by = {"token_mean": tokens, "sequence_mean": len(per_sequence)}.get(normalise) or normalise * len(per_sequence)
    (-torch.stack(per_sequence).sum() / by).backward()
    metrics = learner.train(batch)
    for p, q in zip(learner.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert metrics["tokens"] == tokens and metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_at_the_start_the_kl_to_the_reference_is_nothing(estimator):
    """So the first gradient is the plain one, except for k1's, which is the score itself. The reference stays."""
    batch, knobs = on_policy(learner_of(), batches(1)[0]), {"num_minibatches": 1, "lr": 1e-2}
    plain, held = learner_of(**knobs), learner_of(**knobs, kl_loss=0.7, kl_loss_estimator=estimator)
    plain.train(batch)
    metrics = held.train(batch)
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    same = torch.allclose(held.optimizer.gradient, plain.optimizer.gradient, rtol=1e-3, atol=1e-5)
    assert same == (estimator != "k1")
    assert held.train(batch)["reference_kl"] > 1e-4


def test_a_weighted_kl_is_multiplied_by_the_importance_weight_and_its_gradient():
    current, behaviour, reference = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -1.5, -0.7))
    batch = LossBatch(current, behaviour, None, current, torch.ones(1, dtype=torch.bool), *[torch.zeros(1).long()] * 2)
    current.requires_grad_()
    loss, _ = learner_of(kl_loss=0.5, kl_loss_weighted=True).objective.with_terms(
        current.sum() * 0.0, current, torch.zeros(1), reference, batch, 2.0
    )
    (gradient,) = torch.autograd.grad(loss, current)
    weight, kl = np.exp(0.5), np.exp(0.3) - 1 - 0.3  # k3 = e^-d - 1 + d with d = -0.3, whose slope is 1 - e^-d
    assert loss.item() == pytest.approx(0.25 * weight * kl)
    assert gradient.item() == pytest.approx(0.25 * weight * (kl + 1 - np.exp(0.3)))


def test_the_kl_in_the_reward_is_taken_off_token_by_token_or_as_a_sum():
    batch, own = batches(1)[0], on_policy(learner_of(), batches(1)[0]).samples
    gaps = [(s.logprobs - r.logprobs)[s.loss_mask] for s, r in zip(batch.samples, own, strict=True)]
    episodes, _ = seen_by_advantage(batch, "tokens", kl_reward=0.2)
    np.testing.assert_allclose(episodes.penalties, 0.2 * np.concatenate(gaps), atol=1e-4)
    np.testing.assert_array_equal(episodes.rewards, [s.reward for s in batch.samples])
    rewards, _ = seen_by_advantage(batch, kl_reward=0.2)
    expected = [s.reward - 0.2 * gap.sum() for s, gap in zip(batch.samples, gaps, strict=True)]
    np.testing.assert_allclose(rewards, expected, atol=1e-3)


def test_rewards_pay_for_length_and_are_scaled_and_then_cut():
    batch = batches(1)[0]
    overlong = {"overlong_penalty": 2.0, "overlong_limit": 8, "overlong_buffer": 4}
    shaped, learner = seen_by_advantage(batch, reward_scale=4.0, reward_clip=2.5, **overlong)
    taken = [2 * max(0, (s.response_length - 4) / 4) for s in batch.samples]
    expected = [4.0 * (s.reward - less) for s, less in zip(batch.samples, taken, strict=True)]
    np.testing.assert_allclose(shaped, np.clip(expected, -2.5, 2.5))
    assert (np.abs(expected) > 2.5).any()
    found = [values for each in batch.groups for values in learner.numbers(each.id)]
    noted = [np.nansum(values["penalty/length"]) for values in found]
    np.testing.assert_allclose(noted, taken, err_msg="the length alone: scale and cut are no penalty")
    with pytest.raises(ValueError, match="overlong_buffer"):
        learner_of(overlong_penalty=1.0, overlong_limit=4, overlong_buffer=5)


@pytest.mark.parametrize("knobs", [{}, {"micro_batch_tokens": 9}], ids=["whole", "pieces"])
def test_cut_answers_that_are_left_out_have_no_gradient_and_count_for_their_groups_mean(knobs):
    """Masked by hand, with the advantages of all samples: the same step, for any cut into micro-batches."""
    batch, by_hand = batches(2)[0], batches(2)[0]
    for sample, masked in zip(batch.samples[::3], by_hand.samples[::3], strict=True):
        sample.finish, masked.loss_mask = "length", np.zeros_like(masked.loss_mask)
    filtered, plain = (learner_of(num_minibatches=1, **more) for more in ({"overlong_filter": True, **knobs}, {}))
    found, expected = filtered.train(batch), plain.train(by_hand)
    torch.testing.assert_close(filtered.optimizer.gradient, plain.optimizer.gradient)
    assert found["tokens"] == expected["tokens"] < learner_of().train(batch)["tokens"]
    assert batch.samples[0].loss_mask.any(), "the batch itself is not touched"


@pytest.mark.parametrize("knobs", [{}, {"micro_batch_tokens": 9}], ids=["whole", "pieces"])
def test_the_step_shrinks_with_the_effective_share_of_the_sequences(knobs):
    """In the first step AdamW moves the weights in proportion to the learning rate."""
    batch, usual = batches(1)[0], {"num_minibatches": 1, "publish_dtype": "float32", **knobs}
    batch.samples[0].loss_mask[:] = False  # it has no weight
    plain, scaled = learner_of(**usual), learner_of(ess_scale=True, **usual)
    begun = scaled.optimizer.state_dict()["master"].clone()
    found = {"plain": plain.train(batch), "scaled": scaled.train(batch)}
    moved = [
        sum(values["current"][s.loss_mask] - s.logprobs[s.loss_mask])
        for g in batch.groups
        for s, values in zip(g.samples, scaled.numbers(g.id), strict=True)
        if s.loss_mask.any()
    ]
    weights = np.exp(np.array(moved, np.float64))
    share = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert share < 0.9 and found["scaled"]["lr_scale"] == pytest.approx(share**0.5, rel=1e-5)
    assert "lr_scale" not in found["plain"] and found["plain"]["lr"] == found["scaled"]["lr"]
    steps = [each.optimizer.state_dict()["master"] - begun for each in (plain, scaled)]
    torch.testing.assert_close(steps[1], steps[0] * share**0.5, rtol=1e-3, atol=1e-7)
    assert effective_share(np.array([-1e3, -1e3])) == effective_share(np.zeros(0)) == 1.0
    assert effective_share(np.array([0.0, -1e4])) == 0.5


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_of_the_kl_and_their_gradients(estimator):
    """Means under the policy: k1 and k3 are unbiased; as losses k2 has the KL's gradient and k1 none."""
    logits = torch.tensor([0.3, -0.4, 1.0], dtype=torch.float64, requires_grad=True)
    reference, policy = torch.tensor([0.2, 0.3, 0.5]).double().log(), logits.log_softmax(0)
    kl = (policy.exp() * (policy - reference)).sum()
    (truth,) = torch.autograd.grad(kl, logits, retain_graph=True)
    found = kl_estimate(policy, reference, estimator)
    mean = (policy.detach().exp() * found).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    if estimator == "k2":
        torch.testing.assert_close(gradient, truth)
        torch.testing.assert_close(found, (policy - reference) ** 2 / 2)
    else:
        torch.testing.assert_close(mean, kl)
    if estimator == "k1":
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    if estimator == "k3":
        assert (found >= 0).all() and torch.cosine_similarity(gradient, truth, dim=0) > 0.5
    impossible = torch.meshgrid(*[torch.tensor([0.0, -torch.inf])] * 2, indexing="ij")
    assert torch.isfinite(kl_estimate(*impossible, estimator)).all()


def test_the_penalty_on_length_is_dapos_soft_punishment():
    lengths = np.array([1, 80, 81, 90, 99, 100, 150])
    truth = [0.0, 0.0, 0.05, 0.5, 0.95, 1.0, 1.0]
    np.testing.assert_allclose(overlong_penalty(lengths, limit=100, buffer=20), truth)
    np.testing.assert_array_equal(overlong_penalty(lengths, limit=100, buffer=0), [0, 0, 0, 0, 0, 1, 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model of another shape with the same tokens, in the bits that a learner publishes."""
    path = tmp_path_factory.mktemp("teacher")
    qwen2(5, VOCAB, hidden_size=16, num_hidden_layers=1, initializer_range=0.4).bfloat16().save_pretrained(path)
    return str(path)


def learner(folder: str, loss=reinforce, advantage=distill, temperature=1.0, **knobs) -> TorchLearner:
    usual = {"num_minibatches": 1, "clip_grad": 0.0, "publish_dtype": "float32", "teacher": {"path": folder}}
    return TorchLearner(tiny_model(), loss, advantage, temperature, 0, **usual | knobs)


def teacher_of(folder: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def rows_of(model, sample, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of all tokens [R, V] in the places of a response."""
    ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    return (model(input_ids=ids).logits[0, sample.prompt_length - 1 : -1] / temperature).log_softmax(-1)


def test_the_advantage_is_what_the_teacher_thinks_more_likely() -> None:
    rng = seeded(3)
    rewards, groups, sample = rng.random(4), np.array([0, 0, 1, 1]), np.array([0, 0, 1, 2, 2, 3])
    teacher, student = -rng.exponential(1, 6), -rng.exponential(1, 6)
    episodes = Episodes(rewards, groups, sample, np.zeros(6), teacher=teacher, student=student)
    np.testing.assert_allclose(distill(episodes), teacher - student)
    both = distill(episodes, reward=2.0, cut=0.3)
    np.testing.assert_allclose(
        both, np.clip(teacher - student, -0.3, 0.3) + 2 * group(rewards, groups)[sample], atol=1e-12
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_the_sampled_kl_is_that_of_a_plain_loop(folder: str, temperature: float) -> None:
    """Σ (log teacher − log student) ∇log student over trained tokens, written sample by sample."""
    made, batch = learner(folder, temperature=temperature), make_batch(seeded(0))
    model, taught, total, tokens, gap = tiny_model(), teacher_of(folder), torch.zeros(()), 0, 0.0
    model.load_state_dict(made.model.state_dict())
    for sample in batch.samples:
        chosen = torch.from_numpy(sample.tokens[sample.prompt_length :].astype(np.int64))[:, None]
        ours = rows_of(model, sample, temperature).gather(-1, chosen)[:, 0]
        with torch.no_grad():
            theirs = rows_of(taught, sample, temperature).gather(-1, chosen)[:, 0]
        mask = torch.from_numpy(sample.loss_mask)
        total = total + ((theirs - ours).detach() * ours)[mask].sum()
        moved = (theirs - ours).detach()[mask]
        gap, tokens = gap + (moved.exp() - 1 - moved).sum().item(), tokens + int(mask.sum())
    (-total / tokens).backward()
    metrics = made.train(batch)
    for p, q in zip(made.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=2e-5)
    assert metrics["teacher_kl"] == pytest.approx(gap / tokens, rel=1e-3)


def test_a_teacher_of_fewer_tokens_is_refused(tmp_path) -> None:
    qwen2(5, VOCAB - 1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"learner.teacher.path: got a model of 12 token ids"):
        learner(str(tmp_path))
