"""The whole train step: against a plain gradient, and the contracts on bits, micro-batches and order."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_like.models.causal_lm import qwen2, state_of
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo, ppo
from learners.losses.corrections import capped
from learners.untrainable import Untrainable
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.seeds import seeded

DECOUPLED = capped(decoupled_ppo)


def learner_of(loss=DECOUPLED, temperature=1.0, seed=0, **knobs) -> TorchLearner:
    return TorchLearner(tiny_model(), loss, partial(group), temperature, seed, **knobs)


def batches(count: int, **shape) -> list:
    return [make_batch(seeded(i), index=i, **shape) for i in range(count)]


def on_policy(learner: TorchLearner, batch):
    """Replace the behaviour logprobs of a batch by the learner's own."""
    model = qwen2(0, VOCAB, num_attention_heads=4, num_key_value_heads=2)
    model.load_state_dict(learner.model.state_dict())
    for sample in batch.samples:
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(input_ids=tokens).logits[0].log_softmax(-1)
        chosen = logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        sample.logprobs = chosen[sample.prompt_length - 1 :].numpy()
    return batch


def test_the_gradient_is_that_of_a_plain_loop_over_samples():
    """REINFORCE with a group baseline and an entropy bonus, written sample by sample without packing."""
    learner = learner_of(ppo, num_minibatches=1, entropy_bonus=0.3, clip_grad=0.0)
    batch = on_policy(learner, batches(1)[0])
    model = tiny_model()
    model.load_state_dict(learner.model.state_dict())
    objective, tokens = torch.zeros(()), 0
    for g in batch.groups:
        baseline = np.mean([s.reward for s in g.samples])
        for s in g.samples:
            ids = torch.from_numpy(s.tokens.astype(np.int64))[None]
            logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
            for r in np.flatnonzero(s.loss_mask):
                row = logprobs[s.prompt_length + r - 1]
                objective = objective + (s.reward - baseline) * row[ids[0, s.prompt_length + r]]
                objective = objective - 0.3 * (row.exp() * row).sum()
                tokens += 1
    (-objective / tokens).backward()
    metrics = learner.train(batch)
    for p, q in zip(learner.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    assert metrics["tokens"] == tokens
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_published_bits_are_the_differentiated_bits():
    """The values that the forward of step k reads are, bit for bit, those of the snapshot after step k − 1."""
    learner, read = learner_of(num_minibatches=1), []
    learner.model.register_forward_pre_hook(
        lambda model, args: read.append({n: p.detach().clone() for n, p in model.named_parameters()})
    )
    for batch in batches(3):
        published = learner.snapshot()
        assert published.digest() == state_of(learner.model).digest()
        read.clear()
        learner.train(batch)
        for spec, bits in published.tensors():
            value = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(spec.shape).float()
            assert torch.equal(read[0][spec.name], value)
        assert learner.snapshot().digest() != published.digest()


def test_a_snapshot_is_not_touched_by_later_steps():
    learner = learner_of()
    before = learner.snapshot()
    digest = before.digest()
    learner.train(batches(1)[0])
    assert before.digest() == digest


@pytest.mark.parametrize("loss", [ppo, DECOUPLED], ids=["ppo", "decoupled"])
def test_the_same_batches_give_the_same_bits(loss):
    digests = set()
    for _ in range(2):
        learner = learner_of(loss, entropy_bonus=0.01, num_minibatch_epochs=2)
        metrics = [learner.train(batch) for batch in batches(4)]
        digests.add((learner.snapshot().digest(), str(metrics)))
    assert len(digests) == 1


def test_the_seed_orders_the_minibatches():
    def digest(seed):
        learner = learner_of(seed=seed, num_minibatches=3)
        learner.train(batches(1, groups=8)[0])
        return learner.snapshot().digest()

    assert digest(0) == digest(0) != digest(1)


@pytest.mark.parametrize("cut", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 40}, {"min_microbatches": 5}])
def test_the_cut_into_micro_batches_does_not_change_the_step(cut):
    knobs = {"num_minibatches": 2, "entropy_bonus": 0.05, "publish_dtype": "float32"}
    whole, pieces = learner_of(**knobs), learner_of(**knobs, **cut)
    for batch in batches(2):
        expected, metrics = whole.train(batch), pieces.train(batch)
        torch.testing.assert_close(pieces.optimizer.gradient, whole.optimizer.gradient, rtol=1e-3, atol=2e-5)
        for name in (
            "loss",
            "entropy",
            "loss/clip_share",
            "loss/behaviour_weight/mean",
            "loss/ratio/max",
            "kl/k3",
            "ess",
        ):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_proximal_logprobs_are_those_at_the_start_of_the_step():
    """Every minibatch gets them, although the weights have moved by the second minibatch and by the second epoch."""
    seen = []

    def spy(batch, denominator):
        seen.append((batch.current.detach().clone(), batch.proximal.clone(), batch.behaviour.clone()))
        return ppo(batch, denominator)

    spy.wants_proximal = True
    learner = learner_of(spy, num_minibatches=2, num_minibatch_epochs=2, lr=1e-2)
    batch = on_policy(learner, batches(1)[0])
    learner.train(batch)
    for number, (current, proximal, behaviour) in enumerate(seen):
        torch.testing.assert_close(proximal, behaviour, rtol=1e-4, atol=1e-4)
        assert torch.equal(current, proximal) == (number == 0)


def test_on_policy_metrics_say_so():
    learner = learner_of(num_minibatches=2)
    metrics = learner.train(on_policy(learner, batches(1)[0]))
    assert metrics["kl/k1"] == pytest.approx(0, abs=1e-5) and metrics["kl/k3"] == pytest.approx(0, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["loss/behaviour_weight/mean"] == pytest.approx(1, abs=1e-5)


def test_off_policy_metrics_equal_numpy():
    learner, batch = learner_of(num_minibatches=2), batches(1)[0]
    own = np.concatenate([s.logprobs[s.loss_mask] for s in on_policy(learner, batches(1)[0]).samples]).astype(float)
    behaviour = np.concatenate([s.logprobs[s.loss_mask] for s in batch.samples])
    metrics = learner.train(batch)
    weight = np.exp(own - behaviour)
    assert metrics["kl/k1"] == pytest.approx(np.mean(behaviour - own), rel=1e-3)
    assert metrics["kl/k3"] == pytest.approx(np.mean(weight - 1 - np.log(weight)), rel=1e-3)
    assert metrics["ess"] == pytest.approx(weight.sum() ** 2 / (len(weight) * (weight**2).sum()), rel=1e-3)
    assert metrics["loss/behaviour_weight/mean"] == pytest.approx(weight.mean(), rel=1e-3)
    assert metrics["loss/behaviour_weight/max"] == pytest.approx(weight.max(), rel=1e-3)
    assert metrics["loss/masked_share"] == pytest.approx(np.mean(weight > 5))


def test_a_poisoned_batch_leaves_the_weights_as_they_were():
    learner = learner_of(num_minibatches=1)
    learner.train(batches(1)[0])
    digest, poisoned = learner.snapshot().digest(), batches(2)[1]
    poisoned.samples[0].reward = float("nan")
    metrics = learner.train(poisoned)
    assert metrics["skipped_steps"] == 1 and learner.snapshot().digest() == digest
    assert learner.train(batches(3)[2])["skipped_steps"] == 1 and learner.snapshot().digest() != digest


def test_a_batch_with_nothing_to_train_changes_nothing():
    learner, batch = learner_of(), batches(1)[0]
    for sample in batch.samples:
        sample.loss_mask[:] = False
    digest = learner.snapshot().digest()
    metrics = learner.train(batch)
    assert metrics["tokens"] == 0 and metrics["loss"] == 0.0 and learner.snapshot().digest() == digest


def test_untrained_tokens_and_what_follows_do_not_matter():
    """Filler after the answer may hold any tokens and logprobs."""
    plain, filled = learner_of(), learner_of()
    short, long = batches(1, masked=0.0)[0], batches(1, masked=0.0)[0]
    for sample in long.samples:
        sample.tokens = np.concatenate([sample.tokens, np.full(30, 7, np.int32)])
        sample.logprobs = np.concatenate([sample.logprobs, np.full(30, np.nan, np.float32)])
        sample.loss_mask = np.concatenate([sample.loss_mask, np.zeros(30, bool)])
        sample.runs = [*sample.runs, (9, 30)]
    plain.train(short)
    filled.train(long)
    assert plain.snapshot().digest() == filled.snapshot().digest()


def test_more_minibatches_than_groups_is_one_per_group():
    learner = learner_of(num_minibatches=9)
    learner.train(batches(1, groups=3)[0])
    assert learner.optimizer.steps == 3


def test_temperature_scales_the_policy():
    """At temperature 2 the policy is flatter, so its entropy is higher; both start from the same weights."""
    cold, hot = (learner_of(temperature=t, num_minibatches=1).train(batches(1)[0]) for t in (1.0, 2.0))
    assert hot["entropy"] > cold["entropy"] + 0.1


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"num_minibatches": 0}, {"num_minibatch_epochs": 0}])
def test_senseless_knobs_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        learner_of(**wrong)


def test_a_saved_folder_loads_as_the_same_model(tmp_path):
    learner = learner_of()
    learner.train(batches(1)[0])
    learner.save(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert state_of(loaded).digest() == learner.snapshot().digest()
    assert loaded(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, VOCAB)


def test_a_restored_learner_goes_on_bit_for_bit(tmp_path):
    learner, restored = learner_of(), learner_of()
    first, second = batches(2)
    learner.train(first)
    learner.save_state(tmp_path)
    restored.load_state(tmp_path)
    assert restored.train(second) == learner.train(second)
    assert restored.snapshot().digest() == learner.snapshot().digest()


def test_it_learns():
    """A bandit: token 3 is the right answer to every prompt. On-policy, so the engine is the model itself."""
    learner = learner_of(lr=1e-2, num_minibatches=1)
    for i in range(12):
        batch = make_batch(seeded(i), index=i, groups=4, size=16, max_response=1, masked=0.0)
        for sample in batch.samples:
            sample.reward = float(sample.tokens[-1] == 3)
            sample.logprobs = np.full(1, -np.log(VOCAB), np.float32)
        learner.train(batch)
    probe = make_batch(seeded(99), index=99, groups=4, size=4, max_response=1, masked=0.0)
    for sample in probe.samples:
        sample.tokens[-1] = 3
    behaviour = np.concatenate([s.logprobs for s in on_policy(learner, probe).samples])
    assert np.exp(behaviour).mean() > 0.5


def state_of_training(learner: TorchLearner) -> dict:
    state = learner.optimizer.state_dict()
    return {"master": state["master"], "steps": state["steps"]} | {str(i): s for i, s in enumerate(state["adamw"])}


def with_token(batch, token: int):
    sample = batch.groups[-1].samples[-1]
    sample.tokens = np.concatenate([sample.tokens[:-1], np.array([token], np.int32)])
    return batch


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_a_batch_that_cannot_be_trained_leaves_no_trace(token):
    """The faulty sample is in the last minibatch."""
    one, other = learner_of(), learner_of()
    first, second = batches(2)
    for each in (one, other):
        each.train(first)
    faulty = with_token(make_batch(np.random.default_rng(9), index=1), token)
    with pytest.raises(Untrainable, match=f"batch 1 can't be trained: group .* has the token {token}") as caught:
        one.train(faulty)
    assert not caught.value.moved and not one.optimizer.gradient.any()
    torch.testing.assert_close(state_of_training(one), state_of_training(other), rtol=0, atol=0)
    one.train(second), other.train(second)
    torch.testing.assert_close(state_of_training(one), state_of_training(other), rtol=0, atol=0)


@pytest.mark.parametrize(("fails_at", "moved"), [(1, False), (2, True)])
def test_a_loss_that_raises_says_whether_the_weights_have_moved(fails_at, moved):
    calls = []

    def failing(batch, denominator):
        calls.append(batch)
        if len(calls) == fails_at:
            raise ValueError("no such advantage")
        return ppo(batch, denominator)

    learner = learner_of(failing)
    with pytest.raises(Untrainable, match="ValueError: no such advantage") as caught:
        learner.train(batches(1)[0])
    assert caught.value.moved is moved


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("CUDA error: device-side assert triggered")])
def test_what_is_no_fault_of_the_data_is_raised_as_it_is(error):
    def failing(batch, denominator):
        raise error

    with pytest.raises(type(error), match=str(error)) as caught:
        learner_of(failing).train(batches(1)[0])
    assert caught.value is error
