"""Bodies of OpenAI's chat completions: checks requests, writes answers. Pure.

It refuses fields that would change how tokens are sampled (behaviour logprobs must equal those that the learner
computes for the same tokens), unless the `Terms` ignore them, and fields that ask for missing features.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_like.stops import stop_reason
from areal_like.types import Completion, Limits

MODEL = "policy"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,),
}  # fmt: skip
"""Fields that cut or shift the distribution → the values that do not."""
LACKING: dict[str, tuple[Any, ...]] = {"n": (1,), "logprobs": (False,), "top_logprobs": (0,), "modalities": (["text"],)}
"""Fields for missing features → the values that do not ask for them."""
WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "seed", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "reasoning_effort", "verbosity",
}  # fmt: skip
READ = {
    "model", "messages", "tools", "temperature", "max_tokens", "max_completion_tokens", "stop", "stream",
    "stream_options",
}  # fmt: skip
MOST_TEMPERATURE = 100
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RefusedRequest(Exception):
    """An answer that is an error, as OpenAI writes them."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class Terms:
    """The sample's `temperature` (None: each request has its own); `ignore` other sampling fields, or refuse them."""

    temperature: float | None
    ignore: bool = False
    call_marks: tuple[str, str] = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that can be answered. `messages` are plain: role, content (a text), and tool_calls (arguments as
    objects) and tool_call_id, if any. `ignored` counts sampling fields, in a conversation `seed` too."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[Any]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    with_usage: bool
    ignored: int
    temperature: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The model's answer to a request, as it is served. `stop_reason`: the stop text, or token, that has ended it, as
    vLLM has it."""

    number: int
    message: dict[str, Any]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    stop_reason: str | int | None = None


def reply_of(
    number: int, message: dict[str, Any], prompt_tokens: int, completion: Completion, limits: Limits
) -> ChatReply:
    """The reply with a completion that answers to a prompt under these limits."""
    finish = "tool_calls" if "tool_calls" in message else "length" if completion.finish == "length" else "stop"
    return ChatReply(number, message, finish, prompt_tokens, len(completion.tokens), stop_reason(completion, limits))


def parse(body: Any, terms: Terms) -> Chat:
    """Raises RefusedRequest."""
    if not isinstance(body, dict):
        raise RefusedRequest(400, "the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name in sorted(given.keys() - READ - NEUTRAL.keys() - WITHOUT_EFFECT):
        if name not in LACKING:
            raise RefusedRequest(400, f"unknown field {name!r}", param=name, code="unknown_parameter")
        if given[name] not in LACKING[name]:
            why = f"{name}={given[name]!r} is not supported here"
            raise RefusedRequest(400, why, param=name, code="unsupported_value")
    tools, stop = _typed(given, "tools", list, []), given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise RefusedRequest(400, "stop must be a text or a list of texts, none of them empty", param="stop")
    return Chat(
        model=str(given.get("model", MODEL)),
        messages=_messages(given.get("messages")),
        tools=[] if given.get("tool_choice") == "none" else tools,
        max_tokens=_max_tokens(given),
        stop=tuple(stop),
        stream=_typed(given, "stream", bool, False),
        with_usage=bool(_typed(given, "stream_options", dict, {}).get("include_usage", False)),
        ignored=_refuse_sampling(given, terms),
        temperature=_temperature(given) if terms.temperature is None else terms.temperature,
        seed=_typed(given, "seed", int, None) if "seed" in given else None,
    )


def _refuse_sampling(given: Mapping[str, Any], terms: Terms) -> int:
    """The number of sampling fields that are ignored. Raises RefusedRequest."""
    wrong = [name for name in NEUTRAL if name in given and given[name] not in NEUTRAL[name]]
    why = "this engine samples from the whole distribution. Leave it out"
    if terms.temperature is not None:
        asked = given.get("temperature", terms.temperature)
        if not isinstance(asked, int | float) or abs(asked - terms.temperature) > 1e-6:
            wrong.append("temperature")
        why = (
            f"the run samples at temperature {terms.temperature:g} from the whole distribution; behaviour logprobs "
            "would differ from the learner's. Leave it out, or set workflow.sampling=ignore"
        )
    if wrong and not terms.ignore:
        name = wrong[0]
        message = f"{name}={given[name]!r} is refused: {why}"
        raise RefusedRequest(400, message, param=name, code="unsupported_value")
    return len(wrong)


def _temperature(given: Mapping[str, Any]) -> float:
    value = given.get("temperature", 1.0)
    if type(value) not in (int, float) or not 0 <= value <= MOST_TEMPERATURE:
        want = f"temperature: got {value!r}, expected a number from 0 to {MOST_TEMPERATURE}"
        raise RefusedRequest(400, want, param="temperature")
    return float(value)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    found = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    for value in found:
        if type(value) is not int or value < 1:
            raise RefusedRequest(400, f"max_tokens must be an integer of at least 1, got {value!r}", param="max_tokens")
    return min(found, default=None)


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if not isinstance(value, kind):
        raise RefusedRequest(400, f"{name} must be of the type {kind.__name__}", param=name)
    return value


# Messages


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest(400, "messages must be a list with at least one message", param="messages")
    return [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _message(place: str, message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise RefusedRequest(400, f"{place}: want an object with a role of {', '.join(ROLES)}", param=place)
    plain: dict[str, Any] = {"role": ROLES[role], "content": _text(place, message.get("content"))}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(place, call) for call in (calls if isinstance(calls, list) else [calls])]
    return plain | {name: str(message[name]) for name in ("tool_call_id", "name") if message.get(name)}


def _text(place: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [None]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) != len(parts):
        raise RefusedRequest(400, f"{place}: the content must be text, or parts of text", param=place)
    return "".join(texts)


def _call(place: str, call: Any) -> dict[str, Any]:
    try:
        function, arguments = call["function"], call["function"].get("arguments") or {}
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"id": str(call["id"]), "type": "function", "function": {"name": function["name"], "arguments": parsed}}
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        wanted = "{id, type, function: {name, arguments}}"
        raise RefusedRequest(400, f"{place}: a tool call is {wanted}", param=place) from None


def assistant_message(text: str, number: int, tools: Sequence[Any], marks: tuple[str, str]) -> dict[str, Any]:
    """The model's answer as a plain message; with tools, calls in it that can all be read (a name,
    an object of arguments) become `tool_calls`."""
    before, *rest = text.split(marks[0]) if tools else [text]
    try:
        calls = [json.loads(part.partition(marks[1])[0]) for part in rest]
        found = [(call["name"], call.get("arguments", {})) for call in calls]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = []
    if not found or not all(isinstance(name, str) and isinstance(given, dict) for name, given in found):
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": before.strip(),
        "tool_calls": [
            {"id": f"call_{number}_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(found)
        ],
    }


# Answers


def completion(chat: Chat, reply: ChatReply) -> dict[str, Any]:
    choice = {"index": 0, "message": _served(reply.message), "logprobs": None}
    choice |= {"finish_reason": reply.finish, "stop_reason": reply.stop_reason}
    return _head("chat.completion", chat, reply) | {"choices": [choice], "usage": _usage(reply)}


def events(chat: Chat, reply: ChatReply) -> str:
    """The same as server-sent events, all at once."""
    delta = _served(reply.message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [call | {"index": place} for place, call in enumerate(delta["tool_calls"])]
    parts: list[tuple[dict[str, Any], str | None]] = [(delta, None), ({}, reply.finish)]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": each, "logprobs": None, "finish_reason": finish}]} for each, finish in parts
    ]
    if chat.with_usage:
        chunks.append({"choices": [], "usage": _usage(reply)})
    head = _head("chat.completion.chunk", chat, reply)
    return "".join(f"data: {json.dumps(head | chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "areal_like"}]}


def _head(kind: str, chat: Chat, reply: ChatReply) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.number}", "object": kind, "created": int(time.time()), "model": chat.model}


def _usage(reply: ChatReply) -> dict[str, int]:
    counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    return counts | {"total_tokens": reply.prompt_tokens + reply.completion_tokens}


def _served(message: dict[str, Any]) -> dict[str, Any]:
    """A plain message as OpenAI writes it: arguments of calls as JSON text."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"content": message["content"] or None, "tool_calls": calls}
