"""Texts at which an answer ends (`sampling.stop`), found in its tokens as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_like.types import Completion, Finish, Limits, Prompt, StopTexts


class CutCodec:
    """The codec `whole`, but a text of tokens ends before its first stop text, or with it (`keep`)."""

    def __init__(self, whole: Any, texts: tuple[str, ...], keep: bool):
        self.whole, self.stops, self._keep = whole, StopTexts(whole.decode, texts), keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def decode(self, tokens: np.ndarray) -> str:
        found, shown = self.stops.found(tokens), str(self.whole.decode(tokens))
        return shown if found is None else shown[: found[1] + len(found[0]) * self._keep]


@dataclass(frozen=True, slots=True)
class Stops:
    """A run's ends of answers, beside its task's (`sampling.stop`, `.stop_ids`, `.keep_stop`)."""

    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    keep: bool = False

    def cut(self, prompt: Prompt) -> Prompt:
        """The prompt, with a codec that cuts answers."""
        return replace(prompt, codec=CutCodec(prompt.codec, self.texts, self.keep)) if self.texts else prompt

    def within(self, limits: Limits, prompt: Prompt) -> Limits:
        """Limits with these ends. `prompt` is one that `cut` has returned."""
        return replace(limits, stop_ids=self.ids, stop_texts=prompt.codec.stops if self.texts else None)


NO_STOPS = Stops()


def stops_of(sampling: Any) -> Stops:
    """Of the section `sampling` of a config."""
    return Stops(tuple(sampling.stop), tuple(sampling.stop_ids), sampling.keep_stop)


def finish_of(token: int, limits: Limits) -> Finish:
    """Why a completion ends with this token, which is one of its stop tokens."""
    return "stop" if token in limits.stop else "stop_id"


def beginning(completion: Completion, count: int, finish: Finish) -> Completion:
    """The first `count` tokens of a completion."""
    runs, left = [], count
    for version, length in completion.runs:
        if left > 0:
            runs.append((version, min(length, left)))
            left -= length
    experts, later = completion.experts, len(completion.tokens) - count
    chosen = None if experts is None else experts[: len(experts) - later]
    return Completion(completion.tokens[:count], completion.logprobs[:count], runs, finish, chosen)


def text_before(stops: Sequence[str], text: str) -> str:
    """The text up to the first of these."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]


def with_texts(limits: Limits, codec: Any, texts: Sequence[str]) -> Limits:
    """Limits with more stop texts."""
    known = limits.stop_texts.texts if limits.stop_texts else ()
    whole = getattr(codec, "whole", codec)
    return replace(limits, stop_texts=StopTexts(whole.decode, (*known, *texts))) if texts else limits


def until(completion: Completion, limits: Limits) -> tuple[Completion, str | int | None]:
    """The completion of an engine that may not look for texts, and the stop text or token that ends it, if it is none
    of the task's."""
    texts = limits.stop_texts
    if texts and completion.finish != "stop_text" and texts.found(completion.tokens):
        count = texts.first_end(completion.tokens, 0)
        completion = completion if count is None else beginning(completion, count, "stop_text")
    if completion.finish == "stop_id":
        return completion, int(completion.tokens[-1])
    found = texts.found(completion.tokens) if texts and completion.finish == "stop_text" else None
    return completion, found[0] if found else None
