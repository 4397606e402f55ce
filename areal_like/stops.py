"""Texts at which an answer ends (`sampling.stop`), found in its tokens as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_like.types import Completion, Finish, Limits, Prompt, StopTexts


@dataclass(frozen=True, slots=True)
class Stops:
    """A run's ends of answers, beside its task's (`sampling.stop`, `.stop_ids`, `.keep_stop`)."""

    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    keep: bool = False

    def cut(self, prompt: Prompt) -> Prompt:
        """The prompt, with a codec that cuts answers."""
        kept = self.texts if self.keep else ()
        return replace(prompt, codec=StopTexts(prompt.codec, self.texts, kept)) if self.texts else prompt

    def within(self, limits: Limits, prompt: Prompt) -> Limits:
        """Limits with these ends. `prompt` is one that `cut` has returned."""
        return replace(limits, stop_ids=self.ids, stop_texts=prompt.codec if self.texts else None)


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


def with_texts(limits: Limits, codec: Any, texts: Sequence[str]) -> Limits:
    """Limits with more stop texts, which an answer's text ends before."""
    known = limits.stop_texts or StopTexts(codec, ())
    more = replace(known, texts=(*known.texts, *texts))
    return replace(limits, stop_texts=more) if texts else limits


def stop_reason(completion: Completion, limits: Limits) -> str | int | None:
    """The stop text or token that ends a completion, if it is none of the task's."""
    if completion.finish == "stop_id":
        return int(completion.tokens[-1])
    texts = limits.stop_texts if completion.finish == "stop_text" else None
    found = texts.found(texts.whole.decode(completion.tokens)) if texts else None
    return found[1] if found else None
