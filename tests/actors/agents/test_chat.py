"""Bodies of chat completions: which are accepted, which are refused, and why."""

import json
from typing import Any

import pytest

from actors.agents.chat import Chat, ChatReply, RefusedRequest, Terms, assistant_message, completion, events, parse

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
