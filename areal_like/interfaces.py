"""The seams between rooms, as Protocols. Anything that has these methods fits; nothing need inherit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from areal_like.types import Batch, Completion, Limits, Outcome, Prompt, Sample
from areal_like.weights.state import State
from areal_like.weights.update import Update


class Task(Protocol):
    """Prompts and their verifier. Built in every process that needs it from the same config, so it is deterministic."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that prompts and answers use."""
        ...

    @property
    def pad_token(self) -> int: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """A response ends with one of these; empty when answers have a fixed length (`Prompt.max_tokens`)."""
        ...

    def size(self, split: str) -> int:
        """Number of rows of "train" or "heldout"; the two share no prompt."""
        ...

    def prompt(self, split: str, row: int) -> Prompt:
        """The prompt of a row: the same one every time, in every process."""
        ...

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float:
        """Score a response (int32 [R], filler excluded). Runs in the actor, which stands still while this computes: a
        call that overruns `rewards.timeout` earns 0. What may take long belongs into a `PooledTask`."""
        ...


@runtime_checkable
class PooledTask(Task, Protocol):
    """A task whose verifier may be slow, hang or crash: actors run it in a process of its own, under a time limit."""

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[Any, ...]]:
        """The verifier of a response, a function named "module:name", and its arguments (JSON values)."""
        ...


class Codec(Protocol):
    """Text to token ids and back, for workflows in which the model reads text that it did not write."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [n], without any that open or close a text."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens, without those that only end a turn."""
        ...

    def reply(self, text: str, *, closed: bool = True) -> np.ndarray:
        """The tokens that show `text` to the model after a turn of its own, up to where it goes on: int32 [n].
        `closed`: the turn had ended with a stop token."""
        ...

    def opening(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> np.ndarray:
        """The tokens of a conversation, up to where the model goes on: int32 [n]. Messages and tools are of OpenAI's
        form, arguments of calls as objects. This and the next are for the workflow `agent` alone. Raises ValueError."""
        ...

    def continuation(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = (), *, closed: bool = True
    ) -> np.ndarray:
        """As `reply`, for any messages. Raises ValueError."""
        ...


class Environment(Protocol):
    """A world of text, one object per episode; `reset` and `step` may be async, and must be if they take time: until
    they return or await, nothing else is done in the actor.

    Built from the config for each sample, without arguments. What it says must follow from the prompt and the actions
    alone: a sample that was broken off is played again up to where it was.
    """

    def reset(self, prompt: Prompt) -> str:
        """Begin; what the model is shown behind the prompt (often nothing)."""
        ...

    def step(self, action: str) -> Outcome:
        """The outcome of a turn of the model (also as a plain tuple)."""
        ...


class RolloutEngine(Protocol):
    """Turns prompts into completions, for many callers at once, while its weights change.

    One more method may be there. `progress() -> dict[str, int]`: the tokens so far of each request that has a place, by
    name (others wait); the buffer gives leases to another actor if they make none for `buffer.lease_timeout`. An engine
    without it must notice itself that it hangs.
    """

    version: int
    digest: str

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """Sample one completion. `request` names it for `abort`. Ends early with finish "abort" when aborted."""
        ...

    async def load(self, update: Update) -> None:
        """Apply new weights between two decode steps; returns when every later token is from the new version."""
        ...

    def abort(self, requests: Iterable[str]) -> None:
        """End the named requests within one decode step; their partial tokens are returned to their callers."""
        ...

    def stats(self) -> dict[str, float]:
        """Running totals: `tokens`, `busy_seconds`, `updates`, `apply_seconds`, and of the updates that stopped
        running sequences `pauses`, `pause_seconds`; `running` now."""
        ...

    async def close(self) -> None: ...


RewardFunction = Callable[[Prompt, np.ndarray], Awaitable[float]]
Workflow = Callable[..., Awaitable[Sample | None]]
"""`async (engine, reward, prompt, limits, request, filler, *, knobs) -> Sample | None`; None rejects the sample."""


class Trainer(Protocol):
    """The learner's compute: a batch in, changed weights out.

    One with a true attribute `streams` also has `take(part: Batch) -> None`: it is given groups of the next batch as
    they finish, in the order that they will have in it, and takes their gradients without applying them. One with a
    number `vocab_size` gets no groups with token ids that are not below it: the buffer refuses them.
    """

    def train(self, batch: Batch) -> dict[str, Any]:
        """One train step on one batch; returns metrics."""
        ...

    def snapshot(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
        """The weights to publish, or this rank's part of them: the very bits that the next step differentiates. Written
        into `into`, a state of the same tensors and part, if there is one; `done` is told how many bytes of its buffer
        are written, as they are."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write what the next train step depends on besides its batch (optimizer included) into a folder."""
        ...

    def load_state(self, folder: Path) -> None:
        """Go on from what `save_state` wrote: the same next batch gives the same bits."""
        ...

    def save(self, folder: str) -> None:
        """Write the weights so that users can load them."""
        ...
