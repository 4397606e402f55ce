"""Distillation: the KL's terms against NumPy, a train step against a plain loop, and what must not change it."""

from functools import partial

import numpy as np
import pytest
import torch

from areal_like.models.causal_lm import qwen2
from learners.advantages import Episodes, distill, group
from learners.learner import TorchLearner
from learners.losses.weighted import reinforce
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.seeds import seeded

TOKEN, WHOLE = partial(distill), partial(distill, sampled=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model of another shape with the same tokens, in the bits that a learner publishes."""
    path = tmp_path_factory.mktemp("teacher")
    qwen2(5, VOCAB, hidden_size=16, num_hidden_layers=1, initializer_range=0.4).bfloat16().save_pretrained(path)
    return str(path)


def learner(folder: str, loss=reinforce, advantage=TOKEN, temperature=1.0, **knobs) -> TorchLearner:
    teacher = {"path": folder} | knobs.pop("teacher", {})
    usual = {"num_minibatches": 1, "clip_grad": 0.0, "publish_dtype": "float32", "teacher": teacher}
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
    both = distill(episodes, sampled=0.5, reward=2.0, cut=0.3)
    np.testing.assert_allclose(
        both, 0.5 * np.clip(teacher - student, -0.3, 0.3) + 2 * group(rewards, groups)[sample], atol=1e-12
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


@pytest.mark.parametrize("top", [VOCAB, 4])
def test_the_gradient_of_the_kl_over_tokens_is_that_of_a_plain_loop(folder: str, top: int) -> None:
    made = learner(folder, advantage=WHOLE, teacher={"top": top, "kl": 0.5})
    model, taught, total, tokens, batch = tiny_model(), teacher_of(folder), torch.zeros(()), 0, make_batch(seeded(0))
    model.load_state_dict(made.model.state_dict())
    for sample in batch.samples:
        ours = rows_of(model, sample)
        with torch.no_grad():
            theirs = rows_of(taught, sample)
        mask = torch.from_numpy(sample.loss_mask)
        kept = theirs.topk(top).indices
        p, q = ours.gather(-1, kept).exp(), theirs.gather(-1, kept).exp()
        if top < VOCAB:
            p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (p, q))
        kl = (p * (p / q).log()).sum(-1)[mask]
        total, tokens = total + kl.sum(), tokens + len(kl)
    (0.5 * total / tokens).backward()
    metrics = made.train(batch)
    for p, q in zip(made.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=2e-5)
    assert metrics["loss"] == pytest.approx(0.5 * total.item() / tokens, rel=1e-4)


def test_a_teacher_of_fewer_tokens_is_refused(tmp_path) -> None:
    qwen2(5, VOCAB - 1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"learner.teacher.path: got a model of 12 token ids"):
        learner(str(tmp_path))
