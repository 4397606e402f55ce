"""Cut answers and shaped rewards, through real train steps, against loops over samples."""

from functools import partial

import numpy as np
import pytest
import torch

from learners.advantages import gae, group, per_token, reinforce_pp
from learners.critic import one_token_further
from learners.learner import TorchLearner
from learners.losses.clipped import ppo
from learners.losses.weighted import reinforce
from tests.learners.batches import tiny_model
from tests.learners.exact import exact
from tests.learners.test_learner import batches, on_policy


def learner_of(loss=ppo, advantage=group, **knobs) -> TorchLearner:
    return TorchLearner(exact(tiny_model()), loss, partial(advantage), 1.0, 0, **knobs)


def with_cut_answers(count: int = 1) -> list:
    """Every third sample was cut."""
    made = batches(count)
    for batch in made:
        for sample in batch.samples[::3]:
            sample.finish = "length"
    return made


def seen_by_advantage(**knobs) -> list[np.ndarray]:
    """The rewards of a batch's samples, and the advantage's input for them."""
    seen = []

    def spy(rewards, groups):
        seen.append(rewards)
        return group(rewards, groups)

    batch = with_cut_answers()[0]
    learner_of(advantage=spy, **knobs).train(batch)
    return [np.array([s.reward for s in batch.samples]), *seen]


# Overlong filtering


@pytest.mark.parametrize("knobs", [{}, {"micro_batch_tokens": 9}], ids=["whole", "pieces"])
def test_cut_answers_have_no_gradient_and_count_for_their_groups_mean(knobs):
    """Masked by hand, with the advantages of all samples: the same step, for any cut into micro-batches."""
    batch, by_hand = with_cut_answers()[0], with_cut_answers()[0]
    for sample in by_hand.samples[::3]:
        sample.loss_mask = np.zeros_like(sample.loss_mask)
    filtered, plain = (learner_of(num_minibatches=1, **more) for more in ({"overlong_filter": True, **knobs}, {}))
    found, expected = filtered.train(batch), plain.train(by_hand)
    torch.testing.assert_close(filtered.optimizer.gradient, plain.optimizer.gradient)
    assert found["tokens"] == expected["tokens"] < learner_of().train(batch)["tokens"]
    assert batch.samples[0].loss_mask.any(), "the batch itself is not touched"


def test_a_batch_of_cut_answers_alone_changes_nothing():
    learner, batch = learner_of(overlong_filter=True), batches(1)[0]
    for sample in batch.samples:
        sample.finish = "length"
    before = learner.snapshot().digest()
    assert learner.train(batch)["tokens"] == 0 and learner.snapshot().digest() == before


# Values behind cut answers


@pytest.mark.parametrize("knobs", [{}, {"micro_batch_tokens": 9}], ids=["whole", "pieces"])
def test_the_value_behind_a_cut_answer_is_that_of_the_state_after_its_last_token(knobs):
    seen = []

    @per_token
    def spy(episodes, *, bootstrap):
        seen.append(episodes)
        return gae(episodes, gamma=0.9, lam=0.8, bootstrap=bootstrap)

    batch = with_cut_answers()[0]
    learner = learner_of(advantage=partial(spy, bootstrap=True), critic_lr=0.1, num_minibatches=1, **knobs)
    head = learner._critic._head
    torch.nn.init.normal_(head.weight)
    weight, model = head.weight[0].detach().clone(), exact(tiny_model())
    model.load_state_dict(learner.model.state_dict())
    learner.train(on_policy(learner, batch))
    expected, behind = [], np.zeros(len(batch.samples))
    for i, s in enumerate(batch.samples):
        with torch.no_grad():
            ids = torch.from_numpy(s.tokens.astype(np.int64))[None]
            states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        values = (states @ weight).numpy()
        if s.finish == "length":
            behind[i] = values[-1]
        v = values[s.prompt_length - 1 : -1][s.loss_mask]
        r = np.zeros(len(v))
        r[-1] = s.reward
        delta = [r[t] + 0.9 * (v[t + 1] if t + 1 < len(v) else behind[i]) - v[t] for t in range(len(v))]
        expected += [sum(0.72**k * d for k, d in enumerate(delta[t:])) for t in range(len(v))]
    np.testing.assert_allclose(seen[0].behind, behind, atol=1e-5)
    np.testing.assert_allclose(learner._step.advantages, expected, atol=1e-5)
    assert (behind[::3] != 0).all() and not np.delete(behind, np.s_[::3]).any()
    torch.testing.assert_close(learner._step.proximal, learner._step.behaviour, atol=1e-5, rtol=1e-5)


def test_a_cut_answer_without_a_trained_token_gets_none():
    batch = with_cut_answers()[0]
    batch.samples[0].loss_mask = np.zeros_like(batch.samples[0].loss_mask)
    further, behind = one_token_further(batch)
    longer = [a.response_length - b.response_length for a, b in zip(further.samples, batch.samples, strict=True)]
    assert longer == [int(i % 3 == 0 and i > 0) for i in range(len(longer))] and behind.sum() == sum(longer)


# Value clipping


def test_a_value_that_moved_too_far_towards_its_target_has_no_gradient():
    """Half the larger squared error, of the value and of the clipped one, in a loop over tokens."""
    critic = learner_of(critic_lr=0.1, critic_clip=0.2)._critic
    values = torch.tensor([0.1, 0.5, -0.5, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    before, targets = torch.zeros(5).double(), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.1]).double()
    share = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]).double()
    loss, observed = critic.loss(values, before, targets, share, 4.0)
    expected, gradient = 0.0, []
    for v, o, t, s in zip(values.tolist(), before, targets, share, strict=True):
        clipped = min(max(v, o - 0.2), o + 0.2)
        expected += s * max((v - t) ** 2, (clipped - t) ** 2) / 2 / 4.0
        gradient.append(s * (v - t) / 4.0 if (v - t) ** 2 >= (clipped - t) ** 2 else 0.0)
    loss.backward()
    assert loss.item() == pytest.approx(float(expected))
    np.testing.assert_allclose(values.grad, gradient)
    assert observed["value_clip_share"].tolist() == [False, True, False, False, False]


def test_value_clipping_holds_the_critic_and_does_not_depend_on_the_cut():
    """The head moves far in the first minibatch; so later ones are clipped, in any pieces."""
    knobs = {"critic_lr": 0.3, "num_minibatches": 4, "num_minibatch_epochs": 2}
    free = learner_of(advantage=gae, **knobs)
    whole, pieces = (learner_of(advantage=gae, critic_clip=0.05, **knobs, **c) for c in ({}, {"micro_batch_tokens": 9}))
    batch = batches(1)[0]
    assert "value_clip_share" not in free.train(batch)
    found = whole.train(batch)
    assert found["value_clip_share"] > 0.1
    assert pieces.train(batch)["value_error"] == pytest.approx(found["value_error"], rel=1e-6)
    assert not torch.equal(free._critic._head.weight, whole._critic._head.weight)


# Rewards


def test_rewards_are_scaled_and_then_cut():
    own, shaped = seen_by_advantage(reward_scale=4.0, reward_clip=2.5)
    np.testing.assert_allclose(shaped, [min(max(4.0 * r, -2.5), 2.5) for r in own])
    own, shaped = seen_by_advantage(reward_scale=4.0, overlong_penalty=2.0, overlong_limit=8, overlong_buffer=4)
    lengths = [s.response_length for s in batches(1)[0].samples]
    np.testing.assert_allclose(shaped, [4.0 * (r - 2 * max(0, (n - 4) / 4)) for r, n in zip(own, lengths, strict=True)])


def test_what_turns_earned_is_scaled_as_well_and_a_cut_stands_at_the_end():
    seen = []

    @per_token
    def spy(episodes):
        seen.append(episodes.per_token(episodes.rewards))
        return reinforce_pp(episodes)

    batch = batches(1, masked=0.0)[0]
    for sample in batch.samples:
        sample.reward, sample.turn_rewards = 1.5, [(0, 0.5)]
    learner = learner_of(advantage=spy, reward_scale=2.0, reward_clip=2.0)
    learner.train(batch)
    for i, sample in enumerate(batch.samples):
        own = seen[0][learner._step.columns.sample == i]
        expected = np.zeros(sample.response_length)
        expected[0] += 1.0
        expected[-1] += 2.0 - 1.0
        np.testing.assert_allclose(own, expected)


def test_a_scaled_reward_is_no_penalty_on_length():
    learner, batch = learner_of(reward_scale=3.0), batches(1)[0]
    learner.train(batch)
    assert "penalty/length" not in learner.numbers(batch.groups[0].id)[0]


@pytest.mark.parametrize(
    "knobs", [{"reward_scale": 0.0}, {"reward_clip": -1.0}, {"kl_cut": -1.0}, {"critic_clip": 0.2}]
)
def test_senseless_knobs_are_refused(knobs):
    with pytest.raises(ValueError, match=r"above 0|needs a critic"):
        learner_of(reinforce, **knobs)
