"""The columnar codec of groups and partial groups: what a payload's bytes are, and the numbers beside it.

A payload is flat, one column after the other: tokens int32 | logprobs float32 | loss masks uint8 | places of turns
int32 | rewards of turns float64 | experts (`models.experts`). `ColumnSizes` says how many entries each column has,
some maybe none. The numbers beside it are tables of fixed-size entries, forwarded as the bytes that they came in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from areal_like.models.experts import NONE, Routing, Shape, width
from areal_like.types import Finish
from areal_like.wire.frames import Frame, WireError

FINISHES: tuple[Finish, ...] = get_args(Finish)
RUN = np.dtype([("version", "<i4"), ("n", "<i4")])
FORK = 2
"""In a loss mask (1: trained, 0: not): see `Sample.forks`."""
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""The largest reward: the learner computes in float32, where a larger one would be infinite."""
LOGPROB_ROUNDING = 1e-6
"""The largest log probability: an engine that takes the log of a softmax may give a certain token this much above 0."""
least_of = np.minimum.reduce  # an array's own `min` takes twice as long, and tables are small
most_of = np.maximum.reduce


class PayloadError(WireError):
    """A payload that no learner could train on; `column` names the wrong part."""

    def __init__(self, group_id: int, column: str, text: str):
        super().__init__(f"group {group_id}: {text}")
        self.column = column


# ---- payloads -------------------------------------------------------------------------------------------------------


class ColumnSizes(NamedTuple):
    """Entries of each column of a payload. `positions`: those that have experts, of the shape `experts`."""

    tokens: int
    logprobs: int
    masks: int = 0
    turns: int = 0
    positions: int = 0
    experts: Shape = NONE

    @property
    def bytes(self) -> int:
        """Of the payload."""
        known = 4 * self.tokens + 4 * self.logprobs + self.masks + 12 * self.turns
        return known + self.positions * width(self.experts)


Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""A payload's columns, as views: tokens, logprobs, masks, places, rewards, experts [positions, layers, k]. (A named
tuple would cost the buffer half a µs per group.)"""


_INT32, _FLOAT32, _FLOAT64, _UINT8 = map(np.dtype, ("<i4", "<f4", "<f8", "u1"))
_NO_TURNS = np.empty(0, np.int32), np.empty(0, np.float64)
_NO_EXPERTS = np.empty((0, 0, 0), np.uint8)


def columns(payload: Frame, sizes: ColumnSizes) -> Columns:
    """The columns of a payload of those sizes: nothing is copied. Those without entries may have any shape."""
    tokens, logprobs, masks, turns, positions, shape = sizes
    start = 4 * (tokens + logprobs) + masks
    places, rewards, experts = *_NO_TURNS, _NO_EXPERTS
    if turns:
        places = np.frombuffer(payload, _INT32, turns, start)
        rewards = np.frombuffer(payload, _FLOAT64, turns, start + 4 * turns)
    if shape != NONE:
        flat = np.frombuffer(payload, f"<u{shape[2]}", positions * shape[0] * shape[1], start + 12 * turns)
        experts = flat.reshape(positions, *shape[:2])
    return (
        np.frombuffer(payload, _INT32, tokens),
        np.frombuffer(payload, _FLOAT32, logprobs, 4 * tokens),
        np.frombuffer(payload, _UINT8, masks, 4 * (tokens + logprobs)),
        places,
        rewards,
        experts,
    )


def fill(column: np.ndarray, parts: Iterable[np.ndarray | None]) -> None:
    """Write the parts into a column, one after the other."""
    np.concatenate([part for part in parts if part is not None], out=column)


def check_columns(
    group_id: int, found: Columns, vocab_size: int | None, routing: Routing | None = None, shape: Shape = NONE
) -> None:
    """Raises PayloadError unless a learner can train on them: token ids in the vocabulary (None: of unknown size),
    logprobs finite and at most 0, loss masks 0, 1 or FORK, and experts (of `shape`, if there are any) those of the
    model's `routing` (None: not known). One pass over each column, or two."""
    tokens, logprobs, masks, *_, experts = found
    if vocab_size is not None and most_of(tokens.view(np.uint32)) >= vocab_size:  # negative ids are large
        least = int(least_of(tokens))
        wrong = least if least < 0 else int(most_of(tokens))
        text = f"token {wrong} is not in the vocabulary of {vocab_size}: does its actor use the same task and model?"
        raise PayloadError(group_id, "tokens", text)
    least_logprob, most = float(least_of(logprobs)), float(most_of(logprobs))
    if not (math.isfinite(least_logprob) and most <= LOGPROB_ROUNDING):
        text = f"logprobs from {least_logprob:g} to {most:g}: they must be finite and at most 0"
        raise PayloadError(group_id, "logprobs", text)
    if len(masks) and most_of(masks) > FORK:
        raise PayloadError(group_id, "loss mask", f"its loss mask is not made of 0, 1 and {FORK}")
    if routing and (problem := routing.problem(shape, experts)):
        raise PayloadError(group_id, "experts", problem)


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(packed: bytes, name: str, kind: np.dtype) -> np.ndarray:
    """A table's entries, at least one. Raises WireError."""
    if not packed or len(packed) % kind.itemsize:
        raise WireError(f"{name} is not a whole number of entries of {kind.itemsize} bytes, or empty")
    return np.frombuffer(packed, kind)


def covered_by(runs: np.ndarray, counts: np.ndarray, name: str) -> np.ndarray:
    """Tokens that each of some consecutive parts of `runs` covers, int64; `counts`, each at least 1, are the runs of
    each part. Raises WireError."""
    n_runs = np.add.reduce(counts, dtype=np.int64)
    if n_runs != len(runs):
        raise WireError(f"{name}: {n_runs} runs are named, {len(runs)} in the table")
    version, n = least_of(runs.view("<i4").reshape(-1, 2)).tolist()
    if version < 0 or n < 1:
        raise WireError(f"{name}: a run's version or length is out of range")
    return np.add.reduceat(runs["n"], starts_of(counts), dtype=np.int64)


def starts_of(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """The start of each part, for parts that follow one another."""
    ends: NDArray[np.int64] = np.add.accumulate(counts, dtype=np.int64)
    return ends - counts


def fits_float32(rewards: ArrayLike) -> bool:
    """Is each of them a finite number that float32 can hold?"""
    return bool(most_of(np.abs(rewards), axis=None) <= LARGEST_REWARD)  # False for NaN
