"""Options that change how a step is computed, but not its result: each against the plain learner, on one rank."""

import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_like.models.causal_lm import layers_of
from learners import logprobs as logprobs_module
from learners import sharding
from learners.adapters import Merged
from learners.advantages import group
from learners.attention import use_packed_attention
from learners.learner import TorchLearner
from learners.logprobs import forward_logprobs, use_logprob_head
from learners.losses.bounded import gspo
from learners.losses.clipped import decoupled_ppo
from learners.losses.weighted import reinforce
from learners.packing import Columns
from learners.sharding import hold_in
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.learners.exact import exact
from tests.rounding import summed
from tests.seeds import seeded


def learner_of(loss=decoupled_ppo, **knobs) -> TorchLearner:
    knobs = {"num_minibatches": 1, "entropy_bonus": 0.1, "clip_grad": 0.0, "publish_dtype": "float32"} | knobs
    return TorchLearner(tiny_model(), loss, partial(group), 0.9, 0, **knobs)


def gradient_of(learner: TorchLearner) -> torch.Tensor:
    learner.train(make_batch(seeded(0)))
    return learner.optimizer.gradient.clone()


@pytest.mark.parametrize("max_logits", [1, 3 * VOCAB, 7 * VOCAB + 5])
def test_logprobs_and_entropy_in_pieces_are_those_of_the_whole_and_logits_are_never_whole(max_logits, monkeypatch):
    real, widths = logprobs_module._logits, []
    monkeypatch.setattr(logprobs_module, "_logits", lambda *a: (widths.append(len(a[0])), real(*a))[1])
    columns, rng = Columns(make_batch(seeded(1))), seeded(2)
    row = columns.microbatch(np.arange(len(columns.own)), torch.device("cpu"))
    weights = torch.from_numpy(rng.normal(size=(2, len(row.targets))))
    found = []
    for most in (1 << 20, max_logits):
        model = exact(tiny_model())
        widths.clear()
        use_packed_attention(model)
        use_logprob_head(model, most)
        logprobs, entropy = forward_logprobs(model, row, 0.7)
        (logprobs @ weights[0] + entropy @ weights[1]).backward()
        found.append((logprobs.detach(), entropy.detach(), *(p.grad for p in model.parameters())))
        assert max(widths) == min(len(row.targets), max(1, most // VOCAB)), "forward and backward"
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, **summed(torch.float64, 2048, 40, scale=whole.abs().max().item()))


def test_recomputed_activations_give_the_same_gradient_for_a_second_forward_pass_of_each_layer():
    plain, again = learner_of(), learner_of(checkpoint_activations=True)
    passes: list[TorchLearner] = []
    for learner in (plain, again):
        layers_of(learner.model)[0].input_layernorm.register_forward_hook(lambda *_, of=learner: passes.append(of))
    torch.testing.assert_close(gradient_of(again), gradient_of(plain), rtol=0, atol=0)
    assert passes.count(again) == 2 * passes.count(plain)


def test_layers_with_weights_in_bfloat16_have_the_same_weights_and_add_gradients_up_in_float32():
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype", "publish_dtype"), "bfloat16")
    knobs = {"micro_batch_tokens": 23, "checkpoint_activations": True, "kl_loss": 0.1, "entropy_bonus": 0.0}
    plain, half = learner_of(reinforce, publish_dtype="bfloat16"), learner_of(reinforce, **dtypes, **knobs)
    seen = []
    layers_of(half.model)[1].register_forward_hook(lambda m, args, output: seen.append(output.dtype))
    assert half.snapshot().digest() == plain.snapshot().digest(), "nothing is rounded"
    expected, gradient = gradient_of(plain), gradient_of(half)
    assert {p.dtype for model in (half.model, half._reference) for p in model.parameters()} == {torch.bfloat16}
    assert set(seen) == {gradient.dtype} == {torch.float32}
    assert half._reference.model.rotary_emb.inv_freq.dtype == torch.float32
    assert 0.97 < torch.nn.functional.cosine_similarity(gradient, expected, dim=0).item() < 1 - 1e-7
    assert not torch.equal(gradient, gradient.bfloat16().float()), "micro-batches add up in float32"
    masters = half.optimizer.state_dict()["master"].bfloat16()
    assert torch.equal(masters, half.optimizer._weights), "parameters are rounded masters"
    assert all(p.grad is None for p in half.model.parameters())


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_weights_in_bfloat16_round_logprobs_as_autocast_does(kind):
    found, sequences = [], [[(k * i + k) % VOCAB for i in range(60)] for k in range(1, 9)]
    for params, compute in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        knobs = {"param_dtype": params, "compute_dtype": compute, "publish_dtype": "bfloat16"}
        learner = TorchLearner(tiny_model(kind), reinforce, partial(group), **knobs)
        found.append(learner.logprobs_of(sequences)[0])
    assert found[2] == found[1] != found[0]


HELD = {("bfloat16", "cpu", False): True, (None, "cuda", False): True, (None, "cpu", False): False}
HELD |= {("float32", "cuda", False): False, (None, "cpu", True): True, ("float32", "cpu", True): False}


def test_weights_are_held_in_bfloat16_only_where_that_rounds_none():
    model, half = tiny_model(), "bfloat16"
    found = [hold_in(params, half, half, model, where, lora) for params, where, lora in HELD]
    assert found == [torch.bfloat16 if held else None for held in HELD.values()]
    for wrong in ((half, "float32", half, model, "cpu", False), (half, half, "float32", model, "cpu", True)):
        with pytest.raises(ValueError, match="param_dtype=bfloat16 needs"):
            hold_in(*wrong)


def test_frozen_matrices_in_bfloat16_beside_adapters_change_no_bit():
    knobs = dict.fromkeys(("compute_dtype", "publish_dtype"), "bfloat16") | {"lora": {"rank": 2}, "lr": 1e-2}
    half, whole = learner_of(**knobs), learner_of(**knobs, param_dtype="float32")
    for index in range(2):
        batch = make_batch(seeded(index), index=index)
        assert half.train(batch) == whole.train(batch)
        assert half.snapshot().digest() == whole.snapshot().digest()
    dtypes = {name: p.dtype for name, p in half.model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("base_layer.weight")} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("base_layer.weight")} == {torch.float32}


def test_published_and_saved_weights_are_merged_one_matrix_at_a_time(monkeypatch, tmp_path):
    made, alive, look_up = [], [], Merged.__getitem__

    def counted(self, name):
        value = look_up(self, name)
        if name in self._adapted:
            made.append(weakref.ref(value))
            alive.append(sum(each() is not None for each in made))
        return value

    monkeypatch.setattr(Merged, "__getitem__", counted)
    learner = learner_of(lora={"rank": 2})
    learner.snapshot(), learner.save(str(tmp_path))
    assert len(made) == 2 * 2 * 7 and max(alive) <= 2, "of two layers, twice: the newest, and the one that is copied"


class Waits(TorchDispatchMode):
    """Counts how often Python reads a number from a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", [decoupled_ppo, gspo])
def test_nothing_waits_for_the_device_once_per_micro_batch(loss):
    counts = []
    for micro_batch_tokens in (1000, 1):
        learner = learner_of(loss, micro_batch_tokens=micro_batch_tokens, entropy_bonus=0.0)
        with Waits() as waits:
            learner.train(make_batch(seeded(0)))
        counts.append(waits.count)
    assert counts[0] == counts[1], "one micro-batch, and one for each sample"


def test_compiled_layers_have_as_many_graphs_whatever_the_batch(monkeypatch):
    """Batches of other shapes: equal lengths, one sample, shared prompts, long ones. The losses are those of a plain
    learner."""
    graphs, counts = [], []
    backend = {"backend": lambda graph, inputs: (graphs.append(graph), graph.forward)[1]}  # no C++ compiler: seconds
    monkeypatch.setattr(torch, "compile", partial(torch.compile, **backend))
    monkeypatch.setattr(sharding, "COMPILED", {"cpu"})  # the logprob head, too
    torch._dynamo.reset()
    compiled, plain = (learner_of(micro_batch_tokens=40, compile=compiled) for compiled in (True, False))
    for index in range(7):
        batch = make_batch(seeded(index), index=index, groups=1 + index % 4)
        for made in batch.groups:
            for sample in made.samples[: 1 + index % 3] if index % 2 else []:
                sample.tokens[: sample.prompt_length] = made.samples[0].tokens[: sample.prompt_length]
        assert compiled.train(batch)["loss"] == pytest.approx(plain.train(batch)["loss"], rel=1e-4, abs=1e-6)
        counts.append(len(graphs))
    torch.testing.assert_close(compiled.optimizer.gradient, plain.optimizer.gradient, rtol=1e-3, atol=1e-5)
    assert 0 < counts[4] == counts[-1] <= 12, counts


def test_a_model_that_changes_its_logits_behind_the_head_is_refused():
    model = tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        use_logprob_head(model, 1 << 20)
