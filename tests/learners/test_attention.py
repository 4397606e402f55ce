"""Packed forward passes against one plain transformers forward per sequence."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from areal_like.models.compiling import Compiling
from learners import attention, varlen
from learners.advantages import group
from learners.attention import attend_plainly, packed_attention, use_packed_attention
from learners.learner import TorchLearner
from learners.logprobs import (
    PLAIN,
    LogprobHead,
    _Chosen,
    compiled,
    forward_logprobs,
    token_logprobs,
    use_logprob_head,
)
from learners.losses.weighted import reinforce
from learners.packing import Columns
from learners.row_layout import RowLayout
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.seeds import seeded, torch_seeded

LENGTHS = {
    "equal": [6, 6, 6],
    "single": [9],
    "similar": [5, 7, 6, 10],
    "long tail": [2, 33, 3, 1, 8, 40, 5, 15, 1],
}


def sequence_by_sequence(q, k, v, starts, key_starts, longest, longest_key, **how):
    """Stands in for torch's kernel as documented; it doesn't pad either."""
    assert how.keys() - varlen.NEWER == {"scale", "window_size"} and how.get("num_splits", 1) == 1
    assert starts.dtype == key_starts.dtype == torch.int32
    assert (longest, longest_key) == (int(starts.diff().max()), int(key_starts.diff().max()))
    assert len({x.dtype for x in (q, k, v)}) == 1 and all(x.is_contiguous() for x in (q, k, v))
    pieces = []
    for (first, last), (begin, end) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        distance = torch.arange(end - begin - (last - first), end - begin)[:, None] - torch.arange(end - begin)
        left, right = how["window_size"]
        mask = (distance >= -right) & ((distance <= left) | (left < 0))
        parts = (
            x[at].transpose(0, 1)[None]
            for x, at in ((q, slice(first, last)), *((x, slice(begin, end)) for x in (k, v)))
        )
        done = scaled_dot_product_attention(*parts, attn_mask=mask, scale=how["scale"], enable_gqa=True)
        pieces.append(done[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.fixture(params=["blocks", "kernel"])
def implementation(request, monkeypatch):
    """Both implementations of attention, in full precision; the kernel itself needs a GPU and half precision."""
    calls = []
    if request.param == "kernel":
        monkeypatch.setattr(varlen, "KERNEL", lambda *a, **b: (calls.append(1), sequence_by_sequence(*a, **b))[1])
        monkeypatch.setattr(varlen, "takes", lambda *_: True)
        monkeypatch.setattr(attention, "_half", lambda query, value: query.dtype)
    yield request.param
    assert bool(calls) == (request.param == "kernel")


def packed_logits(model, sequences, lengths):
    use_packed_attention(model)
    return model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        layout=RowLayout.of(np.array(lengths), torch.device("cpu")),
        use_cache=False,
    ).logits[0]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_logits_and_gradients_equal_those_of_each_sequence_alone(kind, lengths, implementation):
    model = tiny_model(kind)
    generator = torch_seeded(1)
    sequences = [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]
    plain = torch.cat([model(input_ids=s[None], use_cache=False).logits[0] for s in sequences])
    weights = torch.randn(plain.shape, generator=generator)
    expected = torch.autograd.grad((plain * weights).sum(), list(model.parameters()))
    packed = packed_logits(model, sequences, lengths)
    torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad((packed * weights).sum(), list(model.parameters()))
    for gradient, truth in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-3, atol=1e-4)


def test_sliding_windows_are_kept(implementation):
    """Compared with scores masked by hand, in float64."""
    rng = torch_seeded(3)
    lengths, window = [5, 9], 3
    q, k, v = (torch.randn(1, heads, 14, 4, generator=rng, dtype=torch.float64) for heads in (4, 2, 2))
    layout = RowLayout.of(np.array(lengths), torch.device("cpu"))
    output, _ = packed_attention(torch.nn.Module(), q, k, v, None, 0.5, layout=layout, sliding_window=window)
    expected = torch.zeros(14, 4, 4, dtype=torch.float64)
    starts = [0, 5]
    for start, length in zip(starts, lengths, strict=True):
        for t in range(length):
            first, last = start + max(0, t - window + 1), start + t + 1
            for head in range(4):
                scores = 0.5 * k[0, head // 2, first:last] @ q[0, head, start + t]
                expected[start + t, head] = scores.softmax(0) @ v[0, head // 2, first:last]
    torch.testing.assert_close(output[0], expected)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_matrix_by_matrix_is_attention(masked):
    """In float64, with gradients. In half precision, a CPU computes short sequences this way."""
    rng = torch_seeded(0)
    shape = (3, 5 if masked else 9)
    q = torch.randn(3, 4, shape[1], 8, dtype=torch.float64, generator=rng, requires_grad=True)
    k, v = (torch.randn(3, 2, 9, 8, dtype=torch.float64, generator=rng, requires_grad=True) for _ in range(2))
    mask = (torch.arange(9) <= torch.arange(5)[:, None] + 4).expand(3, 1, 5, 9) if masked else None
    found = attend_plainly(q, k, v, mask, 0.3, torch.float64)
    truth = scaled_dot_product_attention(q, k, v, mask, is_causal=not masked, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=rng)
    for mine, theirs in zip(
        *(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (found, truth)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        half = attention._attend(q.float(), k.float(), v.float(), mask, 0.3, None)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), truth, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_a_train_step_in_half_precision_is_one_of_the_kernel(kind, monkeypatch):
    """Only the device is faked. Queries and keys leave the rotary embedding in float32; samples share prefixes, and
    activations are recomputed. The kernel is tried once."""
    batch, dtypes, gradients = make_batch(seeded(0), groups=3), [], []
    for made in batch.groups:
        for sample in made.samples:
            sample.tokens[: sample.prompt_length] = made.samples[0].tokens[: sample.prompt_length]
    for kernel in (False, True):
        if kernel:
            counted = lambda *a, **b: (dtypes.append(a[0].dtype), sequence_by_sequence(*a, **b))[1]  # noqa: E731
            monkeypatch.setattr(varlen, "KERNEL", counted)
            monkeypatch.setattr(varlen, "runs_on", lambda device: True)
        knobs = {"num_minibatches": 1, "compute_dtype": "bfloat16", "checkpoint_activations": kernel}
        learner = TorchLearner(tiny_model(kind), reinforce, partial(group), 1.0, 0, **knobs)
        metrics = learner.train(batch)
        gradients.append(learner.optimizer.gradient.clone())
    assert dtypes == [torch.bfloat16] * (1 + 2 * 2), "a trial, and each layer twice"
    assert metrics["computed_tokens"] < metrics["backward_tokens"], "prefixes are shared"
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


def test_the_kernel_is_for_gpus_and_half_precision_and_one_that_fails_is_not_used(monkeypatch, caplog):
    assert varlen.KERNEL is not None, "this torch has it"
    device, half = torch.device("cpu"), torch.bfloat16
    assert not varlen.takes(device, 8, half)
    monkeypatch.setattr(varlen, "runs_on", lambda device: True)
    assert not varlen.takes(device, 8, half) and "fails here" in caplog.text, "flash attention has no CPU kernel"
    monkeypatch.setattr(varlen, "KERNEL", sequence_by_sequence)
    assert varlen.takes(device, 8, half)
    assert not any(varlen.takes(device, *wrong) for wrong in ((8, None), (8, torch.float32), (4, half), (264, half)))


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


@pytest.mark.parametrize(
    "rows, bias, on", [(3, 0, False), (3, 1, False), (100, 0, False), (100, 1, False), (5, 1, True)]
)
def test_a_linear_head_without_logits_in_the_graph_is_the_head(rows, bias, on, monkeypatch):
    """In float64: values and gradients of both together, and of each alone, against log_softmax; once traced."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no C++ compiler: seconds
    compiling = Compiling(on)
    chains = compiled(compiling) if on else PLAIN
    rng = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(5, 17, bias=bool(bias), dtype=torch.float64)
    targets = torch.randint(0, 17, (10,), generator=rng)
    for of_chosen, of_entropy in ((1.0, 0.0), (0.0, 1.0), (0.3, -0.7)):
        states = torch.randn(10, 5, generator=rng, dtype=torch.float64, requires_grad=True)
        inputs = [states, *head.parameters()]
        found = _Chosen.apply(states, head.weight, head.bias, targets, 0.7, rows, True, True, chains)
        truth = token_logprobs(head(states), targets, 0.7)
        for mine, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
        scale = torch.randn(10, generator=rng, dtype=torch.float64)
        mine, theirs = (
            torch.autograd.grad(((of_chosen * a + of_entropy * b) * scale).sum(), inputs) for a, b in (found, truth)
        )
        for gradient, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)
    assert compiling.on == on, "the compiler breaks"


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
