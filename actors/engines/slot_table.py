"""State of the embedded engine's running sequences, as NumPy arrays over slots: all but keys and values.

Slots 0..n-1 are in use, always: a sequence that leaves is replaced by the last one, so that each decode step works
on plain views. Driven by `torch_engine`, which mirrors `remove` in the KV cache.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from areal_like.models.experts import joined_experts
from areal_like.models.model_folder import bounds
from areal_like.stops import finish_of
from areal_like.types import Completion, Finish, Limits, Runs

NO_TOKEN = -1


def check_prompt(tokens: np.ndarray, longest: int, config: Any, embedded: bool = True) -> None:
    """Raises ValueError unless a model with this config can continue a prompt, int [P], by `longest` tokens."""
    if len(tokens) == 0 or longest < 1:
        raise ValueError("a request needs at least one prompt token and max_tokens of at least 1")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(f"prompt has token ids outside 0..{config.vocab_size - 1}")
    for name, most in bounds(config, embedded).items():
        if len(tokens) + longest > most:
            total = f"{len(tokens)} prompt tokens + max_tokens {longest}"
            raise ValueError(f"{total} exceed the model's {name}={most} positions")


@dataclass(eq=False, slots=True)
class SlotRequest:
    """One caller's sequence. `slot` is None while it waits for one; `runs`: of past versions; `joined`: its place in
    the order of getting a slot; `prefilled`: number of updates when its prompt was computed. `before`: tokens and
    logprobs from before preemptions, where they became part of `prompt`. `experts`: from each stay in a slot."""

    name: str
    prompt: np.ndarray
    limits: Limits
    future: asyncio.Future[Completion]
    slot: int | None = None
    joined: int = 0
    prefilled: int = -1
    before: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    runs: Runs = field(default_factory=list)


class PositionSpan(NamedTuple):
    """Positions [start, stop) of the sequences in `slots`, in which these are equal up to `stop`."""

    slots: list[int]
    start: int
    stop: int


class SlotTable:
    """Columns, each [slots] or [slots, time]: `tokens` int64 (prompt, then response), `logprobs` float32 (at the
    position of their token), `lengths` int64 (tokens so far), `temperatures` float32, `rows` int64 (in the decode step
    that has begun last)."""

    def __init__(self, slots: int):
        self.slots = slots
        self.requests: list[SlotRequest] = []
        self.tokens = np.zeros((slots, 0), np.int64)
        self.logprobs = np.zeros((slots, 0), np.float32)
        self.lengths = np.zeros(slots, np.int64)
        self.temperatures = np.zeros(slots, np.float32)
        self.rows = np.zeros(slots, np.int64)
        self._keys = np.zeros(slots, np.uint64)
        self._shifts = np.zeros(slots, np.int64)  # position in the random stream − position in the sequence
        self._ends = np.zeros(slots, np.int64)  # length at which the sequence is cut
        self._run_starts = np.zeros(slots, np.int64)
        self._stops = np.full((slots, 1), NO_TOKEN, np.int64)
        self._texts = np.zeros(slots, bool)  # whether the sequence has stop texts
        self._rows = np.arange(slots)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: SlotRequest) -> int:
        slot, prompt, limits = len(self.requests), request.prompt, request.limits
        length, end = len(prompt), len(prompt) + limits.max_tokens
        stops = *limits.stop, *limits.stop_ids
        self._widen(end, len(stops))
        self.tokens[slot, :length] = prompt
        self.lengths[slot] = self._run_starts[slot] = length
        self.temperatures[slot] = limits.temperature
        self._keys[slot] = limits.key
        self._shifts[slot] = limits.offset - length
        self._ends[slot] = end
        self._stops[slot] = NO_TOKEN
        self._stops[slot, : len(stops)] = stops
        self._texts[slot] = limits.stop_texts is not None
        self.requests.append(request)
        request.slot = slot
        return slot

    def _widen(self, time: int, stops: int) -> None:
        extra = time - self.tokens.shape[1]
        if extra > 0:
            extra = max(extra, self.tokens.shape[1])
            self.tokens = np.pad(self.tokens, ((0, 0), (0, extra)))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, extra)))
        if stops > self._stops.shape[1]:
            more = stops - self._stops.shape[1]
            self._stops = np.pad(self._stops, ((0, 0), (0, more)), constant_values=NO_TOKEN)

    def last_tokens(self) -> np.ndarray:
        """int64 [n]: what the next decode step is fed."""
        n = len(self.requests)
        return self.tokens[self._rows[:n], self.lengths[:n] - 1]

    def stream(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys uint64 [n] and positions int64 [n] of the uniform numbers that decide each sequence's next token."""
        n = len(self.requests)
        return self._keys[:n], self.lengths[:n] + self._shifts[:n]

    def append(self, tokens: np.ndarray, logprobs: np.ndarray) -> list[tuple[int, Finish]]:
        """Add one token [n] to each sequence → (slot, reason) of those that are finished, in falling slot order."""
        n = len(self.requests)
        rows, lengths = self._rows[:n], self.lengths[:n]
        self.tokens[rows, lengths] = tokens
        self.logprobs[rows, lengths] = logprobs
        lengths += 1
        stopped = (self._stops[:n] == tokens[:, None]).any(axis=1)
        for slot in np.flatnonzero(self._texts[:n]):
            stopped[slot] |= self._has_text(int(slot))
        finished = np.flatnonzero(stopped | (lengths >= self._ends[:n]))
        return [(int(slot), self._finish(int(slot)) if stopped[slot] else "length") for slot in finished[::-1]]

    def _has_text(self, slot: int) -> bool:
        request, length = self.requests[slot], int(self.lengths[slot])
        texts = request.limits.stop_texts
        assert texts is not None
        begin = max(len(request.prompt) - request.limits.begun, length - texts.window)
        return texts.end(self.tokens[slot, begin:length])

    def _finish(self, slot: int) -> Finish:
        limits, token = self.requests[slot].limits, int(self.tokens[slot, self.lengths[slot] - 1])
        return finish_of(token, limits) if token in (*limits.stop, *limits.stop_ids) else "stop_text"

    def end_runs(self, version: int) -> None:
        """Every token since the last call is of `version`; later ones are of another."""
        for request in self.requests:
            self._end_run(request, version)

    def _end_run(self, request: SlotRequest, version: int) -> None:
        count = int(self.lengths[request.slot] - self._run_starts[request.slot])
        if count:
            known = request.runs.pop()[1] if request.runs and request.runs[-1][0] == version else 0
            request.runs.append((version, known + count))
            self._run_starts[request.slot] += count

    def completion(self, slot: int, finish: Finish, version: int) -> Completion:
        """The slot's response so far; its newest tokens are of `version`."""
        request = self.requests[slot]
        self._end_run(request, version)
        response = slice(len(request.prompt), int(self.lengths[slot]))
        request.before.append((self.tokens[slot, response].astype(np.int32), self.logprobs[slot, response].copy()))
        return whole(request, finish)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; 0 without any."""
        return int(self.lengths[: len(self.requests)].max(initial=0))

    def remove(self, slot: int) -> int | None:
        """Free a slot → the slot whose sequence was moved into it, if any."""
        self.requests[slot].slot = None
        last = self.requests.pop()
        moved = len(self.requests)
        if moved == slot:
            return None
        self.requests[slot] = last
        last.slot = slot
        length = self.lengths[moved]
        self.tokens[slot, :length] = self.tokens[moved, :length]
        self.logprobs[slot, :length] = self.logprobs[moved, :length]
        columns = self.lengths, self.temperatures, self.rows, self._keys, self._shifts, self._ends, self._run_starts
        for column in (*columns, self._stops, self._texts):
            column[slot] = column[moved]
        return moved


def whole(request: SlotRequest, finish: Finish) -> Completion:
    tokens, logprobs = ([part[i] for part in request.before] for i in (0, 1))
    none, experts = np.zeros(0), joined_experts(request.experts)
    return Completion(
        np.concatenate([none, *tokens]).astype(np.int32),
        np.concatenate([none, *logprobs]).astype(np.float32),
        request.runs,
        finish,
        None if experts is None else experts[request.limits.experts_from :],
    )
