"""What decode steps cost an engine, as sums: from them `scripts.calibrate` fits the costs of a simulation.

Steps are counted by how many sequences they had, in classes 1, 2, 3 to 4, 5 to 8, ... The time of a step runs to the
begin of the next one, so it includes what the process does between two; the prefill of sequences that join, and weight
updates, are not part of it."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.run_folder import COSTS, write_costs

GROUPS = 256
"""The newest ones, whose lengths are kept."""
VALUES = 4
"""Of a step: 1, sequences, tokens that these hold, seconds."""


class StepCosts:
    """`decode`: class → sums over its steps of the products of each two of a step's `VALUES`, float64 [4, 4]: what a
    least-squares fit needs (its first row: steps, sequences, tokens, seconds). `prefill`: computed tokens of sequences
    that joined, and seconds; `again`: held tokens of running ones whose cache an update made stale, and seconds to
    compute it anew. `begun`: sequences that joined for the first time, with the prompt alone. `busy`: seconds in
    which the engine itself was at work. `handled`: finished samples, and the processor time of the actor's thread
    outside the engine; `buffer`: the same of the buffer. `cores`: of each host. `lengths`: sampled tokens of each
    sample of a group."""

    def __init__(self) -> None:
        self.decode: dict[int, NDArray[np.float64]] = {}
        self.prefill = [0.0, 0.0]
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
            self._class((sequences - 1).bit_length())[:] += values[:, None] * values
            self._open = None

    def _class(self, size: int) -> NDArray[np.float64]:
        return self.decode.setdefault(size, np.zeros((VALUES, VALUES)))

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
        for size, sums in said["decode"].items():
            self._class(int(size))[:] += np.array(sums)
        self.prefilled(*said["prefill"])
        self.recomputed(*said.get("again", (0, 0)))
        self.busy += said["busy"]
        self.begun += said.get("begun", 0)
        self.lengths.extend(said.get("lengths", ()))

    def write(self, run: Path, role: str, samples: int) -> None:
        """Write the sums so far, in the place of earlier ones; `samples` have ended. Call it in the engine's thread."""
        if self.decode:
            decode = {size: sums.tolist() for size, sums in self.decode.items()}
            handled = samples, max(0.0, thread_time() - self._elsewhere)
            counted = {name: getattr(self, name) for name in ("prefill", "again", "begun", "busy")}
            write_costs(run, role, {"decode": decode, **counted, "handled": handled, "lengths": list(self.lengths)})


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
