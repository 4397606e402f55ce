"""The parts of the SGLang engine that need no server: the loader, patches, replies, flags."""

import asyncio
import base64
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from actors.engines import sglang_digest, sglang_flags, sglang_loader, sglang_patch, sglang_server, sglang_weights
from actors.engines.sglang_boxes import under_stored_names
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_flags import Wanted
from actors.engines.sglang_replies import NEUTRAL, Returned, concatenated, generate_request, reply_of
from actors.engines.sglang_weights import SharedCopy, stored_names
from areal_like.errors import UserError
from areal_like.models.causal_lm import publishable, qwen2, specs_of, tensors_of
from areal_like.models.experts import Routing
from areal_like.types import Limits
from areal_like.weights.digest import lanes_of
from areal_like.weights.state import State, TensorSpec
from areal_like.weights.update import Changes, Update

SPECS = [
    TensorSpec("q", "bfloat16", (6, 5)),
    TensorSpec("k", "bfloat16", (3, 5)),
    TensorSpec("o", "float32", (4, 8)),
    TensorSpec("norm", "bfloat16", (5,)),
]


def random_state(seed, specs=SPECS):
    state, random = State(specs), torch.Generator().manual_seed(seed)
    for _, tensor in tensors_of(state):
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    return state


def changed(state, share, seed=0):
    """A copy with about this share of the elements changed."""
    other, random = State(state.specs, state.buffer.copy()), torch.Generator().manual_seed(seed)
    for _, tensor in tensors_of(other):
        tensor[torch.rand(tensor.shape, generator=random) < share] *= 1.5
    return other


class Fused(nn.Module):
    """A model that holds q and k in one padded parameter."""

    def __init__(self, dtype=torch.float32, broken=""):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 5, dtype=dtype))
        self.o = nn.Parameter(torch.zeros(4, 8))
        self.norm = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.broken = broken

    def load_weights(self, weights):
        for name, tensor in weights:
            if self.broken == "values" and tensor.sum().item() > 0:
                continue
            if self.broken == "transposed" and name == "q":
                tensor = tensor.t().contiguous().t()
            if self.broken == "missing" and name == "norm":
                continue
            target = {"q": self.qk.data[:6], "k": self.qk.data[6:9], "o": self.o.data, "norm": self.norm.data}[name]
            target.copy_(tensor)


def patch_between(base, state):
    return sglang_patch.read(sglang_patch.write(state, state.digest(), base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_bring_fused_parameters_to_just_the_published_bits(dtype):
    model, loaded = Fused(dtype=dtype), Fused(dtype=dtype)
    held = None
    for seed, share in enumerate([1, 0.1, 0.03, 0.5, 0]):
        state = random_state(0) if held is None else changed(held, share, seed)
        assert sglang_loader.apply(model, patch_between(held, state)) == state.digest()
        loaded.load_weights(list(tensors_of(state)))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, dict(loaded.named_parameters())[name]), name
        held = state
    assert not model.qk[9:].any(), "what is padding stays as it is"


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_wrong_weights_are_told_of(share):
    """A patch made for other weights than those held; a parameter that was changed in between."""
    state = random_state(0)
    model = Fused()
    sglang_loader.apply(model, patch_between(None, state))
    later = changed(state, share)
    latest = changed(later, 0.1, 1)
    with pytest.raises(sglang_loader.LoaderError, match="the weights have the digest"):
        sglang_loader.apply(model, patch_between(later, latest))
    sglang_loader.apply(model, patch_between(None, latest))
    model.norm.data[3] += 2.0**-30  # rounds to the same published bits
    with pytest.raises(sglang_loader.LoaderError, match="norm"):
        sglang_loader.apply(model, sglang_patch.read(sglang_patch.digest_probe(latest, latest.digest())))


class Rebinding(Fused):
    """Moves a parameter to other memory after an update, as SGLang does for some kernels."""

    def rebind(self):
        self.norm.data = self.norm.data.clone()


def test_a_parameter_that_is_bound_to_other_memory_gets_the_next_patch_too():
    """Otherwise the patch goes into memory that nobody uses any more, and its digest confirms it."""
    states = [random_state(0)]
    model = Rebinding()
    sglang_loader.apply(model, patch_between(None, states[0]))
    states.append(changed(states[0], 0.3))
    model.rebind()
    assert sglang_loader.apply(model, patch_between(*states)) == states[1].digest()
    assert torch.equal(model.norm.data, dict(tensors_of(states[1]))["norm"].float())


class Derived(Fused):
    """Keeps a weight that it computes from others, like SGLang's models with latent attention."""

    spoils = False

    def post_load_weights(self):
        self.twice = 2 * self.norm.data
        self.o.data[0, 0] += self.spoils


def test_what_a_model_derives_from_its_weights_follows_each_patch():
    model, held = Derived(), None
    for seed, share in enumerate([1, 0.3, 0.1]):
        state = random_state(0) if held is None else changed(held, share, seed)
        assert sglang_loader.apply(model, patch_between(held, state)) == state.digest()
        assert torch.equal(model.twice, 2 * dict(tensors_of(state))["norm"].float())
        held = state
    model.twice = None
    sglang_loader.apply(model, sglang_patch.read(sglang_patch.digest_probe(held, held.digest())))
    assert model.twice is None, "a question changes nothing"
    model.spoils = True
    with pytest.raises(sglang_loader.LoaderError, match="the weights have the digest"):
        sglang_loader.apply(model, patch_between(held, changed(held, 0.1, 9)))


class Aside(Fused):
    """Moves a tensor into memory that belongs to no parameter."""

    def __init__(self):
        super().__init__()
        self.aside = torch.zeros(5)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.aside.copy_(tensor) if name == "norm" else super().load_weights([(name, tensor)])


def answer_of(model, patch, **more):
    """The answer of a server with this model to a patch (uint8, or its parts)."""
    own = {"get_model": lambda self: model, **more}
    return sglang_loader.answered(
        lambda *args, **kwargs: pytest.fail("not for SGLang's own loader"),
        type("Updater", (), {"__module__": __name__, **own})(),
        named_tensors=[("p", torch.from_numpy(patch))],
        load_format=sglang_loader.LOAD_FORMAT,
    )


def inactive(self, what):
    raise RuntimeError(f"{what}: the weight cache is active")


@pytest.mark.parametrize(
    ("model", "more", "why"),
    [
        (Fused(broken="missing"), {}, "LoaderRefused: norm: SGLang's model has no place"),
        (Fused(), {"_assert_weight_cache_inactive": inactive}, "LoaderRefused: update_weights_from_tensor: the weight"),
        (Aside(), {}, "LoaderRefused: norm: the model's loader puts it elsewhere"),
        (Fused(broken="transposed"), {}, "LoaderRefused: "),
        (Fused(broken="values"), {}, "LoaderRefused: "),
    ],
    ids=["unknown name", "SGLang's own", "aside", "transposed", "values"],
)
def test_what_can_not_be_followed_is_never_confirmed(model, more, why, monkeypatch):
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)  # asks SGLang
    state = random_state(0)
    success, said = answer_of(model, sglang_patch.write(state, state.digest(), None), **more)
    assert not success and said.startswith(why)


def test_lanes_are_those_of_the_published_digest():
    words = np.random.default_rng(0).integers(0, 1 << 64, 1000, dtype=np.uint64)
    found = sglang_digest.lanes_of(torch.from_numpy(words.view(np.int64)), torch.arange(77, 1077))
    assert np.array_equal(found.numpy().view(np.uint64), lanes_of(words, 77))


def copied(state):
    return State(state.specs, state.buffer.copy())


def test_held_weights_follow_updates_and_lie_where_a_server_can_read_them():
    """Written whole, or from an update's changes if these were made from the held version."""
    states = [random_state(0)]
    for seed in (1, 2):
        states.append(changed(states[-1], 0.2, seed))
    held = SharedCopy(copied(states[0]), {})
    assert held.advance(Update(0, "d0", states[0])) is None, "what servers have is not known"
    everywhere = Changes("d0", {i: [slice(0, spec.count)] for i, spec in enumerate(states[0].specs)})
    for version, changes in enumerate([everywhere, Changes("of other weights")], 1):
        state, before = states[version], copied(held.state)
        patch = sglang_patch.read(held.advance(Update(version, f"d{version}", state, changes)))
        assert np.array_equal(held.state.buffer, state.buffer) and held.digest == f"d{version}"
        assert np.array_equal(np.fromfile(held._bytes.path, np.uint8), state.buffer)
        by_name = {spec.name: bits for spec, bits in before.tensors()}
        for change in patch.changes:
            by_name[change.spec.name][slice(None) if change.places is None else change.places] = change.bits
        assert np.array_equal(before.buffer, state.buffer)
    held.close()


def test_experts_go_by_the_names_of_checkpoints():
    """The names are those that transformers writes; dense models need no renaming."""
    config = Qwen3MoeConfig(
        vocab_size=10, hidden_size=8, intermediate_size=8, moe_intermediate_size=12, num_hidden_layers=1, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, num_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    stored = stored_names(model, specs_of(model))
    assert {name.rpartition(".")[2] for name in stored} == {"gate_up_proj", "down_proj"}
    found = dict(under_stored_names(dict(model.named_parameters()), stored))
    expected = revert_weight_conversion(model, dict(model.named_parameters()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert stored_names(tiny(), specs_of(tiny())) == {}


def test_what_is_no_patch_is_refused():
    state = random_state(0)
    good = sglang_patch.write(changed(state, 0.1), "d", state)
    hostile = [good[:-8], good[:4], np.zeros(64, np.uint8), np.concatenate([good, np.zeros(8, np.uint8)])]
    far = good.copy()
    head = int(good[:8].view("<u8")[0])
    at = 8 + -(-head // 8) * 8
    far[at : at + 4] = 255
    for data in (*hostile, far):
        with pytest.raises(sglang_patch.PatchError):
            sglang_patch.read(data)


def answer(tokens, spans, **meta):
    rows = [[-0.5, token, None] for token in tokens]
    finish = {"finish_reason": {"type": "length"}, "output_token_logprobs": rows, "weight_versions": spans}
    return {"output_ids": tokens, "meta_info": {**finish, "cached_tokens": 0, **meta}}


def test_versions_come_from_the_spans():
    spans = [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}]
    reply = reply_of(answer([7, 8, 9], spans), {"a": 4, "b": 5})
    assert (reply.tokens.tolist(), reply.runs, reply.first) == ([7, 8, 9], [(4, 2), (5, 1)], "a")
    rest = reply_of(answer([1], [{**spans[1], "start": 0, "end": 1}]), {"b": 5})
    done = concatenated([reply, rest], "stop")
    assert (done.tokens.tolist(), len(done.logprobs), done.runs) == ([7, 8, 9, 1], 4, [(4, 2), (5, 2)])
    assert (done.finish, done.experts) == ("stop", None)


def test_experts_come_of_the_layers_that_have_them_and_of_the_positions_asked_for():
    returned, span = Returned([0, 2], 3, Routing(2, 2, 300)), [{"version": "a", "start": 0, "end": 2}]
    body = generate_request("r", np.array([1, 2, 3]), 0, Limits(10), None, 1)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)
    assert "return_routed_experts" not in generate_request("r", np.array([1]), 0, Limits(10), None)
    sent = np.arange(18, dtype=np.int32).reshape(3, 3, 2) + 270  # behind position 1 of 3 tokens and of one sampled
    meta = {"routed_experts": base64.b64encode(sent.tobytes()).decode()}
    first = reply_of(answer([7, 8], span, **meta), {"a": 4}, returned, 2)
    assert first.experts.dtype == np.uint16 and first.experts.tolist() == sent[:, [0, 2]].tolist()
    last = replace(first, tokens=first.tokens[:1], experts=first.experts[:1])
    none = replace(first, tokens=first.tokens[:0], experts=None)  # an abort that found it waiting
    assert len(concatenated([none, first, last], "length").experts) == 4
    for wrong, words in (
        ({}, "returns no experts"),
        ({"routed_experts": base64.b64encode(sent[1:].tobytes()).decode()}, "not those of 3 positions"),
        ({"routed_experts": base64.b64encode((sent + 20).tobytes()).decode()}, "from 290 to 307"),
    ):
        with pytest.raises(RuntimeError, match=words):
            reply_of(answer([7, 8], span, **wrong), {"a": 4}, returned, 2)


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "x", "start": 0, "end": 2}],
        [{"version": "a", "start": 0, "end": 1}],
        [{"version": "a", "start": 1, "end": 2}],
        [{"version": "a", "start": 0, "end": 3}],
    ],
)
def test_tokens_of_unknown_weights_are_an_error(spans):
    with pytest.raises(RuntimeError):
        reply_of(answer([7, 8], spans), {"a": 4})


def test_answers_that_do_not_add_up_are_errors():
    span = [{"version": "a", "start": 0, "end": 1}]
    broken = answer([7], span)
    broken["output_ids"] = [8]
    with pytest.raises(RuntimeError, match="do not agree"):
        reply_of(broken, {"a": 0})
    with pytest.raises(RuntimeError, match="too long"):
        refused = {"type": "abort", "message": "too long", "status_code": 400}
        reply_of(answer([], [], finish_reason=refused), {"a": 0})


def test_a_kept_prompt_of_older_weights_is_seen():
    span = [{"version": "b", "start": 0, "end": 1}]
    assert reply_of(answer([7], span, cached_tokens=3), {"b": 5}).is_stale("a")
    assert not reply_of(answer([7], span, cached_tokens=3), {"b": 5}).is_stale("b")
    assert not reply_of(answer([7], span), {"b": 5}).is_stale("a")


def test_a_request_leaves_nothing_to_the_servers_defaults():
    body = generate_request("r", np.array([1, 2, 3]), 1, Limits(10, 0.7, (5,), key=1 << 40 | 3), "label")
    assert body["sampling_params"].items() >= NEUTRAL.items()
    assert body["sampling_params"]["max_new_tokens"] == 9
    assert (body["input_ids"], body["extra_key"], body["return_logprob"]) == ([1, 2, 3], "label", True)
    assert body["sampling_params"]["ignore_eos"] is False, "it would ignore stop tokens as well"
    assert generate_request("r", np.array([1]), 0, Limits(10), None)["sampling_params"]["ignore_eos"] is True


def tiny():
    model = qwen2(0, 20)
    publishable(model)
    return model


@pytest.mark.parametrize(
    "flag",
    [
        "preferred_sampling_params",
        "quantization",
        "speculative-algorithm",
        "dtype",
        "port",
        "pp-size",
        "kv_cache_dtype",
        "weight-cache-mode",
        "enable_dp_attention",
        "torchao-config",
    ],
)
def test_arguments_that_would_change_logprobs_or_are_the_engines_are_refused(flag, tmp_path):
    with pytest.raises(ValueError, match=flag.replace("-", ".").replace("_", ".")):
        sglang_flags.command(tiny(), tmp_path, Wanted("cpu", None, 1, 8, {flag: "x"}))


def test_models_that_servers_can_not_follow_are_refused_at_once(tmp_path):
    for name, value in (("quantization_config", {"quant_method": "fp8"}), ("kv_lora_rank", 512)):
        model = tiny()
        setattr(model.config, name, value)
        with pytest.raises(ValueError, match=name):
            SglangEngine(model, tmp_path)


def test_a_refusal_ends_the_engine_and_is_not_tried_again(tmp_path):
    """Another server would refuse it too."""

    class Server:
        name, ranks = "SGLang", 1

        async def post(self, path, body, extra=0.0):
            raise sglang_server.ServerRefused("400 LoaderRefused: norm: SGLang's model has no place for it")

    held = SharedCopy(random_state(0), {})
    with pytest.raises(UserError, match=r"no place for it"):
        asyncio.run(sglang_weights._send(Server(), held.probe(), held))
