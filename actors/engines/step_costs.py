"""What decode steps cost an engine, as sums: from them `scripts.calibrate` fits the costs of a simulation.

Steps are counted by how many sequences they had, in classes 1, 2, 3 to 4, 5 to 8, ... The time of a step runs to the
begin of the next one, so it includes what the process does between two; the prefill of sequences that join, and weight
updates, are not part of it. `measure_missing` times a few steps of the sizes that a run did not have."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from areal_like.run.run_folder import COSTS, write_costs
from areal_like.types import Completion, Limits

log = logging.getLogger(__name__)
GROUPS = 256
"""The newest ones, whose lengths are kept."""
FIELDS = ("prefill", "prefills", "again", "begun", "busy")
"""Of `StepCosts`, which are written as they are."""
VALUES = 4
"""Of a step: 1, sequences, tokens that these hold, seconds."""
BLOCKS, BLOCK_SECONDS = 1024, 0.01
"""The newest ones are kept. Steps that follow one another are one block until they have taken so long."""
FEW_STEPS = 32
"""A class with fewer steps is missing."""
MISSING_SECONDS, MISSING_STEPS, WARMUP_STEPS, TRIES = 0.8, 16, 2, 4
"""For all missing sizes together, prefill included; steps of each size at most, behind those that warm up; how often,
of which the fastest counts: other processes may still be at work. A role has `process.TERM_SECONDS` to end."""


class StepCosts:
    """`decode`: class → sums over its steps of the products of each two of a step's `VALUES`, float64 [4, 4]: what
    a least-squares fit needs (its first row: steps, sequences, tokens, seconds). `prefill`: computed tokens of
    sequences that joined, and seconds; `prefills`: how often, and sums of their squares and product (tokens²,
    tokens · seconds, seconds²), which tell how they scatter; `again`: held tokens of running ones whose cache an
    update made stale, and seconds to compute it anew. `begun`: sequences that joined for the first time, with the
    prompt alone. `busy`: seconds in which the engine itself was at work. `handled`: finished samples, and the
    processor time of the actor's thread outside the engine; `buffer`: the same of the buffer. `cores`: of each
    host. `lengths`: sampled tokens of each sample of a group. `alone`: as `decode`, of steps while nothing else ran
    (`measure_missing`). `blocks`: begin and end, in seconds since 1970, steps, sequences, tokens and seconds of
    steps that followed one another."""

    def __init__(self) -> None:
        self.decode: dict[int, NDArray[np.float64]] = {}
        self.alone: dict[int, NDArray[np.float64]] = {}
        self.blocks: deque[list[float]] = deque(maxlen=BLOCKS)
        self._since_1970 = time.time() - perf_counter()
        self.prefill = [0.0, 0.0]
        self.prefills = [0.0, 0.0, 0.0, 0.0]
        self.again = [0.0, 0.0]
        self.begun = 0
        self.busy = 0.0
        self.handled = [0.0, 0.0]
        self.buffer = [0.0, 0.0]
        self.cores: dict[str, int] = {}
        self.lengths: deque[list[int]] = deque(maxlen=GROUPS)
        self._elsewhere = thread_time()  # of the thread: before this, and in the engine
        self._open: tuple[float, int, int] | None = None  # begin, sequences and tokens of the step under way

    def begin(self, now: float, sequences: int, tokens: int) -> None:
        """A step begins; the one before it has ended."""
        self.end(now)
        self._open = now, sequences, tokens

    def end(self, now: float) -> None:
        """The step under way, if any, has ended; no other follows at once."""
        if self._open is not None:
            begin, sequences, tokens = self._open
            values = np.array((1.0, sequences, tokens, now - begin))
            _of(self.decode, class_of(sequences))[:] += values[:, None] * values
            self._in_block(begin, now, (1.0, sequences, tokens, now - begin))
            self._open = None

    def _in_block(self, begin: float, end: float, values: tuple[float, ...]) -> None:
        begin, end = begin + self._since_1970, end + self._since_1970
        if not self.blocks or self.blocks[-1][-1] >= BLOCK_SECONDS:
            self.blocks.append([begin, end, 0.0, 0.0, 0.0, 0.0])
        block = self.blocks[-1]
        block[1] = end
        block[2:] = [a + b for a, b in zip(block[2:], values, strict=True)]

    @property
    def largest(self) -> int:
        """The class whose steps took most of the time."""
        return max(self.decode, key=lambda size: self.decode[size][0, 3])

    def skip(self, seconds: float) -> None:
        """So much of the time since the last begin does not belong to the step."""
        if self._open is not None:
            self._open = self._open[0] + seconds, *self._open[1:]

    def worked(self, seconds: float) -> None:
        """So much processor time of this thread was the engine's."""
        self._elsewhere += seconds

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.prefill[0] += tokens
        self.prefill[1] += seconds
        products = 1.0, tokens * tokens, tokens * seconds, seconds * seconds
        self.prefills = [a + b for a, b in zip(self.prefills, products, strict=True)]

    def recomputed(self, tokens: int, seconds: float) -> None:
        self.again[0] += tokens
        self.again[1] += seconds

    def answered(self, lengths: list[int]) -> None:
        self.lengths.append(lengths)

    def add(self, said: dict[str, Any]) -> None:
        """What a role has written. Raises KeyError, TypeError, ValueError."""
        if "buffer" in said:
            self.buffer = said["buffer"]
            return
        self.handled = [a + b for a, b in zip(self.handled, said.get("handled", (0, 0)), strict=True)]
        self.cores |= said.get("cores", {})
        for ours, theirs in ((self.decode, said["decode"]), (self.alone, said.get("alone", {}))):
            for size, sums in theirs.items():
                _of(ours, int(size))[:] += np.array(sums)
        for name in ("prefill", "prefills"):
            ours = getattr(self, name)
            setattr(self, name, [a + b for a, b in zip(ours, said.get(name, [0.0] * len(ours)), strict=True)])
        self.recomputed(*said.get("again", (0, 0)))
        self.busy += said["busy"]
        self.begun += said.get("begun", 0)
        self.lengths.extend(said.get("lengths", ()))
        self.blocks.extend(said.get("blocks", ()))

    def write(self, run: Path, role: str, samples: int) -> None:
        """Write the sums so far, in the place of earlier ones; `samples` have ended. Call it in the engine's thread."""
        if self.decode:
            said: dict[str, object] = {name: getattr(self, name) for name in FIELDS}
            for name, classes in (("decode", self.decode), ("alone", self.alone)):
                said[name] = {size: sums.tolist() for size, sums in classes.items()}
            said["handled"] = samples, max(0.0, thread_time() - self._elsewhere)
            write_costs(run, role, {**said, "lengths": list(self.lengths), "blocks": list(self.blocks)})


def class_of(sequences: int) -> int:
    return (sequences - 1).bit_length()


def _of(classes: dict[int, NDArray[np.float64]], size: int) -> NDArray[np.float64]:
    return classes.setdefault(size, np.zeros((VALUES, VALUES)))


@runtime_checkable
class Counting(Protocol):
    """An engine whose decode steps are counted."""

    slots: int
    step_costs: StepCosts

    async def generate(self, tokens: NDArray[np.int32], limits: Limits) -> Completion: ...


async def measure_missing(engine: Counting) -> None:
    """Time a few decode steps of the sizes that this run did not have (powers of 4, and all slots), and of the size
    that most of its steps had, to compare; nothing else may run. An async run has steps of one size, and what others
    cost would be a guess. It ends after `MISSING_SECONDS`, and is left out where steps take too long for that."""
    counted = engine.step_costs
    sizes = _missing(counted, engine.slots)
    if not sizes:
        return
    steps, sequences, tokens, seconds = counted.decode[counted.largest][0]
    sizes = [round(sequences / steps), *sizes]
    affordable = int(MISSING_SECONDS / (TRIES * len(sizes) * seconds / steps)) - WARMUP_STEPS
    if affordable < 1:
        return
    began, prompt = thread_time(), np.zeros(max(1, round(tokens / sequences)), np.int32)
    try:
        async with asyncio.timeout(MISSING_SECONDS):
            for size in TRIES * sizes:
                for limit in (WARMUP_STEPS, min(MISSING_STEPS, affordable)):
                    engine.step_costs = StepCosts()
                    await asyncio.gather(*(engine.generate(prompt, Limits(limit, key=key)) for key in range(size)))
                for each, sums in engine.step_costs.decode.items():
                    best = counted.alone.setdefault(each, sums)
                    if sums[0, 3] / sums[0, 0] < best[0, 3] / best[0, 0]:
                        counted.alone[each] = sums
    except Exception as error:  # whatever it is (no time left, no room, a broken engine), the run has ended well
        log.debug("decode steps of %s sequences were not measured: %s", sizes, error)
    finally:
        engine.step_costs = counted
        counted.worked(thread_time() - began)


def _missing(counted: StepCosts, slots: int) -> list[int]:
    """Numbers of sequences."""
    if not counted.decode:
        return []
    sizes = [*(4**power for power in range(class_of(slots) // 2 + 1)), slots]
    few = {class_of(size) for size in sizes} - {
        size for size, sums in counted.decode.items() if sums[0, 0] >= FEW_STEPS
    }
    return sorted({size for size in sizes if size <= slots and class_of(size) in few})


def read(run: Path) -> StepCosts:
    """The sums of all actors of a run; empty where none has counted. Raises ValueError for a broken file."""
    found = StepCosts()
    found.lengths = deque()  # those of all actors
    for path in sorted((run / COSTS).glob("*.json")):
        try:
            found.add(json.loads(path.read_text()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: not what an actor or the buffer writes ({what})") from None
    return found
