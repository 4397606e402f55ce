"""The endpoint over real HTTP: keys, concurrent samples, clients that hang up, cut samples; OpenAI's client, also of a
served checkpoint."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.agents import endpoint as endpoints
from actors.agents.chat import Chat, ChatReply, RefusedRequest, Terms, assistant_message, completion, events, parse
from actors.agents.checkpoint import CheckpointServer
from actors.agents.workflow import agent as workflow
from actors.engines.torch_engine import TorchEngine
from areal_like.tasks.chat import TokenizerCodec
from areal_like.tasks.text import byte_tokenizer
from areal_like.types import Limits, Prompt
from tests.actors.actor import Actor
from tests.actors.agents.scene import (
    EOS,
    engine_of,
    limits_of,
    named,
    play,
    post,
    prompt_of,
    rollout,
    said,
    user,
)  # fmt: skip
from tests.actors.looped import looped
from tests.folders import write_folder


async def until(event: Any) -> None:
    while not event():
        await asyncio.sleep(0.001)


@looped
async def test_a_key_is_needed_and_ends_with_its_sample():
    keys: list[tuple[str, str]] = []

    async def asks(base_url, key, row):
        keys.append((base_url, key))
        body = {"messages": row["messages"]}
        for wrong in ("", "sk-wrong"):
            status, answer = await post(base_url, wrong, body)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await post(base_url, key, body, "/completions"))[0] == 404
        status, answer = await post(base_url, key, {"input": "3a7"}, "/responses")
        assert status == 404 and "client.chat.completions.create" in answer["error"]["message"]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
            for data, status in ((b"{half", 400), (b"[" * 100_000, 400), (b" " * (endpoints.MAX_BODY_BYTES + 1), 413)):
                async with session.post(base_url + "/chat/completions", data=data) as answer:
                    assert answer.status == status and (await answer.json())["error"]["message"]
        await said(base_url, key, row["messages"])

    engine = engine_of()
    await rollout(asks, engine)
    ((base_url, key),) = keys
    assert base_url.startswith("http://127.0.0.1:") and engine.stats()["running"] == 0
    status, answer = await post(base_url, key, {"messages": [user("1")]})
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


@looped
async def test_it_is_reached_without_the_proxy_of_the_environment(monkeypatch):
    for name, value in {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": "elsewhere"}.items():
        monkeypatch.setenv(name, value)

    async def asks(base_url, key, row):
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(trust_env=True, headers=headers) as session:
            assert (await session.get(base_url + "/models")).status == 200
        await said(base_url, key, row["messages"])

    await rollout(asks, engine_of())


def test_a_client_that_hangs_up_frees_its_slot_and_may_ask_again():
    async def impatient(base_url, key, row):
        asked = asyncio.create_task(said(base_url, key, row["messages"]))
        await until(lambda: engine.stats()["running"])
        asked.cancel()
        await until(lambda: not engine.stats()["running"])
        assert engine.stats()["tokens"] < 60, "not those of the whole answer"
        await said(base_url, key, row["messages"], max_tokens=3)

    engine = engine_of()
    sample = play(impatient, replace(limits_of(100), stop=()), engine=engine)
    assert sample.response_length == 3 and sample.loss_mask.all()


class Task:
    stop_tokens = (EOS,)

    def prompt(self, split: str, row: int) -> Prompt:
        return prompt_of()


def actor_of(function: Any) -> Actor:
    return Actor(task=Task(), workflow=partial(workflow, agent=named(function)), engine=engine_of())


@looped
async def test_an_agent_that_crashes_costs_its_group_with_the_reason():
    async def hopeless(base_url, key, row):
        raise KeyError("oh")

    actor = actor_of(hopeless)
    await actor.group()
    ((group, reason, detail),) = actor.client.failures
    assert (group, reason) == (7, "agent crashed") and "KeyError('oh') at" in detail and "test_endpoint" in detail


torch.set_num_threads(1)
CODEC, STOP = TokenizerCodec(byte_tokenizer(), chat=True), (256, 10)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Any, TorchEngine]]:
    """OpenAI's client of a served model, and the engine behind it."""
    from openai import AsyncOpenAI  # long: no process that lists tests shall wait for it

    model = AutoModelForCausalLM.from_pretrained(write_folder(folder, "llama tied"), dtype=torch.float32)
    engine = TorchEngine(model, slots=4)
    serving = CheckpointServer(engine, CODEC, STOP, 256, "tiny").served()
    async with serving as url, AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client, engine
    await engine.close()


@looped
async def test_messages_are_answered_in_the_chat_template_and_a_seed_repeats_an_answer(tmp_path: Path) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]
    async with served(tmp_path) as (client, engine):

        async def ask(**knobs: Any) -> Any:
            return await client.chat.completions.create(model="any", messages=messages, max_tokens=20, **knobs)

        async def sampled(**knobs: Any) -> str:
            return (await ask(**knobs)).choices[0].message.content

        greedy = await ask(temperature=0)
        expected = await engine.generate(CODEC.opening(messages), Limits(20, 0.0, STOP))
        assert greedy.choices[0].message.content == CODEC.decode(expected.tokens)
        assert greedy.usage.completion_tokens == len(expected.tokens)
        text = greedy.choices[0].message.content
        cut = (await ask(temperature=0, stop=text[2])).choices[0]
        assert cut.message.content == text[: text.index(text[2])] and cut.finish_reason == "stop"
        assert await sampled(seed=3) == await sampled(seed=3) != await sampled(seed=4)
        assert await sampled() != await sampled(), "without a seed each request has random numbers of its own"
        parts = [part async for part in await ask(seed=3, stream=True)]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == await sampled(seed=3)
        assert [each.id async for each in client.models.list()] == ["tiny"]


@looped
async def test_other_requests_are_refused_with_the_key(tmp_path: Path) -> None:
    from openai import BadRequestError, NotFoundError, PermissionDeniedError

    asked: Any = {"model": "any", "messages": [{"role": "user", "content": "a"}]}
    refused = {"top_p": 0.5, "n": 2, "temperature": -1, "max_tokens": 0, "messages": [user("x" * 256)]}
    async with served(tmp_path) as (client, _):
        for name, value in refused.items():
            with pytest.raises(BadRequestError) as error:
                await client.chat.completions.create(**(asked | {name: value}))
            assert error.value.param == name
        with pytest.raises(BadRequestError):
            await client.chat.completions.create(**asked, logprobs=True, top_logprobs=20)
        with pytest.raises(PermissionDeniedError):
            await client.with_options(default_headers={"Host": "example.org"}).models.list()
        with pytest.raises(NotFoundError):
            await client.completions.create(model="any", prompt="a")


TERMS = Terms(temperature=0.7)
ASK = {"model": "gpt-x", "messages": [{"role": "user", "content": "2+2?"}]}
DEEP = {"name": "f", "arguments": "[" * 100_000}
MARKS = TERMS.call_marks


def chat_of(**fields: Any) -> Chat:
    return parse({**ASK, **fields}, TERMS)


def refused(body: Any) -> dict[str, Any]:
    with pytest.raises(RefusedRequest) as caught:
        parse(body, TERMS)
    assert caught.value.status == 400 and caught.value.body["error"]["type"] == "invalid_request_error"
    return caught.value.body["error"]


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", 1.0), ("temperature", "hot"), ("top_p", 0.9), ("top_k", 50), ("min_p", 0.1),
        ("frequency_penalty", 0.5), ("presence_penalty", -1), ("repetition_penalty", 1.1), ("logit_bias", {"5": -100}),
        ("response_format", {"type": "json_object"}), ("tool_choice", "required"), ("parallel_tool_calls", False),
    ],
)  # fmt: skip
def test_other_sampling_is_refused_or_passed_over_and_counted(field: str, value: Any) -> None:
    error = refused({**ASK, field: value})
    assert error["param"] == field
    passed = parse({**ASK, field: value}, Terms(0.7, ignore=True))
    assert passed.ignored == 1 and passed.messages == ASK["messages"]


@pytest.mark.parametrize(
    "body, words",
    [
        ([], "JSON object"),
        ({"messages": []}, "at least one message"),
        ({**ASK, "n": 2}, "n=2 is not supported"),
        ({**ASK, "colour": 1}, "unknown field 'colour'"),
        ({**ASK, "max_tokens": 0}, "at least 1"),
        ({**ASK, "stop": [""]}, "none of them empty"),
        ({**ASK, "stream": "yes"}, "of the type bool"),
        ({**ASK, "tools": {}}, "of the type list"),
        ({"messages": ["hello"]}, r"messages[0]: want an object"),
        ({"messages": [{"role": "oracle", "content": ""}]}, "a role of system"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "parts of text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "a tool call is"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": DEEP}]}]}, "a tool call is"),
    ],
)
def test_other_bodies_are_refused(body: Any, words: str) -> None:
    assert words in refused(body)["message"]


def test_messages_become_plain() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    given = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " short"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    plain = parse({"messages": given}, TERMS).messages
    assert plain[0] == {"role": "system", "content": "be short"}
    assert plain[1]["content"] == "" and plain[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert plain[2] == {"role": "tool", "content": "3", "tool_call_id": "c"}


@pytest.mark.parametrize(
    "text",
    [
        "4",
        '<tool_call>{"name": "add"}</tool_call>',
        'so: <tool_call>{"name": "f", "arguments": {"x": [1, "ü"]}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
    ],
)
def test_what_was_served_is_known_again(text: str) -> None:
    """A call is recognised in any form in which a client writes its arguments."""
    message = assistant_message(text, 3, [{"type": "function"}], MARKS)
    reply = ChatReply(3, message, "stop", 5, 2)
    served = json.loads(json.dumps(completion(chat_of(), reply)))["choices"][0]["message"]
    assert parse({"messages": [served]}, TERMS).messages == [message]
    for call in served.get("tool_calls", []):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    assert parse({"messages": [served]}, TERMS).messages == [message]
    assert len(message.get("tool_calls", [])) == text.count("<tool_call>")


@pytest.mark.parametrize(
    "call", ['{"name": ["add"]}', '{"name": "add", "arguments": "{}"}', '{"name": "add"} [', "[1]"]
)
def test_a_call_that_cannot_be_read_stays_text(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert assistant_message(text, 3, [{"type": "function"}], MARKS) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("text", ["four", 'I add. \n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'])
def test_events_bring_what_a_completion_brings(text: str) -> None:
    chat = chat_of(stream=True, tools=[{"type": "function"}], stream_options={"include_usage": True})
    message = assistant_message(text, 2, chat.tools, MARKS)
    *lines, done = events(chat, ChatReply(2, message, "length", 5, 4)).removesuffix("\n\n").split("\n\n")
    answer, end, usage = (json.loads(line.removeprefix("data: ")) for line in lines)
    assert done == "data: [DONE]" and usage["usage"]["total_tokens"] == 9
    assert end["choices"][0]["finish_reason"] == "length"
    assert parse({"messages": [answer["choices"][0]["delta"]]}, TERMS).messages == [message]
