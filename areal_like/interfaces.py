"""The seams between rooms, as Protocols. Any object with these methods fits; inheritance is not needed."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from areal_like.types import Batch, Completion, Limits, Prompt, Sample
from areal_like.weights.replica import Update
from areal_like.weights.state import State


class Outcome(NamedTuple):
    """An environment's answer to an action: the text shown, the turn's reward (None: ask the task's verifier about
    the action), and whether the episode has ended."""

    observation: str
    reward: float | None
    done: bool


@dataclass(frozen=True, slots=True)
class Scored:
    """A server's scores ("": the embedded engine's) of some sequences: per sequence the logprobs, float32 [n - 1], at
    temperature 1, of each token behind the first (NaN: not known); under the weights of `version`."""

    server: str
    version: int
    logprobs: list[np.ndarray]


class Task(Protocol):
    """Prompts and their verifier. Built as `Task(seed, *, knobs)` in every process that needs it, from `run.seed`, so
    it is deterministic. A mixture also has `members`, its tasks by name, and their `ratios`."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
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

    async def reward(self, prompt: Prompt, tokens: np.ndarray) -> float | Mapping[str, float] | None:
        """Score a response (int32 [R], filler excluded), in the actor: a call that waits for more than ten times
        `rewards.timeout` earns 0. Use `PooledTask` for slow verifiers. The score is a number, its parts by name, which
        an attribute `reward_weights` adds up (each 1, if not given), or None: the sample is left out."""
        ...


Verification = tuple[str, tuple[object, ...], Mapping[str, object]]


@runtime_checkable
class PooledTask(Task, Protocol):
    """A task whose verifier may be slow, hang or crash: actors run it in a process of its own, under a time limit."""

    def verification(self, prompt: Prompt, tokens: np.ndarray) -> tuple[str, tuple[object, ...]] | Verification:
        """The verifier of a response, "module:name", and its arguments (JSON values), by position and maybe by name."""
        ...


class Codec(Protocol):
    """Text to token ids and back, for workflows in which the model reads text that it did not write."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [n], without any that open or close a text."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens, without those that only end a turn."""
        ...

    def reply(self, text: str, *, closed: bool | int = True) -> np.ndarray:
        """The tokens that show `text` to the model after a turn of its own, up to where it goes on: int32 [n].
        `closed`: the stop token that had ended the turn (True: any); False: it had ended without one."""
        ...

    def opening(self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = ()) -> np.ndarray:
        """The tokens of a conversation, up to where the model goes on: int32 [n]. Messages and tools are of OpenAI's
        form, arguments of calls as objects. This and the next are only for the workflow `agent`. Raises ValueError."""
        ...

    def continuation(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = (), *, closed: bool | int = True
    ) -> np.ndarray:
        """As `reply`, for any messages. Raises ValueError."""
        ...

    def rewrites(self, said: str, messages: Sequence[Mapping[str, object]], tools: Sequence[object] = ()) -> bool:
        """Is a turn with this text of the model written differently when these messages follow? Then `continuation`
        doesn't fit, and the conversation forks (`Sample.forks`). A codec without this method never does."""
        ...


class Environment(Protocol):
    """A world of text, one object per episode; `reset` and `step` may be async, and must be if they take time: they
    block the whole actor until they return or await.

    Built as `Environment(*, knobs)` for each sample, and once to check the knobs.

    Optional: `close()`, maybe async, called when the episode is over, however it ends; a class attribute `limited =
    True`: the async methods have time limits of their own, so that waiting for them does not count for
    `buffer.lease_timeout`; counts `tool_calls` and `tool_errors`, for the metrics."""

    def reset(self, prompt: Prompt) -> str:
        """Start the episode; returns the text shown at the end of the prompt's last message (often nothing).
        `areal_like.tasks.episodes.seed_of` makes a seed of the prompt."""
        ...

    def step(self, action: str) -> Outcome:
        """The outcome of one turn of the model (a plain tuple is fine, too)."""
        ...


class RolloutEngine(Protocol):
    """Turns prompts into completions, for many callers at once, while its weights change.

    Built as `Engine(*, knobs)`; with a class attribute `needs_model = True` as `Engine(model, *, knobs)`, where the
    model is a transformers model rounded to the published bits; with `needs_folder = True`, too, as `Engine(model,
    folder, *, knobs)`, a folder for files of its own processes. `slots` is how many sequences it takes at once.

    Three methods are optional. `progress() -> dict[str, int]`: the tokens so far of each request that is being decoded
    (`buffer.lease_timeout`); without it an engine must detect its own hangs. `async logprobs_of(sequences) ->
    list[Scored]`: the logprobs of token sequences by each of its servers; with it the engine is probed
    (`actors.probe_check`), and has an attribute `dtype`, in which it multiplies matrices. `replica_of(state)`: where
    published bits, `state` at first, are kept for it (`areal_like.weights.replica`; by default in main memory)."""

    version: int
    digest: str
    slots: int

    async def generate(self, tokens: np.ndarray, limits: Limits, request: str = "") -> Completion:
        """Sample one completion. `request` names it for `abort`, which ends it early with finish "abort"."""
        ...

    async def load(self, update: Update) -> None:
        """Apply new weights between two decode steps; returns when every later token is from the new version."""
        ...

    def abort(self, requests: Iterable[str]) -> None:
        """End the named requests within one decode step; their partial tokens are returned to their callers."""
        ...

    def stats(self) -> dict[str, float]:
        """Running totals: `tokens`, `busy_seconds`, `updates`, `apply_seconds`, and of the updates that stopped running
        sequences `pauses`, `pause_seconds`; `running` now. An optional class attribute `METRICS` makes metrics of
        others: name → `HOW:METRIC` (`actors.measures`)."""
        ...

    async def close(self) -> None: ...


RewardFunction = Callable[[Prompt, np.ndarray], Awaitable[float]]
Workflow = Callable[..., Awaitable[Sample | None]]
"""`async (engine, reward, prompt, limits, request, *, knobs) -> Sample | None` (rejected). `request` names it."""


class Trainer(Protocol):
    """The learner's compute: a batch in, changed weights out.

    Built as `Trainer(*, knobs)`; with a class attribute `needs_model = True` as `Trainer(model, loss, advantage,
    temperature, seed, *, knobs)`: a transformers model, a loss and an advantage whose knobs are bound,
    `sampling.temperature` and `run.seed`.

    Some attributes are optional. `facts` (`wire.messages.Model`): the buffer refuses groups that do not fit them. The
    loop sets `shall_stop()`: True where `train` shall undo its step and raise `learners.untrainable.Interrupted`.
    `numbers(group_id)`: the last step's numbers per token (`learners.step.Step.numbers`). `staleness()` is
    `Batch.staleness` of all that was trained last, where `train` gets one rank's share. `logprobs_of(sequences)`, for
    probes: logprobs at temperature 1 of each token behind the first, row by row, and the dtype of their precision.
    `save_beside()` returns a `run.checkpoints.Saving`, which does as `save_state` while training continues."""

    def train(self, batch: Batch) -> Mapping[str, object]:
        """One train step on one batch; returns metrics."""
        ...

    def snapshot(self, into: State | None = None, done: Callable[[int], None] | None = None) -> State:
        """The weights to publish, or this rank's part of them: the very bits that the next step differentiates. Written
        into `into`, if given; `done` receives the number of bytes of its buffer written so far."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write the state that the next train step depends on, except its batch (optimizer included)."""
        ...

    def load_state(self, folder: Path) -> None:
        """Continue from what `save_state` wrote: the same next batch gives the same bits."""
        ...

    def save(self, folder: str) -> None:
        """Write the weights so that users can load them."""
        ...


@dataclass(frozen=True)
class Tracked:
    """A run. `settings`: dotted key → value of its whole config."""

    folder: Path
    project: str
    name: str
    settings: Mapping[str, object]


class Tracker(Protocol):
    """Shows the rows of RUN/metrics.jsonl. May raise any error: the run continues without it, and reports the failure
    once. `where`: for the user, how to look at the run there."""

    where: str

    def __init__(self, run: Tracked) -> None: ...

    def add(self, row: Mapping[str, object]) -> None:
        """A row of metrics.jsonl: "step", numbers or None, histograms as dicts from value (text) to count."""

    def end(self, summary: Mapping[str, object] | None) -> None:
        """The run has ended, or (None) was interrupted. All that was sent must be safe when this returns."""
