"""The parts of the SGLang engine that need no server: loader, patches, replies, flags. The rest: `tests/sglang`."""

import asyncio
import base64
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from actors.engines import sglang_flags, sglang_loader, sglang_server, sglang_weights
from actors.engines.sglang_boxes import read
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_loader import LoaderError
from actors.engines.sglang_replies import NEUTRAL, Returned, generate_request, reply_of
from actors.engines.sglang_weights import SharedBytes, SharedCopy
from areal_like.errors import UserError
from areal_like.models.causal_lm import publishable, qwen2, tensors_of
from areal_like.models.experts import Routing
from areal_like.types import Limits
from areal_like.weights.replica import Changes, Update
from areal_like.weights.state import State, TensorSpec

SPECS = [
    TensorSpec("q", "bfloat16", (6, 5)),
    TensorSpec("k", "bfloat16", (3, 5)),
    TensorSpec("o", "float32", (4, 8)),
    TensorSpec("norm", "bfloat16", (5,)),
]


def random_state(seed):
    state, random = State(SPECS), torch.Generator().manual_seed(seed)
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
    """A model that holds q and k in one padded parameter, and computes a weight from others."""

    def __init__(self, dtype=torch.float32, broken=""):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 5, dtype=dtype))
        self.o = nn.Parameter(torch.zeros(4, 8))
        self.norm = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.broken, self.aside = broken, torch.zeros(5)

    def load_weights(self, weights):
        targets = {"q": self.qk.data[:6], "k": self.qk.data[6:9], "o": self.o.data, "norm": self.norm.data}
        for name, tensor in weights:
            if self.broken == "values" and tensor.sum().item() > 0:
                continue
            if self.broken == "transposed" and name == "q":
                tensor = tensor.t().contiguous().t()
            if self.broken == "missing" and name == "norm":
                continue
            (self.aside if self.broken == "aside" and name == "norm" else targets[name]).copy_(tensor)

    def post_load_weights(self):
        self.twice = 2 * self.norm.data
        if self.broken == "derived":
            self.o.data[0, 0] += 1


def shared_bytes(patch):
    shared = SharedBytes(len(patch))
    shared.array[:] = np.frombuffer(patch, np.uint8)
    return shared


def patched(model, patch):
    """Apply a patch as a server does → the digest."""
    return sglang_loader.apply(model, read(shared_bytes(patch).path))


def held_by(state):
    held = SharedCopy(state, {})
    held.digest = state.digest()
    return held


def update_to(state, changes=None):
    return Update(1, state.digest(), state, changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_bring_fused_parameters_to_just_the_published_bits(dtype):
    """From an update's changes if these were made from the held version, else compared as a whole. One parameter is
    bound to other memory in between, as SGLang does for some kernels."""
    model, loaded, state = Fused(dtype), Fused(dtype), random_state(0)
    held = held_by(state)
    assert patched(model, held.whole()) == state.digest()
    for seed, share in enumerate([0.1, 0.03, 0.5, 0]):
        state = changed(state, share, seed)
        model.norm.data = model.norm.data.clone()
        everywhere = {i: [slice(0, spec.count)] for i, spec in enumerate(SPECS)}
        changes = Changes(held.digest, everywhere) if seed % 2 else Changes("of other weights")
        assert patched(model, held.advance(update_to(state, changes))) == state.digest() == held.digest
        assert np.array_equal(np.fromfile(held._bytes.path, np.uint8), state.buffer)
        loaded.load_weights(list(tensors_of(state)))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, dict(loaded.named_parameters())[name]), name
        assert torch.equal(model.twice, 2 * model.norm.data)
    assert not model.qk[9:].any(), "what is padding stays as it is"
    model.twice = None
    patched(model, held.patch({}))
    assert model.twice is None, "a comparison changes nothing"


def test_wrong_weights_are_never_confirmed():
    """A patch for other weights than those held; a parameter, or a copy, that was changed in between."""
    model, held = Fused(), held_by(random_state(0))
    patched(model, held.whole())
    held.advance(update_to(changed(held.state, 0.2)))
    with pytest.raises(LoaderError, match="the weights have the digest"):
        patched(model, held.advance(update_to(changed(held.state, 0.1, 1))))
    patched(model, held.whole())
    model.norm.data[3] += 2.0**-30  # rounds to the same published bits
    with pytest.raises(LoaderError, match="norm"):
        patched(model, held.patch({}))
    model.broken = "derived"
    with pytest.raises(LoaderError, match="the weights have the digest"):
        patched(model, held.whole())


class Tied(Fused):
    """Holds the norm twice."""

    def __init__(self):
        super().__init__()
        self.again = nn.Parameter(torch.zeros(5))

    def load_weights(self, weights):
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name == "norm":
                self.again.data.copy_(tensor)


def test_copies_of_a_tensor_count_once_and_must_be_equal():
    model, held = Tied(), held_by(random_state(0))
    assert patched(model, held.whole()) == held.digest
    model.again.data[2] = 1
    with pytest.raises(LoaderError, match="copies of the weights differ: norm"):
        patched(model, held.patch({}))


@pytest.mark.parametrize("broken", ["missing", "aside", "transposed", "values"])
def test_a_model_that_can_not_be_followed_is_refused(broken, monkeypatch):
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)  # asks SGLang
    held = held_by(random_state(0))
    shared = shared_bytes(held.whole())
    updater = type("Updater", (), {"__module__": __name__, "get_model": lambda self: Fused(broken=broken)})()
    path = torch.frombuffer(bytearray(shared.path.encode()), dtype=torch.uint8)
    success, message = sglang_loader.answered(
        None, updater, named_tensors=[("p", path)], load_format=sglang_loader.LOAD_FORMAT
    )
    assert not success and message.startswith("LoaderRefused: ")


def test_a_refusal_ends_the_engine_and_is_not_tried_again():
    """Another server would refuse it too."""

    class Server:
        name, ranks = "SGLang", 1

        async def post(self, path, body, extra=0.0):
            raise sglang_server.ServerRefused("400 LoaderRefused: norm: SGLang's model has no place for it")

    held = held_by(random_state(0))
    with pytest.raises(UserError, match=r"no place for it"):
        asyncio.run(sglang_weights._send(Server(), held.whole(), held))


def answer(tokens, spans, **meta):
    rows = [[-0.5, token, None] for token in tokens]
    finish = {"finish_reason": {"type": "length"}, "output_token_logprobs": rows, "weight_versions": spans}
    return {"output_ids": tokens, "meta_info": {**finish, "cached_tokens": 0, **meta}}


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def test_experts_come_of_the_layers_that_have_them_and_of_the_positions_asked_for():
    returned, spans = Returned([0, 2], 3, Routing(2, 2, 300)), [span("a", 0, 2)]
    sent = np.arange(18, dtype=np.int32).reshape(3, 3, 2) + 270  # behind position 1 of 3 tokens and of one sampled
    right, short, large = (base64.b64encode(each.tobytes()).decode() for each in (sent, sent[1:], sent + 20))
    found = reply_of(answer([7, 8], spans, routed_experts=right), {"a": 4}, returned, 2).experts
    assert found.dtype == np.uint16 and found.tolist() == sent[:, [0, 2]].tolist()
    for wrong in ({}, {"routed_experts": short}, {"routed_experts": large}):
        with pytest.raises(RuntimeError, match="experts"):
            reply_of(answer([7, 8], spans, **wrong), {"a": 4}, returned, 2)


@pytest.mark.parametrize(
    "broken",
    [
        answer([7, 8], [span("x", 0, 2)]),
        answer([7, 8], [span("a", 0, 1)]),
        answer([7, 8], [span("a", 1, 2)]),
        answer([7, 8], [span("a", 0, 3)]),
        answer([7, 8], [span("a", 0, 2)]) | {"output_ids": [8, 8]},
        answer([7], [span("a", 0, 1)], output_token_logprobs=[[float("nan"), 7, None]]),
        answer([], [], finish_reason={"type": "abort", "message": "too long", "status_code": 400}),
    ],
)
def test_answers_that_do_not_add_up_and_tokens_of_unknown_weights_are_errors(broken):
    with pytest.raises(RuntimeError):
        reply_of(broken, {"a": 4})


@pytest.mark.parametrize(("cached", "label", "stale"), [(3, "a", True), (3, "b", False), (0, "a", False)])
def test_a_kept_prompt_of_older_weights_is_seen(cached, label, stale):
    assert reply_of(answer([7], [span("b", 0, 1)], cached_tokens=cached), {"b": 5}).is_stale(label) == stale


def test_a_request_leaves_nothing_to_the_servers_defaults():
    body = generate_request("r", np.array([1, 2, 3]), 1, Limits(10, 0.7, (5,), key=1 << 40 | 3), "label")
    assert body["sampling_params"].items() >= {**NEUTRAL, "max_new_tokens": 9, "ignore_eos": False}.items()
    assert (body["input_ids"], body["extra_key"], body["return_logprob"]) == ([1, 2, 3], "label", True)
    assert generate_request("r", np.array([1]), 0, Limits(10), "")["sampling_params"]["ignore_eos"] is True


@pytest.mark.parametrize(
    "flag", ["preferred_sampling_params", "quantization", "speculative-algorithm", "dtype", "port", "kv_cache_dtype"]
)
def test_arguments_that_would_change_logprobs_or_are_the_engines_are_refused(flag, tmp_path):
    with pytest.raises(ValueError, match=flag.replace("_", "-")):
        SglangEngine(tiny(), tmp_path, device="cpu", server={flag: "x"})


def test_servers_share_slots_and_take_devices_in_a_row(tmp_path):
    knobs = {"device": "cuda", "dtype": "bfloat16", "tp_size": 2, "replicas": 2, "slots": 9, "more": {"page_size": 4}}
    commands, _ = sglang_flags.commands(tiny(), tmp_path, **knobs)
    for index, arguments in enumerate(commands):
        pairs = dict(pairwise(arguments))
        assert pairs["--base-gpu-id"] == str(2 * index) and pairs["--page-size"] == "4"
        assert pairs["--max-running-requests"] == "5"


def tiny():
    model = qwen2(0, 20)
    publishable(model)
    return model


def test_models_that_servers_can_not_follow_are_refused_at_once(tmp_path):
    for name, value in (("quantization_config", {"quant_method": "fp8"}), ("kv_lora_rank", 512)):
        model = tiny()
        setattr(model.config, name, value)
        with pytest.raises(ValueError, match=name):
            SglangEngine(model, tmp_path)
