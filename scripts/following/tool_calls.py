"""Tool calls of a sample: read from the model's text and the replies, turn by turn.

A call is JSON between two marks, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; its result is between two
others (`actors.tools`, `actors.agents.chat`; the run's workflow decides). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from areal_like.config.registry import ConfigError, with_defaults

FAILED = "error:"
"""How the result of a failed call begins."""


class Marks(NamedTuple):
    """The marks before and after a call, and before and after a result."""

    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    result: tuple[str, str] = ("<tool_response>", "</tool_response>")


class Call(NamedTuple):
    """`turn` counts from 1. If a call can't be read, `name` is "" and `arguments` is its text. `result` None: the call
    was not answered, because the sample had ended."""

    turn: int
    name: str
    arguments: str
    result: str | None

    @property
    def failed(self) -> bool:
        return self.result is not None and self.result.startswith(FAILED)

    def __str__(self) -> str:
        return f"{self.name or '(no call that can be read)'} {self.arguments}"


def marks_of(workflow: Mapping[str, Any]) -> Marks | None:
    """The marks of a workflow's spec; None if it has no tools."""
    if workflow["name"] == "single_turn":
        return None
    known = dict(workflow)
    for kind, spec in (("workflow", workflow), ("environment", workflow.get("environment"))):
        try:
            known |= with_defaults(kind, spec) if spec else {}
        except (ConfigError, ValueError):  # the user's own component, not found here
            known |= dict(spec or {})
    marks = Marks()
    return Marks(_pair(known.get("call_marks"), marks.call), _pair(known.get("result_marks"), marks.result))


def _pair(found: Any, default: tuple[str, str]) -> tuple[str, str]:
    if not isinstance(found, list | tuple) or len(found) != 2:
        return default
    return str(found[0]).strip(), str(found[1]).strip()


def calls_of(turns: Iterable[tuple[str, str]], marks: Marks) -> list[Call]:
    """The calls of some turns: (the model's text, the reply)."""
    return [call for number, (said, shown) in enumerate(turns, 1) for call in _of_turn(number, said, shown, marks)]


def _of_turn(number: int, said: str, shown: str, marks: Marks) -> list[Call]:
    opens, closes = marks.call
    if not opens:
        return []
    texts = [part.partition(closes)[0].strip() for part in said.split(opens)[1:]]
    results = _results(shown, marks, len(texts))
    return [Call(number, *_read(text), result) for text, result in zip(texts, results, strict=True)]


def _results(shown: str, marks: Marks, count: int) -> Sequence[str | None]:
    before, behind = marks.result
    parts = shown.split(before)[1:] if before else [shown] * bool(shown.strip())
    last = parts[-count:] if count else []  # a context that begins anew has earlier results, too
    found = [(part.partition(behind)[0] if behind else part).strip() for part in last]
    return [*found, *[None] * (count - len(found))]


def _read(text: str) -> tuple[str, str]:
    """Name and arguments of a call."""
    try:
        call = json.loads(text)
        return str(call["name"]), json.dumps(call.get("arguments", {}), ensure_ascii=False)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "", text
