"""The whole train step: against a plain gradient, and the contracts on bits, micro-batches and order."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_like.models.causal_lm import qwen2, state_of
from areal_like.run import checkpoints
from learners import saving
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo, ppo
from learners.losses.corrections import capped
from learners.passes import Passes
from learners.untrainable import Interrupted, OutOfMemory, Untrainable
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


@pytest.mark.parametrize("loss", [ppo, DECOUPLED], ids=["ppo", "decoupled"])
def test_the_same_batches_give_the_same_bits(loss):
    digests = set()
    for _ in range(2):
        learner = learner_of(loss, entropy_bonus=0.01, num_minibatch_epochs=2)
        metrics = [learner.train(batch) for batch in batches(4)]
        digests.add((learner.snapshot().digest(), str(metrics)))
    assert len(digests) == 1


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


@pytest.mark.parametrize("room", [1 << 50, 0])
def test_a_state_saved_beside_the_next_step_is_that_before_it_and_goes_on_bit_for_bit(tmp_path, monkeypatch, room):
    """The step waits until the state is copied; without room for a copy, until it is written."""
    monkeypatch.setattr(saving, "free_memory", lambda: room)
    learner, restored, order = learner_of(num_minibatches=1), learner_of(num_minibatches=1), list[str]()
    write, step = learner.saving._write, learner.optimizer._adamw.step
    first, second = batches(2)
    learner.train(first)
    waits, stepped = threading.Event(), threading.Event()
    saved = checkpoints.in_thread(learner.save_beside(), lambda fill: waits.wait(60) and fill(tmp_path))
    held = learner.optimizer._may_change
    held_wait = held.wait
    monkeypatch.setattr(held, "wait", lambda: (waits.set(), held_wait(60)))
    monkeypatch.setattr(learner.optimizer._adamw, "step", lambda: (order.append("step"), step(), stepped.set()))

    def wrote(state, folder):
        assert not room or stepped.wait(60), "a copy is written beside the step"
        order.append("write")
        write(state, folder)

    monkeypatch.setattr(learner.saving, "_write", wrote)
    found = learner.train(second)
    saved.join(60)
    restored.load_state(tmp_path)
    assert restored.train(second) == found and order == (["step", "write"] if room else ["write", "step"])
    assert restored.snapshot().digest() == learner.snapshot().digest()


def test_a_save_that_never_begins_holds_no_step(tmp_path):
    (tmp_path / "checkpoints").touch()  # no folder can be made
    learner, writer = learner_of(), checkpoints.CheckpointWriter(tmp_path, keep=1)
    writer.begin(1, learner.save_beside(), {})
    with pytest.raises(OSError):
        writer.written(wait=True)
    assert learner.optimizer._may_change.is_set()


def state_of_training(learner: TorchLearner) -> dict:
    state = learner.optimizer.state_dict()
    return {"master": state["master"], "steps": state["steps"]} | {str(i): s for i, s in enumerate(state["adamw"])}


@pytest.mark.parametrize("error", [ValueError("bad"), OSError("disk full"), RuntimeError("CUDA error: assert")])
@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_fault_of_the_data_leaves_no_trace_before_the_first_optimizer_step(fails_at, error):
    calls = []

    def failing(batch, denominator):
        calls.append(batch)
        if len(calls) == fails_at:
            raise error
        return DECOUPLED(batch, denominator)

    failing.marks = DECOUPLED.marks
    one, other = learner_of(failing), learner_of()
    first, second = batches(2)
    with pytest.raises(Exception, match=str(error)) as caught:
        one.train(first)
    assert not one.optimizer.gradient.any()
    if not isinstance(error, ValueError):
        assert caught.value is error
        return
    assert isinstance(caught.value, Untrainable) and caught.value.moved is (fails_at == 2)
    if fails_at == 1:
        one.train(second), other.train(second)
        torch.testing.assert_close(state_of_training(one), state_of_training(other), rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "asked"), [(256, 5), (16384, 40)])
def test_ranks_ask_one_another_before_large_micro_batches_and_among_small_ones_now_and_then(tokens, asked):
    calls = []
    ranks = SimpleNamespace(count=2, max=lambda value: calls.append(value) or (0 if len(calls) > 1 else 40))
    passes = Passes(None, ranks, torch.device("cpu"), 1.0, tokens, False, False)
    assert len(list(passes.microbatches(None, np.arange(0)))) == 40 and len(calls) == 1 + asked


def test_a_step_that_is_interrupted_leaves_no_trace():
    learner, other, (batch,) = learner_of(micro_batch_tokens=64), learner_of(micro_batch_tokens=64), batches(1)
    answers = iter([False, True])
    learner.shall_stop = lambda: next(answers)
    with pytest.raises(Interrupted):
        learner.train(batch)
    learner.shall_stop = lambda: False
    assert learner.train(batch) == other.train(batch)
    torch.testing.assert_close(state_of_training(learner), state_of_training(other), rtol=0, atol=0)


@pytest.mark.parametrize("fits", [32, 31])
def test_a_lack_of_memory_halves_the_micro_batches_once_and_is_no_fault_of_the_data(fits: int):
    learner, other, (batch,) = learner_of(micro_batch_tokens=64), learner_of(micro_batch_tokens=32), batches(1)
    accumulate = learner._accumulate

    def scarce(*args, **kwargs):
        found = accumulate(*args, **kwargs)  # with gradients, which must go
        if learner._passes.micro_batch_tokens > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return found

    learner._accumulate = scarce
    if fits == 31:
        with pytest.raises(OutOfMemory, match=r"micro_batch_tokens: got 64 and then 32.*Tried to allocate"):
            learner.train(batch)
        return
    learner.train(batch)
    other.train(batch)
    assert learner.snapshot().digest() == other.snapshot().digest()
    assert learner.sizing.found == {"micro_batch_tokens": 32}, "for the run's config"
