"""Distillation: the KL's terms against NumPy, a train step against a plain loop, and what must not change it."""

from functools import partial

import numpy as np
import pytest
import torch

from areal_like.config.run_config import ConfigError, load
from areal_like.models.causal_lm import qwen2
from learners.advantages import Episodes, distill, group
from learners.distillation import lumped_kl
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.losses.weighted import reinforce
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.learners.losses.token_batches import LOSSES
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


# Terms


def simplex(rng: np.random.Generator, *shape: int) -> np.ndarray:
    logits = rng.normal(0, 2, shape)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def test_the_kl_over_some_tokens_is_that_of_the_lumped_distributions() -> None:
    rng = seeded(0)
    p, q = simplex(rng, 7, 9), simplex(rng, 7, 9)
    found = []
    for k in range(1, 10):
        top = np.argsort(-q, -1)[:, :k]
        ours, theirs = (np.take_along_axis(each, top, -1) for each in (p, q))
        lumps = [np.concatenate([each, 1 - each.sum(-1, keepdims=True)], -1) for each in (ours, theirs)]
        if k == 9:
            lumps = [ours, theirs]
        truth = (lumps[0] * np.log(lumps[0] / lumps[1])).sum(-1)
        found.append(lumped_kl(torch.tensor(ours).log(), torch.tensor(theirs).log()).numpy())
        np.testing.assert_allclose(found[-1], truth, rtol=1e-9, atol=1e-9)
    assert (np.diff(np.stack(found), axis=0) >= -1e-9).all(), "it grows with k"
    np.testing.assert_allclose(found[-1], (p * np.log(p / q)).sum(-1), rtol=1e-9)


@pytest.mark.parametrize("k", [3, 9])
def test_its_gradient_is_that_of_differences(k: int) -> None:
    rng = seeded(1)
    logits, q = torch.tensor(rng.normal(0, 2, (4, 9)), requires_grad=True), torch.tensor(simplex(rng, 4, 9))
    top = q.topk(k).indices

    def value(z: torch.Tensor) -> torch.Tensor:
        return lumped_kl(z.log_softmax(-1).gather(-1, top), q.log().gather(-1, top)).sum()

    assert torch.autograd.gradcheck(value, logits)


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


# Train steps


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


CUTS = {
    "samples alone": {"micro_batch_tokens": 1},
    "few logits": {"max_logits": 30},
    "other": {"micro_batch_tokens": 40},
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("top", [0, 4])
def test_the_cut_into_micro_batches_does_not_change_the_gradient(folder: str, cut: dict, top: int) -> None:
    knobs = {"loss": decoupled_ppo, "teacher": {"top": top}, "normalise": "sequence_mean"}
    whole, pieces = learner(folder, **knobs), learner(folder, **knobs, **cut)
    expected, metrics = whole.train(make_batch(seeded(0))), pieces.train(make_batch(seeded(0)))
    torch.testing.assert_close(pieces.optimizer.gradient, whole.optimizer.gradient, rtol=1e-3, atol=2e-5)
    for name in ("loss", "teacher_kl", "kl/k3"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.parametrize(
    "name", ["ppo", "decoupled_ppo, capped", "reinforce, tis", "dg_kondo, cispo", "m2po", "reinforce"]
)
def test_losses_with_and_without_a_proximal_pass_take_it(folder: str, name: str) -> None:
    """The advantage's policy at the start of the step is the one that such losses call proximal: computed once."""
    knobs = {"num_minibatches": 2, "lr": 1e-3}
    first = learner(folder, LOSSES[name], **knobs)
    second = learner(folder, LOSSES[name], **knobs)
    metrics = first.train(make_batch(seeded(0)))
    assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    second.train(make_batch(seeded(0)))
    assert first.snapshot().digest() == second.snapshot().digest()
    assert not np.isnan(first.numbers(0)[0]["proximal"][make_batch(seeded(0)).samples[0].loss_mask]).any()


def test_the_policy_that_sampled_can_be_the_student(folder: str) -> None:
    made, batch = learner(folder, advantage=partial(distill, of="behaviour")), make_batch(seeded(0))
    made.train(batch)
    for at, group_ in enumerate(batch.groups):
        for sample, numbers in zip(group_.samples, made.numbers(group_.id), strict=True):
            mask = sample.loss_mask
            np.testing.assert_allclose(
                numbers["advantage"][mask], (numbers["teacher"] - sample.logprobs)[mask], rtol=1e-4, atol=1e-4
            )
            assert at >= 0


def test_repeated_steps_bring_the_student_to_the_teacher(folder: str) -> None:
    made = learner(folder, LOSSES["reinforce, tis"], advantage=WHOLE, teacher={"top": VOCAB}, lr=1e-2)
    found = [made.train(make_batch(seeded(0)))["teacher_kl_top"] for _ in range(30)]
    assert found[-1] < 0.3 * found[0]


def test_the_teacher_is_as_large_as_it_was_and_adapters_learn_from_it(folder: str) -> None:
    made = learner(folder, lora={"rank": 2}, lr=1e-2)
    before = [p.clone() for p in made._teacher.model.parameters()]
    metrics = made.train(make_batch(seeded(0)))
    assert metrics["grad_norm"] > 0
    assert all(torch.equal(p, q) for p, q in zip(before, made._teacher.model.parameters(), strict=True))


# Configs


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["advantage=distill"], r"learner.teacher.path: got null"),
        (["learner.teacher={path: x}"], r"learner.teacher: it has nothing to do"),
        (["advantage=distill", "learner.teacher={top: 3}"], r"learner.teacher.path: got null"),
        (["learner.teacher=x"], r"expected Mapping|expected \{path"),
        (["learner.teacher={path: x, tops: 3}"], r"learner.teacher.tops: .* has no knob"),
        (["algorithm=sft", "learner.teacher={path: x, top: 2}"], r"has neither rollouts nor rewards"),
    ],
)
def test_odd_settings_are_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(["configs/quickstart.yaml", *settings])


def test_a_teacher_of_fewer_tokens_is_refused(tmp_path) -> None:
    qwen2(5, VOCAB - 1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"learner.teacher.path: got a model of 12 token ids"):
        learner(str(tmp_path))
