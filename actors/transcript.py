"""A growing sample: the model's tokens and the tokens shown to it, in order. Workflows write it.

Invariant: the model's answers keep tokens, behaviour logprobs, runs and experts exactly as the engine gave them. Shown
tokens are not sampled: they are loss-masked, have logprob 0, and carry the version of the last answer, so they change
no age. The experts of shown tokens come with the answer to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.resumption import merged
from areal_like.experts import joined
from areal_like.types import Completion, Finish, Limits, Runs, Sample


@dataclass(slots=True)
class _Part:
    tokens: np.ndarray
    logprobs: np.ndarray
    runs: Runs
    trained: bool
    experts: np.ndarray | None = None


class Transcript:
    """Starts with the prompt's tokens, int32 [P], under the limits of the whole response."""

    def __init__(self, prompt: np.ndarray, limits: Limits):
        self._prompt, self._limits = prompt, limits
        self._parts: list[_Part] = []
        self._length = 0
        self._earned: list[tuple[int, float]] = []

    @property
    def tokens(self) -> np.ndarray:
        """Everything so far: int32 [P + R]."""
        return np.concatenate([self._prompt, *(part.tokens for part in self._parts)])

    @property
    def room(self) -> int:
        """The number of tokens that the response may still have."""
        return self._limits.max_tokens - self._length

    @property
    def whole(self) -> Limits:
        """Of the whole response."""
        return self._limits

    def limits(self, most: int | None = None) -> Limits:
        """The limits of the model's next turn: at most `most` tokens, continuing in the sample's stream of random
        numbers."""
        longest = self.room if most is None else min(most, self.room)
        offset = self._limits.offset + self._length
        return replace(self._limits, max_tokens=longest, offset=offset, experts_from=self._positions)

    def unstopped(self, count: int) -> Limits:
        """The limits of `count` more tokens, whatever room is left, that no stop token ends."""
        offset = self._limits.offset + self._length
        return replace(self._limits, max_tokens=count, stop=(), offset=offset, experts_from=self._positions)

    def branch(self, limits: Limits) -> Transcript:
        """A copy that continues by itself, under `limits` of the whole response, in a stream of its own."""
        branch = Transcript(self._prompt, limits)
        branch._parts, branch._length, branch._earned = [*self._parts], self._length, [*self._earned]
        return branch

    @property
    def turns(self) -> int:
        """Of the model's own, so far."""
        return sum(part.trained for part in self._parts)

    def said(self, completion: Completion, trained: bool = True) -> None:
        self._add(_Part(completion.tokens, completion.logprobs, completion.runs, trained, completion.experts))

    def shown(self, tokens: np.ndarray) -> None:
        """`tokens` int32 [n] that the model did not say. Raises ValueError where it has said nothing yet: they would
        belong to the prompt."""
        if not self._parts:
            raise ValueError("what is shown before the first turn belongs to the prompt")
        if len(tokens):
            version = self._parts[-1].runs[-1][0]
            self._add(_Part(tokens, np.zeros(len(tokens), np.float32), [(version, len(tokens))], False))

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
        """The whole; `reward` None: the sum of what the turns earned."""
        total = sum(each for _, each in self._earned) if reward is None else reward
        return Sample(
            tokens=self.tokens,
            prompt_length=len(self._prompt),
            logprobs=np.concatenate([part.logprobs for part in self._parts]),
            loss_mask=np.repeat([part.trained for part in self._parts], [len(part.tokens) for part in self._parts]),
            runs=merged([run for part in self._parts for run in part.runs]),
            reward=total,
            finish=finish,
            turn_rewards=self._earned if len(self._earned) > 1 else [],
            experts=self._experts(),
        )

    @property
    def _positions(self) -> int:
        """Positions whose experts are known."""
        return sum(len(part.experts) for part in self._parts if part.experts is not None)

    def _experts(self) -> np.ndarray | None:
        """Of the whole, [T - 1, layers, k]. Nothing is trained behind the last answer, so nobody asks for experts
        there: they are 0."""
        found = joined([part.experts for part in self._parts if part.trained or part.experts is not None])
        if found is None:
            return None
        missing = len(self._prompt) + self._length - 1 - len(found)
        return np.pad(found, ((0, missing), (0, 0), (0, 0))) if missing else found

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self._length += len(part.tokens)
