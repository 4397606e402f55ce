"""A growing sample: the model's tokens and the tokens shown to it, in order. Workflows write it.

Invariant: the model's answers keep tokens, behaviour logprobs, runs and experts exactly as the engine gave them. Shown
tokens are loss-masked, have logprob 0, and carry the version of the last answer, so they change no age. The experts of
shown tokens come with the answer to them.

Where a chat template rewrites earlier turns, the transcript *forks*: the model is given a context that begins anew, and
its tokens there are trained in that context, as earlier turns are in theirs (`areal_like.types.Sample.forks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_like.interfaces import Codec
from areal_like.models.experts import joined_experts
from areal_like.types import Completion, Finish, Limits, Runs, Sample, merged


@dataclass(slots=True)
class _Part:
    tokens: np.ndarray
    logprobs: np.ndarray
    runs: Runs
    trained: bool
    experts: np.ndarray | None = None
    forks: bool = False


def rewrites(codec: Codec, said: str, new: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> bool:
    """`Codec.rewrites`, which a codec need not have."""
    asked = getattr(codec, "rewrites", None)
    return asked is not None and asked(said, new, tools)


class Transcript:
    """Starts with the prompt's tokens, int32 [P], under the limits of the `whole` response."""

    def __init__(self, prompt: np.ndarray, limits: Limits):
        self._prompt, self.whole = prompt, limits
        self._parts: list[_Part] = []
        self._length = 0
        self._used = 0  # of the room that its present context has
        self._earned: list[tuple[int, float]] = []

    @property
    def tokens(self) -> np.ndarray:
        """What the model is given: everything so far, int32 [P + R]; behind a fork, the present context."""
        return np.concatenate([part.tokens for part in self._contexts()[-1]])

    def _contexts(self) -> list[list[_Part]]:
        """The parts of each context, the prompt's included."""
        found = [[_Part(self._prompt, np.zeros(0, np.float32), [], False)]]
        for part in self._parts:
            if part.forks:
                found.append([])
            found[-1].append(part)
        return found

    @property
    def room(self) -> int:
        """Tokens that the response may still have: each context holds those of the prompt and `Limits.max_tokens`."""
        return self.whole.max_tokens - self._used

    def limits(self, most: int | None = None) -> Limits:
        """The limits of the model's next turn: at most `most` tokens, further on in the sample's random stream."""
        longest = self.room if most is None else min(most, self.room)
        offset = self.whole.offset + self._used
        return replace(self.whole, max_tokens=longest, offset=offset, experts_from=self._positions)

    def branch(self, limits: Limits) -> Transcript:
        """A copy that continues by itself, under `limits` of the whole response, in a stream of its own."""
        branch = Transcript(self._prompt, limits)
        branch._parts, branch._length, branch._earned = [*self._parts], self._length, [*self._earned]
        branch._used = self._used
        return branch

    @property
    def turns(self) -> int:
        """Of the model's own, so far."""
        return sum(part.trained for part in self._parts)

    def said(self, completion: Completion) -> None:
        self._add(_Part(completion.tokens, completion.logprobs, completion.runs, True, completion.experts))

    def shown(self, tokens: np.ndarray, *, forks: bool = False) -> None:
        """`tokens` int32 [n] that are not the model's, behind its first turn."""
        if len(tokens):
            version = self._parts[-1].runs[-1][0]
            logprobs = np.zeros(len(tokens), np.float32)
            self._add(_Part(tokens, logprobs, [(version, len(tokens))], False, forks=forks))

    def fits(self, tokens: np.ndarray) -> bool:
        """Is there room for an answer behind a context that begins anew with these tokens?"""
        return len(tokens) - len(self._prompt) < self.whole.max_tokens

    def forked(self, tokens: np.ndarray, limits: Limits) -> None:
        """The context begins anew with `tokens` int32 [n], the rewritten conversation so far; under `limits` of the
        whole response, in a stream of random numbers of its own. There may be no room left behind it."""
        self.whole = limits
        self.shown(tokens, forks=True)
        self._used = max(0, len(tokens) - len(self._prompt))

    def earned(self, reward: float) -> None:
        """By the turn that ends here."""
        self._earned.append((self._length - 1, float(reward)))

    def earned_by_turn(self, rewards: Sequence[float]) -> None:
        """By each of the turns so far, in order. Raises ValueError for another number of rewards."""
        lengths = np.cumsum([len(part.tokens) for part in self._parts])
        ends = [int(end) - 1 for end, part in zip(lengths, self._parts, strict=True) if part.trained]
        if len(rewards) != len(ends):
            raise ValueError(f"{len(rewards)} rewards for {len(ends)} turns")
        self._earned = [(end, float(reward)) for end, reward in zip(ends, rewards, strict=True)]

    def sample(self, reward: float | None, finish: Finish) -> Sample:
        """The whole; `reward` None: the sum over the turns."""
        lengths = [len(part.tokens) for part in self._parts]
        starts = np.cumsum([0, *lengths])
        return Sample(
            tokens=np.concatenate([self._prompt, *(part.tokens for part in self._parts)]),
            prompt_length=len(self._prompt),
            logprobs=np.concatenate([part.logprobs for part in self._parts]),
            loss_mask=np.repeat([part.trained for part in self._parts], lengths),
            runs=merged([run for part in self._parts for run in part.runs]),
            reward=sum(each for _, each in self._earned) if reward is None else reward,
            finish=finish,
            turn_rewards=self._earned if len(self._earned) > 1 else [],
            experts=self._experts(),
            forks=[int(start) for start, part in zip(starts, self._parts, strict=False) if part.forks],
        )

    @property
    def _positions(self) -> int:
        """Positions of the present context whose experts are known."""
        return sum(len(part.experts) for part in self._contexts()[-1] if part.experts is not None)

    def _experts(self) -> np.ndarray | None:
        """Of the whole, [T - 1, layers, k]. Behind a context's last answer, where nothing is trained, they are 0."""
        found = []
        for parts in self._contexts():
            known = joined_experts([part.experts for part in parts if part.trained or part.experts is not None])
            if known is None:
                return None
            missing = sum(len(part.tokens) for part in parts) - len(known)
            found.append(np.pad(known, ((0, missing), (0, 0), (0, 0))))
        return np.concatenate(found)[:-1]

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self._length += len(part.tokens)
        self._used += len(part.tokens)
