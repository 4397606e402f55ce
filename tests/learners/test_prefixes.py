"""Shared prefixes: the tree has each token once, and model, loss and train step give the same results."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from areal_like.types import Batch, Group, Sample
from learners import packing
from learners.advantages import gae, group
from learners.attention import packed_attention
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo, gspo, ppo
from learners.losses.corrections import tis
from learners.losses.weighted import reinforce
from learners.packing import Columns
from learners.prefixes import Forest, cut, paths
from learners.row_layout import RowLayout
from tests.learners.batches import VOCAB, assert_metrics_close, tiny_model
from tests.learners.exact import ADAMW_EPS, SUMMED, exact
from tests.learners.losses.token_batches import LOSSES

CPU = torch.device("cpu")
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


def forest_of(sequences):
    lengths = np.array([len(s) for s in sequences])
    return Forest.of(np.concatenate(sequences).astype(np.int64), np.cumsum(lengths) - lengths, lengths), lengths


def prefixes(sequences):
    return {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_each_token_in_its_context_is_in_the_row_once(sequences, dice):
    forest, lengths = forest_of(sequences)
    chosen = np.array(dice.sample(range(len(sequences)), dice.randint(1, len(sequences))))
    order, shared = forest.among(chosen)
    some = [sequences[i] for i in chosen[order]]
    assert (lengths[chosen[order]] - shared).sum() == len(prefixes(some))
    row = [token for s, common in zip(some, shared, strict=True) for token in s[common:]]
    for sequence, path in zip(some, paths(lengths[chosen[order]], shared), strict=True):
        assert [row[place] for place in path] == sequence


@given(SEQUENCES, st.integers(1, 30))
def test_runs_stay_below_the_limit_and_lose_nothing(sequences, most):
    forest, lengths = forest_of(sequences)
    order, shared = forest.among(np.arange(len(sequences)))
    runs = cut(lengths[order].tolist(), shared.tolist(), most)
    assert [i for run in runs for i in run] == list(range(len(sequences)))
    for run in runs:
        assert len(run) == 1 or len(prefixes([sequences[order[i]] for i in run])) <= most


def family(rng, prompt, responses, turns=1):
    """Samples of one prompt; with `turns`, later ones continue from part of the first one's response, as branches."""
    begin = rng.integers(0, VOCAB, prompt)
    made: list[Sample] = []
    for number, response in enumerate(responses):
        tokens = rng.integers(0, VOCAB, response)
        if turns > 1 and number:
            common = min(response, len(made[0].tokens) - prompt) // turns
            tokens[:common] = made[0].tokens[prompt : prompt + common]
        mask = rng.random(response) < 0.8
        mask[-1] = True
        made.append(
            Sample(
                tokens=np.concatenate([begin, tokens]).astype(np.int32),
                prompt_length=prompt,
                logprobs=(-rng.exponential(2.0, response)).astype(np.float32),
                loss_mask=mask,
                runs=[(0, int(response))],
                reward=float(rng.integers(0, 5)) / 4,
                finish="stop",
            )
        )
    return made


SHAPES = {
    "short answers": [(12, [3, 4, 2, 5], 1), (17, [1, 6, 3, 2], 1)],
    "long answers": [(3, [12, 15, 9, 30], 1), (5, [20, 8, 8, 11], 1)],
    "mixed": [(9, [3, 25, 9, 1], 1), (2, [4, 6, 30, 5], 1)],
    "branches": [(6, [24, 20, 12, 9], 2), (4, [16, 18, 8, 20], 3)],
}


def batch_of(shapes, seed=0, index=0, version=1):
    rng = np.random.default_rng((seed, index))
    groups = [Group(id=number, samples=family(rng, *shape)) for number, shape in enumerate(shapes)]
    for each in groups:
        each.samples[0].runs = [(version, each.samples[0].response_length)]
    return Batch(index, version, groups)


def attention_inputs(row, layout_tokens, window):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, heads, layout_tokens, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_attention_over_a_tree_is_that_of_each_sequence_alone(shapes, window, lean):
    """In float64, where both give the same numbers and gradients."""
    columns = Columns(batch_of(shapes))
    samples = np.flatnonzero(columns.lengths)
    order, shared = columns.forest.among(samples)
    lengths = columns.lengths[samples[order]]
    found = paths(lengths, shared)
    inputs = attention_inputs(None, int((lengths - shared).sum()), window)
    weights = torch.randn(inputs[0].shape[2], 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def run(tensors, layout):
        return packed_attention(
            torch.nn.Module(), *tensors, None, 0.5, layout=layout, **({"sliding_window": window} if window else {})
        )[0][0]

    tree = [x.clone().requires_grad_() for x in inputs]
    output = run(tree, RowLayout.tree(found, lengths - shared, CPU, lean=lean))
    alone = [x.clone().requires_grad_() for x in inputs]
    where = torch.from_numpy(np.concatenate(found))
    apart = run([x[:, :, where] for x in alone], RowLayout.of(lengths, CPU))
    own = np.concatenate(
        [np.arange(end - new, end) for end, new in zip(np.cumsum(lengths), lengths - shared, strict=True)]
    )
    expected = apart[torch.from_numpy(own)]
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((output * weights).sum(), tree)
    truths = torch.autograd.grad((expected * weights).sum(), alone)
    for gradient, truth in zip(gradients, truths, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-12)


def never(*_):
    """Replaces `is_worth`: nothing is shared."""
    return False


def learner_of(loss=decoupled_ppo, advantage=group, model="qwen2", temperature=0.7, **knobs) -> TorchLearner:
    knobs = {"publish_dtype": "float32", "clip_grad": 0.5, "num_minibatches": 1, "lr": 1e-3, "eps": ADAMW_EPS, **knobs}
    return TorchLearner(exact(tiny_model(model)), loss, partial(advantage), temperature, 0, **knobs)


KNOBS = [
    {},
    {"loss": ppo, "num_minibatches": 2, "entropy_bonus": 0.05},
    {"loss": gspo, "normalise": "sequence_mean"},
    {"loss": tis(reinforce), "micro_batch_tokens": 30},
    {"normalise": 16.0, "kl_loss": 0.1, "kl_reward": 0.1},
    {"advantage": gae, "critic_lr": 1e-2, "critic_trunk": 0.1},
    {"checkpoint_activations": True, "max_logits": 100, "micro_batch_tokens": 90},
    {"lora": {"rank": 2}},
]
MODELS = ["qwen2", "llama", "qwen3"]
"""The first has its head's weights in common with the embedding."""


def assert_a_step_is_that_of_plain_sequences(monkeypatch, shapes, most, **knobs):
    """In float64: the gradient and all metrics are equal, except for the count of computed tokens, which is below
    `most` of the plain ones."""
    shared, plain = learner_of(**knobs), learner_of(**knobs)
    batch = batch_of(shapes)
    found = shared.train(batch)
    monkeypatch.setattr(packing, "is_worth", never)
    expected = plain.train(batch)
    assert found["computed_tokens"] < most * expected["computed_tokens"] == most * expected["backward_tokens"]
    assert expected["grad_norm"] > 0
    torch.testing.assert_close(shared.optimizer.gradient, plain.optimizer.gradient, **SUMMED)
    assert_metrics_close(found, expected, **SUMMED)


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(f"{k}" for k in knobs) or "plain")
def test_a_train_step_is_that_of_plain_sequences(knobs, monkeypatch):
    shapes = [*SHAPES["mixed"], *SHAPES["branches"], *SHAPES["short answers"]]
    assert_a_step_is_that_of_plain_sequences(monkeypatch, shapes, 0.7, **knobs)


FIRST = {re.split("[ ,]", name)[0]: name for name in reversed(LOSSES) if name != "mis_po"}
"""Loss → the first of its rows in the table."""


@pytest.mark.parametrize("name", FIRST.values())
def test_no_loss_sees_that_prefixes_are_shared(name, monkeypatch):
    """Each loss with one of the models and one of two temperatures, in turns."""
    number = list(LOSSES).index(name)
    how = {"model": MODELS[number % 3], "temperature": (0.7, 1.3)[number % 2]}
    shapes = [(9, [3, 7, 5, 2], 1), (8, [4, 12, 10, 5], 2)]
    assert_a_step_is_that_of_plain_sequences(monkeypatch, shapes, 0.9, loss=LOSSES[name], **how)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("model", MODELS)
def test_no_model_sees_that_prefixes_are_shared(model, temperature, monkeypatch):
    knobs = {"model": model, "temperature": temperature, "entropy_bonus": 0.1, "kl_loss": 0.1, "num_minibatches": 2}
    shapes = [(9, [3, 7, 5, 2], 1), (8, [4, 12, 10, 5], 2)]
    assert_a_step_is_that_of_plain_sequences(monkeypatch, shapes, 0.9, **knobs)


@pytest.mark.slow
def test_compiled_layers_share_prefixes_of_any_length(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=lambda graph, _: graph.forward))
    shapes = [(9, [3, 7, 5, 2], 1), (8, [4, 12, 10, 5], 2)]
    assert_a_step_is_that_of_plain_sequences(monkeypatch, shapes, 0.9, compile=True, micro_batch_tokens=40)


class Alive(TorchDispatchMode):
    """Bytes of live tensors made inside: `now()`, and their `peak`."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            tensor = getattr(tensor, "_local_tensor", tensor)
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self):
        self.made = {key: pair for key, pair in self.made.items() if not pair[0].expired()}
        return sum(size for _, size in self.made.values())


def group_of(prompt, answer, size):
    rng = np.random.default_rng(0)
    columns = Columns(Batch(0, 0, [Group(0, family(rng, prompt, [answer] * size))]))
    return columns, np.flatnonzero(columns.lengths)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(300, 6, 30), (60, 40, 6)], ids=["long prompt", "long answers"])
def test_attention_over_paths_of_more_than_micro_batch_tokens_needs_the_memory_of_a_plain_row(shape, half):
    """Per token of the row: memory kept for the backward pass, and peak memory."""

    def bytes_per_token(shape, limit):
        columns, samples = group_of(*shape)
        layout = columns.microbatch(samples, CPU, limit).layout
        tokens = int(layout.ends[-1])
        inputs = [torch.ones(1, heads, tokens, 8, requires_grad=True) for heads in (4, 4, 4)]
        with torch.autocast("cpu", torch.bfloat16, enabled=half), Alive() as alive:
            output = packed_attention(torch.nn.Module(), *inputs, None, 0.5, layout=layout)[0]
            kept = alive.now()
            output.sum().backward()
        return kept / tokens, alive.peak / tokens

    prompt, answer, _ = shape
    plain = bytes_per_token((prompt + answer, answer, 1), 1000)
    shared = bytes_per_token(shape, 500)
    room = bytes_per_token(shape, 1 << 20)
    assert shared[0] <= 1.02 * plain[0] and 1.5 * shared[0] < room[0]
    assert shared[1] <= 3 * plain[1]


def test_copies_are_kept_while_all_paths_fit_and_rows_stay_within_micro_batch_tokens():
    columns, samples = group_of(100, 5, 4)
    total = int(columns.lengths.sum())
    assert not columns.microbatch(samples, CPU, total).layout.lean
    assert columns.microbatch(samples, CPU, total - 1).layout.lean
    columns, samples = group_of(1, 60, 4)  # shares too little, unless the row would be too long
    total = int(columns.lengths.sum())
    assert columns.microbatch(samples, CPU, total).input_ids.shape[1] == total
    assert columns.microbatch(samples, CPU, total - 1).input_ids.shape[1] < total


def test_micro_batches_keep_groups_together_and_count_shared_tokens_once():
    columns = Columns(batch_of([(40, [4] * 4, 1)] * 1 + [(40, [3] * 4, 1), (40, [2] * 4, 1)], seed=3))
    samples = np.flatnonzero(columns.lengths)
    parts = columns.cuts(samples, micro_batch_tokens=120, min_microbatches=1)
    assert sorted(i for part in parts for i in part) == samples.tolist()
    assert sorted(len(part) for part in parts) == [4, 8], "two groups of 40 + 4 · 3 tokens fit, three do not"
    assert all(columns.microbatch(part, CPU, 120).input_ids.shape[1] <= 120 for part in parts)


def test_sequences_that_share_little_stay_plain():
    columns = Columns(batch_of([(1, [20] * 4, 1), (1, [20] * 4, 1)]))
    row = columns.microbatch(np.flatnonzero(columns.lengths), CPU)
    assert row.layout.paths is None and row.input_ids.shape[1] == columns.lengths.sum()
