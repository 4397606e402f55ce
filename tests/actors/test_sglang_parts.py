"""The parts of the SGLang engine that need no server: patches, replies, flags."""

import asyncio
import base64
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from actors.engines import sglang_flags, sglang_loader, sglang_patch, sglang_server, sglang_weights
from actors.engines.sglang_boxes import under_stored_names
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_flags import Wanted
from actors.engines.sglang_names import stored_names
from actors.engines.sglang_replies import NEUTRAL, Pieces, Returned, concatenated, generate_request, reply_of
from actors.engines.sglang_shared import SharedCopy
from areal_like.errors import UserError
from areal_like.models.causal_lm import publishable, qwen2, specs_of, tensors_of
from areal_like.models.experts import Routing
from areal_like.types import Limits
from areal_like.weights.changes import Changes
from areal_like.weights.state import State, TensorSpec
from areal_like.weights.update import Update
from tests.actors.test_sglang_loader import SPECS, Fused, changed, random_state


def test_a_patch_is_as_short_as_its_changes():
    state = random_state(0, [TensorSpec("w", "bfloat16", (100, 1000))])
    few, many = changed(state, 0.01), changed(state, 0.5)
    assert sglang_patch.write(few, "d", state).nbytes < 8000
    assert 200_000 < sglang_patch.write(many, "d", state).nbytes < 200_300
    assert sglang_patch.digest_probe(state, "d").nbytes < 200


def test_a_patch_compares_only_what_is_said_to_have_changed():
    state = random_state(0)
    new = changed(state, 0.3)
    (_, q), (_, k), *_ = new.tensors()
    changes = Changes("", {0: [slice(3, 9), np.array([20, 4], np.int64)], 1: [np.array([7, 7], np.int64)]})
    patch = sglang_patch.read(sglang_patch.write(new, "d", state, changes))
    old = [bits for _, bits in state.tensors()]
    expected = {0: [at for at in [*range(3, 9), 20] if q[at] != old[0][at]], 1: [7] if k[7] != old[1][7] else []}
    found = {change.spec.name: change.places.tolist() for change in patch.changes}
    assert found == {state.specs[i].name: at for i, at in expected.items() if at} and found


def copied(state):
    return State(state.specs, state.buffer.copy())


def test_held_weights_follow_updates_and_lie_where_a_server_can_read_them():
    """Written whole, or from an update's changes if these were made from what is held."""
    states = [random_state(0)]
    for seed in (1, 2):
        states.append(changed(states[-1], 0.2, seed))
    held = SharedCopy(copied(states[0]), {})
    assert held.advance(Update(0, "d0", states[0]), True) is None, "what servers have is not known"
    everywhere = Changes("d0", {i: [slice(0, spec.count)] for i, spec in enumerate(states[0].specs)})
    for version, changes in enumerate([everywhere, Changes("of other weights")], 1):
        state, before = states[version], copied(held.state)
        patch = sglang_patch.read(held.advance(Update(version, f"d{version}", state, changes), False))
        assert np.array_equal(held.state.buffer, state.buffer) and held.digest == f"d{version}"
        assert np.array_equal(np.fromfile(held.path, np.uint8), state.buffer)
        assert not patch.sweep
        by_name = {spec.name: bits for spec, bits in before.tensors()}
        for change in patch.changes:
            by_name[change.spec.name][slice(None) if change.places is None else change.places] = change.bits
        assert np.array_equal(before.buffer, state.buffer)
    held.close()


class Told:
    """A server that reads a message as `answered` does, and applies it."""

    def __init__(self, model, is_ours=True):
        self.model, self.is_ours, self.ranks, self.name, self.told = model, is_ours, 8, "told", 0

    async def post(self, path, body, extra=0.0):
        assert path == "/update_weights_from_tensor" and len(body["serialized_named_tensors"]) == 8
        payloads = body["serialized_named_tensors"]
        self.told += sum(map(len, payloads))
        tensors = pickle.loads(base64.b64decode(payloads[3]))
        if not self.is_ours:
            size = int(dict(tensors)[sglang_patch.SIZE])
            slices = [pickle.loads(base64.b64decode(each))[0][1] for each in payloads]
            tensors = [(sglang_patch.NAME, torch.cat(slices)[:size].clone())]
        updater = type("Updater", (), {"__module__": __name__, "get_model": lambda _: self.model})()
        told = {"named_tensors": tensors, "load_format": body["load_format"]}
        success, message = sglang_loader.answered(pytest.fail, updater, **told)
        if not success:
            raise sglang_server.ServerRefused(message)
        return {"success": True, "message": message}


@pytest.mark.parametrize(("ours", "broken"), [(True, ""), (True, "transposed"), (False, ""), (False, "transposed")])
def test_all_weights_reach_a_server_from_shared_memory_or_in_messages(ours, broken, monkeypatch):
    """With our own server no message grows with the weights; another one gets them once, however many ranks it has, and
    must use the model's own loader."""
    monkeypatch.setattr(sglang_loader, "_group", lambda: None)
    specs = [*SPECS[:2], TensorSpec("o", "float32", (4, 5000)), *SPECS[3:]]
    monkeypatch.setattr(sglang_weights, "BUCKET_BYTES", 100)
    monkeypatch.setattr(sglang_weights, "INLINE_BYTES", 100)
    state = random_state(0, specs)
    held, server, right = SharedCopy(state, {}), Told(Fused(broken=broken, columns=5000), ours), Fused(columns=5000)
    held.digest = state.digest()
    give = sglang_weights._give_all if ours else sglang_weights._send_all
    assert asyncio.run(give(server, held)) is (broken == "")
    right.load_weights(list(tensors_of(state)))
    for mine, expected in zip(server.model.parameters(), right.parameters(), strict=True):
        assert torch.equal(mine, expected)
    assert server.told < (40_000 if ours else 1.34 * state.nbytes + 40_000)


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
    reply = reply_of(answer([7, 8, 9], spans), {"a": 4, "b": 5}, "b")
    assert (reply.tokens.tolist(), reply.runs, reply.first) == ([7, 8, 9], [(4, 2), (5, 1)], "a")
    rest = reply_of(answer([1], [{**spans[1], "start": 0, "end": 1}]), {"b": 5}, "b")
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
    first = reply_of(answer([7, 8], span, **meta), {"a": 4}, "a", returned, 2)
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
            reply_of(answer([7, 8], span, **wrong), {"a": 4}, "a", returned, 2)


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
        reply_of(answer([7, 8], spans), {"a": 4}, "a")


def test_without_spans_only_undisturbed_answers_count():
    assert reply_of(answer([7, 8], None), {"a": 4}, "a").runs == [(4, 2)]
    assert reply_of(answer([7, 8], None), {"a": 4}, None) is None, (
        "an update came meanwhile: of which version are they?"
    )


def test_answers_that_do_not_add_up_are_errors():
    span = [{"version": "a", "start": 0, "end": 1}]
    broken = answer([7], span)
    broken["output_ids"] = [8]
    with pytest.raises(RuntimeError, match="do not agree"):
        reply_of(broken, {"a": 0}, "a")
    with pytest.raises(RuntimeError, match="too long"):
        refused = {"type": "abort", "message": "too long", "status_code": 400}
        reply_of(answer([], [], finish_reason=refused), {"a": 0}, "a")


@pytest.mark.parametrize("whole", [False, True], ids=["new", "so_far"])
def test_pieces_become_the_answer_that_it_is_in_one(whole):
    """Whether a piece brings what is new or all so far; the abort of a request that waits brings all, and one token."""
    span = [{"version": "a", "start": 0, "end": 4}]
    heard, ends = [], {"length": [9], "abort": [9]}
    for finish in ends:
        pieces, at = Pieces("a", lambda tokens: heard.append(tokens.tolist())), 0
        for to in (1, 3, 4):
            made = [7, 8, 9, 9][0 if whole else at : to]
            piece = answer(made, span if to == 4 else None, completion_tokens=to, finish_reason=None)
            if to == 4:
                piece["meta_info"]["finish_reason"] = {"type": finish}
            if to == 4 and finish == "abort":
                piece = answer([7, 8, 9, 9], span, completion_tokens=4, finish_reason={"type": finish})
                piece["output_ids"] = [9]
            assert pieces.answer is None
            assert pieces.take(piece) == (to < 4 or finish == "length")
            at = to
        expected = reply_of(answer([7, 8, 9, 9], span), {"a": 4}, "a")
        found = reply_of(pieces.answer, {"a": 4}, "a")
        assert found.tokens.tolist() == expected.tokens.tolist() and found.runs == expected.runs == [(4, 4)]
        assert found.logprobs.tolist() == expected.logprobs.tolist()
    assert heard == [[7], [7, 8, 9]] * 2, "not the last piece: the completion tells of it"


def test_pieces_that_do_not_follow_one_another_are_errors():
    for made, count in (([7, 8], 1), ([7], 2)):
        with pytest.raises(RuntimeError, match="do not follow"):
            Pieces("a", print).take(answer(made, None, completion_tokens=count))
    other = answer([7, 8], None, completion_tokens=2)
    with pytest.raises(RuntimeError, match="do not follow"):
        Pieces("a", print).take(other | {"output_ids": [7, 9]})


@pytest.mark.parametrize("cached, label, told", [(0, "b", 1), (3, "b", 0), (3, "a", 1)])
def test_tokens_that_may_be_worth_nothing_are_not_told(cached, label, told):
    heard = []
    pieces = Pieces("a", heard.append)
    meta = {"completion_tokens": 1, "cached_tokens": cached, "weight_version": label, "finish_reason": None}
    pieces.take(answer([7], None, **meta))
    assert len(heard) == told and (pieces.cut() is not None) == told


def test_a_kept_prompt_of_older_weights_is_seen():
    span = [{"version": "b", "start": 0, "end": 1}]
    assert reply_of(answer([7], span, cached_tokens=3), {"b": 5}, "b").is_stale("a")
    assert not reply_of(answer([7], span, cached_tokens=3), {"b": 5}, "b").is_stale("b")
    assert not reply_of(answer([7], span), {"b": 5}, "b").is_stale("a")


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


@pytest.mark.parametrize("more", [{}, {"kv_cache_dtype": "auto", "weight_cache_mode": "off", "cpu_offload_gb": 0}])
def test_a_server_that_fits_is_joined(more):
    assert sglang_flags.checked({**FIT, **more}) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantization": "fp8"},
        {"preferred_sampling_params": '{"top_p": 0.9}'},
        {"speculative_algorithm": "EAGLE"},
        {"custom_weight_loader": []},
        {"dp_size": 2},
        {"pp_size": 2},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"weight_cache_mode": "client"},
        {"cpu_offload_gb": 4},
    ],
)
def test_a_server_whose_logprobs_could_not_be_the_learners_is_refused(wrong):
    with pytest.raises(ValueError):
        sglang_flags.checked({**FIT, **wrong})


def test_the_base_install_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(sglang_server, "aiohttp", None)
    with pytest.raises(ValueError, match=r"\.\[sglang\]"):
        sglang_server.SglangServer("SGLang")


@pytest.mark.parametrize("updated", [True, False])
def test_a_request_that_updates_break_off_again_and_again_is_not_given_up(tmp_path, updated):
    """The request waits in a full server, which `pause_mode: abort` empties at each update."""
    engine = SglangEngine(tiny(), tmp_path, url="http://127.0.0.1:9")
    (server,) = engine._servers
    server.ready.set()
    asked = []

    async def post(path, body, extra=0.0):
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


def test_models_that_servers_can_not_follow_are_refused_at_once(tmp_path):
    model = tiny()
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="does not support quantised weights"):
        SglangEngine(model, tmp_path)
    model = tiny()
    model.config.kv_lora_rank = 512
    with pytest.raises(
        ValueError, match=r"supports latent attention of deepseek_v2 only .*of qwen2, and has kv_lora_rank=512"
    ):
        SglangEngine(model, tmp_path)


def test_a_refusal_ends_the_engine_and_is_not_tried_again(tmp_path):
    """Another server would refuse it too."""
    server = sglang_server.SglangServer("SGLang", url="http://127.0.0.1:9")

    async def post(path, body, extra=0.0):
        raise sglang_server.ServerRefused("400 LoaderRefused: norm: SGLang's model has no place for it")

    server.post = post
    with pytest.raises(UserError, match=r"can't serve this model: .* no place for it"):
        asyncio.run(sglang_weights._patch(server, [], random_state(0), "d"))
