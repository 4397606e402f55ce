"""Logprobs and entropies of packed samples against plain forwards and NumPy."""

import numpy as np
import pytest
import torch

from learners.attention import use_packed_attention
from learners.logprobs import (
    LogprobHead,
    _Chosen,
    forward_logprobs,
    token_logprobs,
    use_logprob_head,
)
from learners.packing import Columns
from tests.learners.batches import make_batch, tiny_model
from tests.seeds import seeded


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_equals_a_plain_forward_per_sample(temperature):
    model = tiny_model()
    batch = make_batch(seeded(0))
    expected, entropies = [], []
    for sample in batch.samples:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0].double().numpy()
        for r in np.flatnonzero(sample.loss_mask):
            row = logits[sample.prompt_length + r - 1] / temperature
            p = np.exp(row - row.max())
            p /= p.sum()
            expected.append(np.log(p[sample.tokens[sample.prompt_length + r]]))
            entropies.append(-(p * np.log(p)).sum())
    use_packed_attention(model)
    use_logprob_head(model, 1 << 20)
    columns = Columns(batch)
    row = columns.microbatch(np.arange(len(batch.samples)), torch.device("cpu"))
    logprobs, entropy = forward_logprobs(model, row, temperature)
    np.testing.assert_allclose(logprobs.detach(), expected, atol=2e-4)
    np.testing.assert_allclose(entropy.detach(), entropies, atol=2e-4)


def test_certain_and_impossible_tokens_are_finite_with_finite_gradients():
    logits = torch.tensor([[0.0, -torch.inf, 5.0], [1e4, 0.0, -1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2, 1]), 1.0)
    assert logprobs[1].item() == pytest.approx(-1e4)
    assert entropy[1].item() == 0.0
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_head_without_logits_in_the_graph_is_the_head(rows, bias):
    """In float64: values and gradients of both together, and of each alone, against log_softmax."""
    rng = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(5, 17, bias=bias, dtype=torch.float64)
    targets = torch.randint(0, 17, (10,), generator=rng)
    for of_chosen, of_entropy in ((1.0, 0.0), (0.0, 1.0), (0.3, -0.7)):
        states = torch.randn(10, 5, generator=rng, dtype=torch.float64, requires_grad=True)
        inputs = [states, *head.parameters()]
        found = _Chosen.apply(states, head.weight, head.bias, targets, 0.7, rows)
        truth = token_logprobs(head(states), targets, 0.7)
        for mine, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
        scale = torch.randn(10, generator=rng, dtype=torch.float64)
        mine, theirs = (
            torch.autograd.grad(((of_chosen * a + of_entropy * b) * scale).sum(), inputs) for a, b in (found, truth)
        )
        for gradient, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_logits_keep_digits_that_half_precision_loses_at_a_large_vocabulary(held):
    """Qwen's vocabulary, logits of deviation 4; weights and states are representable in half precision."""
    rng, words = torch.Generator().manual_seed(0), 151_936
    head = torch.nn.Linear(16, words, bias=False)
    head.weight.data = torch.randn(words, 16, generator=rng).bfloat16().to(getattr(torch, held))
    states = torch.randn(6, 16, generator=rng).bfloat16().to(head.weight.dtype)
    targets = torch.randint(0, words, (6,), generator=rng)
    truth, of_entropy = token_logprobs(states.float() @ head.weight.float().t(), targets, 0.9)
    gives = LogprobHead(head, words, 2 * words)
    gives.targets, gives.temperature = targets, 0.9
    with torch.autocast("cpu", torch.bfloat16, enabled=held == "float32"), torch.no_grad():
        found, entropy = gives(states[None])[0].unbind(-1)
    assert found.dtype == torch.float32
    assert (found - truth).abs().max() < 1e-4 and (entropy - of_entropy).abs().max() < 1e-3


@pytest.mark.parametrize("rows", [3, 100])
def test_half_precision_gradients_of_the_head_are_near_and_exact_where_a_token_is_all_but_certain(rows):
    """With a bfloat16 probability of 0.999, nothing would be left of 1 − p."""
    torch.manual_seed(0)
    head, states = torch.nn.Linear(64, 500, bias=False), torch.randn(20, 64, requires_grad=True)
    states.data[0] = 40 * head.weight.data[7]  # 1 − p is 2e-3 here
    targets = torch.arange(20)
    targets[0] = 7

    def gradients(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            chosen, entropy = _Chosen.apply(states, head.weight, None, targets, 1.0, rows)
        return torch.autograd.grad((chosen + 0.1 * entropy).sum(), [states, head.weight])

    for found, truth in zip(gradients(True), gradients(False), strict=True):
        assert (found - truth).norm() < 5e-3 * truth.norm()
        assert (found[0] - truth[0]).norm() < 2e-2 * truth[0].norm()
