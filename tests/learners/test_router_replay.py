"""Router replay: the engine's experts decide, the learner's routers weigh them and get their gradient."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_like.models.causal_lm import routers_of, routing_of
from areal_like.types import Batch, Group
from learners.advantages import group
from learners.learner import TorchLearner
from learners.losses.clipped import decoupled_ppo
from learners.packing import Columns
from tests.learners.batches import VOCAB, make_batch, tiny_model
from tests.seeds import seeded, shifted

torch.set_num_threads(1)
SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "num_hidden_layers": 3, "num_experts_per_tok": 2, "initializer_range": 0.3}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
EXPERTS = 5


def moe(kind="qwen3_moe"):
    """Three layers; of Qwen3's the first has no experts."""
    config, model = MixtralConfig(**SHAPE, num_local_experts=EXPERTS), MixtralForCausalLM
    if kind == "qwen3_moe":
        more = {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True}
        config, model = Qwen3MoeConfig(**SHAPE, **more, mlp_only_layers=[0]), Qwen3MoeForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shifted(0))
        return model(config).eval()


def learner_of(model, **knobs):
    return TorchLearner(model, decoupled_ppo, partial(group), lr=1e-2, **{"router_replay": True, **knobs})


def chosen(model, sample):
    """The experts that the model's own forward chooses: uint8 [T - 1, layers, k]."""
    found = []
    hooks = [router.register_forward_hook(lambda m, i, o: found.append(o[2])) for *_, router in routers_of(model)]
    with torch.no_grad():
        model(torch.as_tensor(sample.tokens[None].astype(np.int64)))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)[:-1].numpy().astype(np.uint8)


def with_experts(batch, experts):
    """`experts`: a function of a sample."""
    groups = [
        replace(each, samples=[replace(sample, experts=experts(sample)) for sample in each.samples])
        for each in batch.groups
    ]
    return replace(batch, groups=groups)


def others(sample, layers, seed=3):
    """Experts drawn at random."""
    rng = np.random.default_rng(seed + len(sample.tokens))
    drawn = [rng.permutation(EXPERTS)[:2] for _ in range((len(sample.tokens) - 1) * layers)]
    return np.array(drawn, np.uint8).reshape(-1, layers, 2)


def logprobs_of(learner, batch):
    columns = Columns(batch)
    found = torch.zeros(len(columns.sample))
    for part, logprobs in learner._passes.logprobs(columns, [np.flatnonzero(columns.lengths)]):
        found[part.trained] = logprobs
    return found


def gradient_of(learner, batch):
    """By name, of one step's loss."""
    step = learner._begin(batch)
    learner.optimizer.zero_grad()
    samples = np.flatnonzero(step.columns.lengths)
    for part in learner._passes.microbatches(step.columns, samples):
        learner._forward(step, part, 10.0, True).backward()
    return {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_models_own_experts_change_no_bit_and_others_do(kind):
    batch, model = make_batch(seeded(1)), moe(kind)
    layers = routing_of(model).layers
    assert layers == (2 if kind == "qwen3_moe" else 3)
    own = with_experts(batch, lambda sample: chosen(model, sample))
    learner = learner_of(moe(kind), publish_dtype="float32")
    plain = logprobs_of(learner, batch)
    assert torch.equal(logprobs_of(learner, own), plain)
    assert learner._replay.metrics(learner.ranks)["router/replaced"] == 0
    forced = logprobs_of(learner, with_experts(batch, lambda sample: others(sample, layers)))
    assert (forced - plain).abs().max() > 0.01
    metrics = learner._replay.metrics(learner.ranks)
    assert metrics["router/known"] == 1 and metrics["router/replaced"] > 0.5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_reaches_the_routers_and_the_given_experts_alone(checkpointing):
    batch = with_experts(make_batch(seeded(1)), lambda s: np.tile(np.uint8([3, 1]), (len(s.tokens) - 1, 2, 1)))
    found = gradient_of(learner_of(moe(), checkpoint_activations=checkpointing), batch)
    for name in ("model.layers.1.mlp.", "model.layers.2.mlp."):
        assert found[f"{name}gate.weight"].abs().max() > 0
        by_expert = found[f"{name}experts.down_proj"].abs().amax((1, 2))
        assert (by_expert > 0).tolist() == [False, True, False, True, False], "recomputed layers use the same experts"


def test_micro_batches_and_shared_prefixes_change_no_logprob():
    """Samples share what has equal experts; where these differ a prompt is computed twice."""
    rng, model = seeded(4), moe()
    whole = make_batch(rng)
    prompt = rng.integers(0, VOCAB, 9).astype(np.int32)

    def member(sample, seed):
        tokens = np.concatenate([prompt, sample.tokens[sample.prompt_length :]])
        made = replace(sample, tokens=tokens, prompt_length=len(prompt))
        experts = others(made, 2)
        experts[:8] = others(made, 2, seed)[:8] if seed else np.uint8([2, 4])
        return replace(made, experts=experts)

    samples = [member(sample, seed) for sample, seed in zip(whole.samples[:4], (0, 0, 0, 77), strict=True)]
    batch = Batch(0, whole.version, [Group(0, samples)])
    columns = Columns(batch)
    assert sorted(columns.forest.among(np.arange(4))[1].tolist())[:2] == [0, 0], "one prompt has other experts"
    row = columns.microbatch(np.arange(4), torch.device("cpu"))
    assert row.experts.shape == (row.input_ids.numel(), 2, 2) and row.input_ids.numel() < row.tokens
    learner = learner_of(model, publish_dtype="float32")
    packed = logprobs_of(learner, batch)
    alone = torch.cat([logprobs_of(learner, replace(batch, groups=[Group(0, [each])])) for each in samples])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_a_learner_that_does_not_replay_ignores_experts_and_so_does_the_reference():
    batch = make_batch(seeded(1))
    forced = with_experts(batch, lambda sample: others(sample, 2))
    plain = learner_of(moe(), router_replay=False, publish_dtype="float32")
    assert plain.facts.routing is None
    torch.testing.assert_close(logprobs_of(plain, forced), logprobs_of(plain, batch), rtol=1e-5, atol=1e-6)
    for lora in (None, {"rank": 2, "alpha": 2.0, "targets": ["q_proj"]}):
        learner = learner_of(moe(), kl_loss=0.1, publish_dtype="float32", lora=lora)
        reference = learner._begin(forced).reference
        torch.testing.assert_close(reference, logprobs_of(plain, batch), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"needs a mixture-of-experts model of the kinds mixtral.*this one is of qwen2"
    ):
        learner_of(tiny_model())
