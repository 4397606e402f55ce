"""What of the SGLang engine needs no server: patches, the loader on a model that fuses and cuts up, replies, flags."""

import asyncio

import numpy as np
import pytest
import torch
from torch import nn

from actors.engines import sglang_flags, sglang_loader, sglang_patch, sglang_server
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_flags import Wanted
from actors.engines.sglang_replies import NEUTRAL, joined, piece_of, question
from areal_like.models import publishable, qwen2, tensors_of
from areal_like.types import Limits
from areal_like.weights.digest import lanes_of
from areal_like.weights.state import State, TensorSpec

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
    """A copy in which about this share of the elements is another."""
    other, random = State(state.specs, state.buffer.copy()), torch.Generator().manual_seed(seed)
    for _, tensor in tensors_of(other):
        tensor[torch.rand(tensor.shape, generator=random) < share] *= 1.5
    return other


class Fused(nn.Module):
    """Stores q and k in one parameter, pads it, and of `o` only half of the columns: as rank `rank` of two would."""

    def __init__(self, rank=None, dtype=torch.float32, broken=""):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 5, dtype=dtype))
        self.o = nn.Parameter(torch.zeros(4, 8 if rank is None else 4, dtype=torch.float32))
        self.norm = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.rank, self.broken = rank, broken

    def load_weights(self, weights):
        for name, tensor in weights:
            if self.broken == "values" and tensor.sum().item() > 0:
                continue
            if self.broken == "transposed" and name == "q":
                tensor = tensor.t().contiguous().t()
            if self.broken == "missing" and name == "norm":
                continue
            target = {"q": self.qk.data[:6], "k": self.qk.data[6:9], "o": self.o.data, "norm": self.norm.data}[name]
            if name == "o" and self.rank is not None:
                tensor = tensor.narrow(1, 4 * self.rank, 4)
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


def test_a_rank_takes_its_part_of_a_patch():
    """Dense and scattered alike; its digest alone can't be right: the other rank has the rest."""
    first, second = random_state(0), changed(random_state(0), 0.2)
    for rank in (0, 1):
        model = Fused(rank)
        places = sglang_loader.Places(model, SPECS)
        for patch in (patch_between(None, first), patch_between(first, second)):
            for piece in patch.pieces:
                places.apply(piece)
        whole = dict(tensors_of(second))
        assert torch.equal(model.o, whole["o"][:, 4 * rank : 4 * rank + 4])
        assert torch.equal(model.qk[:6], whole["q"].float())
        with pytest.raises(sglang_loader.LoaderError, match="o: not all of it is stored"):
            places.digest()


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_wrong_weights_are_told_of(share):
    """A patch for other weights than those that are there; a parameter that has been changed meanwhile."""
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
        sglang_loader.apply(model, sglang_patch.read(sglang_patch.question(latest, latest.digest())))


@pytest.mark.parametrize("broken", ["values", "transposed", "missing"])
def test_a_model_that_stores_otherwise_is_left_to_its_own_loader(broken, monkeypatch):
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)  # asks SGLang
    answer = sglang_loader.answered(
        lambda *args, **kwargs: pytest.fail("not for SGLang's own loader"),
        type("Updater", (), {"get_model": lambda self: Fused(broken=broken)})(),
        named_tensors=[("p", torch.from_numpy(sglang_patch.write(random_state(0), random_state(0).digest(), None)))],
        load_format=sglang_loader.LOAD_FORMAT,
    )
    assert answer[0] is False
    assert ("LoaderUnable" in answer[1]) == (broken != "missing")


def test_failures_of_the_servers_own_loader_are_answers_too():
    def original(updater, *, named_tensors, load_format=None):
        raise KeyError("no such tensor")

    assert sglang_loader.answered(original, None, named_tensors=[]) == (False, "KeyError: 'no such tensor'")
    assert sglang_loader.answered(lambda *args, **kwargs: (True, "fine"), None, named_tensors=[]) == (True, "fine")


def test_without_the_plugin_the_loader_raises_nothing(caplog):
    sglang_loader.load(Fused(), [("p", torch.zeros(16, dtype=torch.uint8))])
    assert "not applied" in caplog.text


def test_lanes_are_those_of_the_published_digest():
    words = np.random.default_rng(0).integers(0, 1 << 64, 1000, dtype=np.uint64)
    found = sglang_loader.lanes_of(torch.from_numpy(words.view(np.int64)), 77).numpy().view(np.uint64)
    assert np.array_equal(found, lanes_of(words, 77))


def test_a_patch_is_as_short_as_its_changes():
    state = random_state(0, [TensorSpec("w", "bfloat16", (100, 1000))])
    few, many = changed(state, 0.01), changed(state, 0.5)
    assert sglang_patch.write(few, "d", state).nbytes < 8000
    assert 200_000 < sglang_patch.write(many, "d", state).nbytes < 200_300
    assert sglang_patch.question(state, "d").nbytes < 200


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
    piece = piece_of(answer([7, 8, 9], spans), {"a": 4, "b": 5}, "b")
    assert (piece.tokens.tolist(), piece.runs, piece.first) == ([7, 8, 9], [(4, 2), (5, 1)], "a")
    tokens, logprobs, runs = joined([piece, piece_of(answer([1], [{**spans[1], "start": 0, "end": 1}]), {"b": 5}, "b")])
    assert (tokens.tolist(), len(logprobs), runs) == ([7, 8, 9, 1], 4, [(4, 2), (5, 2)])


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
        piece_of(answer([7, 8], spans), {"a": 4}, "a")


def test_without_spans_only_undisturbed_answers_count():
    assert piece_of(answer([7, 8], None), {"a": 4}, "a").runs == [(4, 2)]
    assert piece_of(answer([7, 8], None), {"a": 4}, None) is None, (
        "an update came meanwhile: of which version are they?"
    )


def test_answers_that_do_not_add_up_are_errors():
    span = [{"version": "a", "start": 0, "end": 1}]
    broken = answer([7], span)
    broken["output_ids"] = [8]
    with pytest.raises(RuntimeError, match="do not agree"):
        piece_of(broken, {"a": 0}, "a")
    with pytest.raises(RuntimeError, match="too long"):
        refused = {"type": "abort", "message": "too long", "status_code": 400}
        piece_of(answer([], [], finish_reason=refused), {"a": 0}, "a")


def test_a_kept_prompt_of_older_weights_is_seen():
    span = [{"version": "b", "start": 0, "end": 1}]
    assert piece_of(answer([7], span, cached_tokens=3), {"b": 5}, "b").is_stale("a")
    assert not piece_of(answer([7], span, cached_tokens=3), {"b": 5}, "b").is_stale("b")
    assert not piece_of(answer([7], span), {"b": 5}, "b").is_stale("a")


def test_a_request_leaves_nothing_to_the_servers_defaults():
    body = question("r", np.array([1, 2, 3]), 1, Limits(10, 0.7, (5,), key=1 << 40 | 3), "label")
    assert body["sampling_params"].items() >= NEUTRAL.items()
    assert body["sampling_params"]["max_new_tokens"] == 9
    assert (body["input_ids"], body["extra_key"], body["return_logprob"]) == ([1, 2, 3], "label", True)
    assert body["sampling_params"]["ignore_eos"] is False, "it would ignore stop tokens as well"
    assert question("r", np.array([1]), 0, Limits(10), None)["sampling_params"]["ignore_eos"] is True


def tiny():
    model = qwen2(0, 20)
    publishable(model)
    return model


@pytest.mark.parametrize(
    "flag", ["preferred_sampling_params", "quantization", "speculative-algorithm", "dtype", "port"]
)
def test_arguments_that_would_change_logprobs_or_are_the_engines_are_refused(flag, tmp_path):
    with pytest.raises(ValueError, match=flag.replace("-", ".")):
        sglang_flags.command(tiny(), tmp_path, Wanted("cpu", None, 1, 8, {flag: "x"}))


def test_a_server_gets_the_config_of_a_model_that_was_made_here(tmp_path):
    arguments, environment = sglang_flags.command(tiny(), tmp_path, Wanted("cpu", None, 2, 8, {"context-length": 99}))
    assert "Qwen2ForCausalLM" in (tmp_path / "model" / "config.json").read_text()
    told = " ".join(arguments)
    for part in (
        "--load-format dummy",
        "--tp-size 2",
        "--dtype float32",
        "--context-length 99",
        "--disable-cuda-graph",
    ):
        assert part in told
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_folder_is_read_by_the_server_itself(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "mine")
    model = type(model).from_pretrained(tmp_path / "mine")
    arguments, _ = sglang_flags.command(model, tmp_path / "other", Wanted("cuda", None, 1, 8, {}))
    assert str(tmp_path / "mine") in arguments and "dummy" not in arguments and "bfloat16" in arguments


FIT = {"custom_weight_loader": [sglang_loader.LOAD_FORMAT], "tp_size": 2, "dp_size": 1, "quantization": None}


def test_a_server_that_fits_is_joined():
    assert sglang_flags.checked(FIT) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantization": "fp8"},
        {"preferred_sampling_params": '{"top_p": 0.9}'},
        {"speculative_algorithm": "EAGLE"},
        {"custom_weight_loader": []},
        {"dp_size": 2},
    ],
)
def test_a_server_whose_logprobs_could_not_be_the_learners_is_refused(wrong):
    with pytest.raises(ValueError):
        sglang_flags.checked({**FIT, **wrong})


def test_the_base_install_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(sglang_server, "aiohttp", None)
    with pytest.raises(ValueError, match=r"\.\[sglang\]"):
        sglang_server.Server("SGLang")


@pytest.mark.parametrize("updated", [True, False])
def test_a_request_that_updates_break_off_again_and_again_is_not_given_up(tmp_path, updated):
    """It waits in a full server, which `pause_mode: abort` empties at each update."""
    engine = SglangEngine(tiny(), tmp_path, url="http://127.0.0.1:9")
    (server,) = engine._servers
    server.ready.set()
    asked = []

    async def post(path, body):
        asked.append(path)
        if len(asked) <= 8:
            if updated:
                engine._label = f"newer-{len(asked)}"
            return answer([], None, finish_reason={"type": "abort", "message": "Abort in waiting queue"})
        return answer([7, 8], [{"version": engine._labels + "-0", "start": 0, "end": 2}])

    server.post = post
    request = engine.generate(np.array([1, 2], np.int32), Limits(2))
    if updated:
        assert asyncio.run(asyncio.wait_for(request, 30)).tokens.tolist() == [7, 8]
    else:
        with pytest.raises(RuntimeError, match="5 answers in a row without a token"):
            asyncio.run(asyncio.wait_for(request, 30))
