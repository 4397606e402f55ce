"""The terms around the policy loss, through real train steps: denominators, KL, length, critic."""

from functools import partial

import numpy as np
import pytest
import torch

from learners.advantages import Episodes, gae, group, per_token, reinforce_pp
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo, ppo
from learners.losses.targets import tpo
from learners.losses.weighted import reinforce
from tests.learners.batches import make_batch, tiny_model
from tests.learners.test_learner import batches, on_policy
from tests.seeds import seeded


def learner_of(loss=ppo, advantage=group, **knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), loss, partial(advantage), 1.0, 0, **knobs)


@pytest.mark.parametrize("normalise", ["token_mean", "sequence_mean", 50.0, 7])
def test_the_gradient_is_that_of_the_chosen_mean(normalise):
    """REINFORCE with an entropy bonus, sample by sample without packing."""
    learner = learner_of(reinforce, num_minibatches=1, entropy_bonus=0.3, clip_grad=0.0, normalise=normalise)
    batch = on_policy(learner, batches(1)[0])
    model = tiny_model()
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
    learner.train(batch)
    for p, q in zip(learner.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_at_the_start_the_kl_to_the_reference_is_nothing(estimator):
    """So the first gradient is the plain one, except for k1's, which is the score itself."""
    batch = on_policy(learner_of(), batches(1)[0])
    knobs = {"num_minibatches": 1}
    plain = learner_of(**knobs)
    held = learner_of(**knobs, kl_loss=0.7, kl_loss_estimator=estimator)
    plain.train(batch)
    metrics = held.train(batch)
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    same = torch.allclose(held.optimizer.gradient, plain.optimizer.gradient, rtol=1e-3, atol=1e-5)
    assert same == (estimator != "k1")


@pytest.mark.slow
def test_a_strong_kl_in_the_loss_holds_the_policy_at_its_start():
    """Ten steps towards a reward, with and without the KL; the reference does not change."""
    free, held = learner_of(lr=1e-2), learner_of(lr=1e-2, kl_loss=5.0)
    start = held.snapshot().digest()
    for batch in batches(10):
        loose, tight = free.train(on_policy(free, batch)), held.train(on_policy(held, batch))
    assert loose.get("reference_kl") is None
    probe = learner_of(kl_loss=1e-9)
    probe.model.load_state_dict(free.model.state_dict())
    far = probe.train(on_policy(probe, batch))["reference_kl"]
    assert tight["reference_kl"] < far / 3 and held.snapshot().digest() != start


def test_the_kl_in_the_reward_is_taken_off_token_by_token():
    seen: list[Episodes] = []

    @per_token
    def spy(episodes):
        seen.append(episodes)
        return reinforce_pp(episodes)

    learner, batch = learner_of(advantage=spy, kl_reward=0.2), batches(1)[0]
    reference = np.concatenate([s.logprobs[s.loss_mask] for s in on_policy(learner, batches(1)[0]).samples])
    behaviour = np.concatenate([s.logprobs[s.loss_mask] for s in batch.samples])
    learner.train(batch)
    np.testing.assert_allclose(seen[0].penalties, 0.2 * (behaviour - reference), atol=1e-4)
    np.testing.assert_array_equal(seen[0].rewards, [s.reward for s in batch.samples])


def test_advantages_per_sample_see_the_kl_as_a_sum():
    seen = []

    def spy(rewards, groups):
        seen.append(rewards)
        return group(rewards, groups)

    learner, batch = learner_of(advantage=spy, kl_reward=0.2), batches(1)[0]
    reference = [s.logprobs[s.loss_mask] for s in on_policy(learner, batches(1)[0]).samples]
    learner.train(batch)
    expected = [
        s.reward - 0.2 * (s.logprobs[s.loss_mask] - r).sum() for s, r in zip(batch.samples, reference, strict=True)
    ]
    np.testing.assert_allclose(seen[0], expected, atol=1e-3)


def test_long_answers_pay():
    seen = []

    def spy(rewards, groups):
        seen.append(rewards)
        return group(rewards, groups)

    learner = learner_of(advantage=spy, overlong_penalty=2.0, overlong_limit=8, overlong_buffer=4)
    batch = batches(1)[0]
    learner.train(batch)
    expected = [s.reward - 2.0 * max(0.0, (s.response_length - 4) / 4) for s in batch.samples]
    np.testing.assert_allclose(seen[0], expected)


@pytest.mark.parametrize(
    "knobs",
    [
        {"normalise": "sum"},
        {"normalise": 0.0},
        {"kl_loss_estimator": "k4"},
        {"overlong_penalty": 1.0},
        {"overlong_penalty": 1.0, "overlong_limit": 4, "overlong_buffer": 5},
    ],
)
def test_senseless_knobs_are_refused(knobs):
    with pytest.raises(ValueError, match=r"normalise|estimator|overlong"):
        learner_of(**knobs)


# The critic


@pytest.mark.slow
def test_the_critic_learns_what_a_prompt_is_worth():
    """Reward 1 for prompts that start with token 1, 0 for those with token 2: the value's error falls."""
    learner = learner_of(decoupled_ppo, gae, critic_lr=0.02, critic_trunk=1.0, lr=2e-3)
    errors = []
    for i in range(25):
        batch = make_batch(seeded(i), index=i, groups=8, size=4, max_response=3)
        for g in batch.groups:
            for sample in g.samples:
                sample.tokens[: sample.prompt_length] = 1 + g.id % 2
                sample.reward = float(g.id % 2 == 0)
        errors.append(learner.train(on_policy(learner, batch))["value_error"])
    assert errors[0] == pytest.approx(0.5, abs=0.15)  # of a head at 0
    assert np.mean(errors[-5:]) < 0.1


def test_a_critic_that_is_kept_out_of_the_trunk_does_not_move_the_policy():
    plain, with_critic = learner_of(), learner_of(critic_lr=0.1)
    for batch in batches(2):
        plain.train(batch)
        with_critic.train(batch)
    assert with_critic.snapshot().digest() == plain.snapshot().digest()


@pytest.mark.parametrize("loss", [decoupled_ppo, tpo], ids=["proximal", "plan"])
def test_a_critics_pass_gives_the_logprobs_at_the_start_as_well(loss):
    """The batch goes through the model once without gradient; with a plan, later minibatches do so again."""
    learner = learner_of(loss, gae, critic_lr=0.1, num_minibatches=2, lr=1e-2)
    batch = on_policy(learner, batches(1)[0])
    forwards = []
    embedding = learner.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    learner.train(batch)
    assert forwards == ([False, True, False, True] if loss is tpo else [False, True, True])
    step = learner._step
    torch.testing.assert_close(step.proximal, step.behaviour, rtol=1e-4, atol=1e-4)


def test_the_critic_is_part_of_the_checkpoint_and_not_of_the_weights(tmp_path):
    learner, restored = (learner_of(ppo, gae, critic_lr=0.1) for _ in range(2))
    first, second = batches(2)
    learner.train(first)
    learner.save_state(tmp_path)
    restored.load_state(tmp_path)
    assert restored.train(second) == learner.train(second)
    assert [s.name for s in learner.snapshot().specs] == [s.name for s in learner_of().snapshot().specs]


def test_gae_without_a_critic_is_refused():
    with pytest.raises(ValueError, match="critic_lr"):
        learner_of(ppo, gae)
