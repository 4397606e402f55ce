"""Shared prefixes: the tree has each token once, and model, loss and train step give the same results."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_like.types import Batch, Group
from learners import attention, packing
from learners.advantages import group
from learners.attention import packed_attention
from learners.learner import TorchLearner
from learners.losses.bounded import gspo
from learners.losses.clipped import decoupled_ppo, ppo
from learners.packing import Columns
from learners.prefixes import Forest, cut, paths
from learners.row_layout import RowLayout
from tests.learners.batches import assert_metrics_close, make_sample, tiny_model
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
    made = [make_sample(rng, prompt=prompt, response=response, masked=0.2) for response in responses]
    for sample in made[1:]:
        first, common = made[0].tokens, prompt
        if turns > 1:
            common += min(sample.response_length, made[0].response_length) // turns
        sample.tokens[:common] = first[:common]
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


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_attention_over_a_tree_is_that_of_each_sequence_alone(shapes, window, lean, monkeypatch):
    """In float64, where both give the same numbers and gradients."""
    columns = Columns(batch_of(shapes))
    samples = np.flatnonzero(columns.lengths)
    order, shared = columns.forest.among(samples)
    lengths = columns.lengths[samples[order]]
    found = paths(lengths, shared)
    tokens, rng = int((lengths - shared).sum()), torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, heads, tokens, 4, generator=rng, dtype=torch.float64) for heads in (4, 2, 2)]
    weights, calls = torch.randn(tokens, 4, 4, generator=rng, dtype=torch.float64), []
    attend = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda *a: (calls.append(1), attend(*a))[1])

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
    calls.clear()
    gradients = torch.autograd.grad((output * weights).sum(), tree)
    assert bool(calls) == lean, "what attention copies is not kept, but made again"
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
    {"loss": LOSSES["tpo {'temperature': 0.7}"], "model": "llama"},
    {"loss": ppo, "num_minibatches": 2, "entropy_bonus": 0.05, "model": "qwen3", "temperature": 1.3},
    {"loss": gspo, "normalise": "sequence_mean"},
    {"loss": LOSSES["dg_kondo, cispo"], "micro_batch_tokens": 60},
    {"normalise": 16.0, "kl_loss": 0.1, "kl_reward": 0.1},
    {"checkpoint_activations": True, "max_logits": 100, "micro_batch_tokens": 90, "packing": "balanced"},
    {"lora": {"rank": 2}},
]


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


def group_of(prompt, answer, size):
    rng = np.random.default_rng(0)
    columns = Columns(Batch(0, 0, [Group(0, family(rng, prompt, [answer] * size))]))
    return columns, np.flatnonzero(columns.lengths)


def test_copies_are_kept_while_all_paths_fit_and_rows_stay_within_micro_batch_tokens():
    columns, samples = group_of(100, 5, 4)
    total = int(columns.lengths.sum())
    assert not columns.microbatch(samples, CPU, total).layout.lean
    assert columns.microbatch(samples, CPU, total - 1).layout.lean
    columns, samples = group_of(1, 60, 4)  # shares too little, unless the row would be too long
    total = int(columns.lengths.sum())
    plain = columns.microbatch(samples, CPU, total)
    assert plain.input_ids.shape[1] == total and plain.layout.paths is None
    assert columns.microbatch(samples, CPU, total - 1).input_ids.shape[1] < total
