"""What of the SGLang engine needs no server: patches, replies, flags."""

import asyncio

import numpy as np
import pytest

from actors.engines import sglang_flags, sglang_loader, sglang_patch, sglang_server, sglang_weights
from actors.engines.sglang_engine import SglangEngine
from actors.engines.sglang_flags import Wanted
from actors.engines.sglang_replies import NEUTRAL, concatenated, generate_request, reply_of
from areal_like.errors import UserError
from areal_like.models import publishable, qwen2
from areal_like.types import Limits
from areal_like.weights.state import TensorSpec
from tests.actors.test_sglang_loader import changed, random_state


def test_a_patch_is_as_short_as_its_changes():
    state = random_state(0, [TensorSpec("w", "bfloat16", (100, 1000))])
    few, many = changed(state, 0.01), changed(state, 0.5)
    assert sglang_patch.write(few, "d", state).nbytes < 8000
    assert 200_000 < sglang_patch.write(many, "d", state).nbytes < 200_300
    assert sglang_patch.digest_probe(state, "d").nbytes < 200


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
    tokens, logprobs, runs = concatenated(
        [reply, reply_of(answer([1], [{**spans[1], "start": 0, "end": 1}]), {"b": 5}, "b")]
    )
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
        {"pp_size": 2},
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


@pytest.mark.parametrize(("key", "count"), [("num_experts", 8), ("n_routed_experts", 64), ("kv_lora_rank", 512)])
def test_models_that_servers_can_not_follow_are_refused_at_once(key, count, tmp_path):
    model = tiny()
    setattr(model.config, key, count)
    with pytest.raises(ValueError, match=f"does not support .* yet .*{key}={count}"):
        SglangEngine(model, tmp_path)


def test_a_refusal_ends_the_engine_and_is_not_tried_again(tmp_path):
    """Another server would refuse as well."""
    server = sglang_server.Server("SGLang", url="http://127.0.0.1:9")

    async def post(path, body, extra=0.0):
        raise sglang_server.ServerRefused("400 LoaderRefused: norm: SGLang's model has no place for it")

    server.post = post
    with pytest.raises(UserError, match=r"can't serve this model: .* no place for it"):
        asyncio.run(sglang_weights._patch(server, [], random_state(0), "d"))
