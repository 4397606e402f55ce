"""The actor's half of the probe: does the engine compute what the learner computes with the same weights?

    announcement with a probe (`learners.probe`) → weights applied → each server scores the prompts → mean |difference|
        at most the threshold: a number in the heartbeats │ above it: an alarm, until a later probe is clean

The threshold is `weights.probe_error`. Without it, an engine in half precision, whose error grows with the model, is
measured at its first probe: the same prompts in three different batches. The largest of the three errors is its noise,
and later probes alarm at `MULTIPLE` times that. The first one has an absolute threshold.

An alarm is an error in the actor's log, a note in the user's terminal and a fault of the run, and nothing more: the
recorded behaviour logprobs are the server's own, so losses still correct for them.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_like.wire.messages import Manifest, Probe

log = logging.getLogger(__name__)
EXACT, ROUNDED, MULTIPLE = 1e-3, 0.1, 3.0
"""Default thresholds, and of how much noise. In float32 a right server is off by 1e-5 or less, in half precision by up
to 0.13: there the threshold is at least `ROUNDED`, and at the first probe `MULTIPLE` times that."""
_MOST_CHARACTERS = 200


class ServedProbe:
    """Of one actor's engine. `most`: the threshold (None: by dtypes)."""

    def __init__(self, engine: Any, name: str, most: float | None):
        self._engine, self._name, self._most = engine, name, most
        self._task: asyncio.Task[None] | None = None
        self._errors: dict[str, tuple[float, float]] = {}  # of each server at its last probe: mean, largest
        self._noise: dict[str, float] = {}  # of each server that was measured
        self._notes: dict[str, str] = {}
        self._totals = {"probes": 0.0, "alarms": 0.0}

    @property
    def note(self) -> str:
        """What is wrong, in words; "" if nothing is."""
        return "; ".join(self._notes.values())[:_MOST_CHARACTERS]

    def stats(self) -> dict[str, float]:
        """Metrics, as `actors.measures` has them: of the last probe of each server, and counts."""
        found = {f"sum:served/{name}": total for name, total in self._totals.items()}
        if self._errors:
            means, largest = zip(*self._errors.values(), strict=True)
            found |= {"mean:served/logprob_error": float(np.mean(means)), "max:served/logprob_error_max": max(largest)}
        return found

    def begin(self, manifest: Manifest) -> None:
        """Probe the engine, which holds the manifest's version, beside generation, in place of a probe under way."""
        probe = manifest.probe
        if probe is not None and hasattr(self._engine, "logprobs_of"):
            self.close()
            self._task = asyncio.get_running_loop().create_task(self._compare(manifest.version, probe))

    async def _compare(self, version: int, probe: Probe) -> None:
        exact = probe.dtype == "float32" == getattr(self._engine, "dtype", "")
        try:
            found = await self._off(version, probe, [range(len(probe.tokens))])
            if not exact and not self._most:
                await self._measure_noise(version, probe, found)
        except Exception as error:  # the engine itself sees to it that it works
            log.warning("version %d was not probed: %s: %s", version, type(error).__name__, error)
            return
        for server, off in found.items():
            self._judge(server, version, float(np.nanmean(off)), float(np.nanmax(off)), exact)

    async def _off(self, version: int, probe: Probe, batches: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """Server → |differences| in these batches of the probe's rows; none of one that has newer weights by now."""
        off: dict[str, list[np.ndarray]] = {}
        for rows in batches:
            expected = np.concatenate([np.array(probe.logprobs[row], np.float32) for row in rows])
            for each in await self._engine.logprobs_of([np.array(probe.tokens[row], np.int32) for row in rows]):
                if each.version == version:
                    off.setdefault(each.server, []).append(np.abs(np.concatenate(each.logprobs) - expected))
        joined = {server: np.concatenate(parts) for server, parts in off.items()}
        return {server: each for server, each in joined.items() if not np.isnan(each).all()}

    async def _measure_noise(self, version: int, probe: Probe, found: dict[str, np.ndarray]) -> None:
        """Of servers in `found`, the first batch, that have none yet; unless it is larger than rounding explains."""
        if found.keys() <= self._noise.keys():
            return
        rows = range(len(probe.tokens))
        others = [[*rows, *reversed(rows)]], [[row] for row in rows]
        batches = [found, *[await self._off(version, probe, each) for each in others]]
        for server in found.keys() - self._noise.keys():
            noise = max(float(np.nanmean(each[server])) for each in batches if server in each)
            if noise <= MULTIPLE * ROUNDED:
                self._noise[server] = noise

    def _threshold(self, server: str, exact: bool) -> tuple[float, str]:
        """With its reason."""
        noise = self._noise.get(server)
        if self._most or exact:
            return self._most or EXACT, "weights.probe_error"
        if noise is None:
            return MULTIPLE * ROUNDED, "more than rounding explains"
        return max(ROUNDED, MULTIPLE * noise), f"its noise at the first probe was {noise:.2g}"

    def _judge(self, server: str, version: int, mean: float, largest: float, exact: bool) -> None:
        self._errors[server] = mean, largest
        self._totals["probes"] += 1
        who, (threshold, why) = server or "the engine", self._threshold(server, exact)
        if mean <= threshold:
            self._notes.pop(server, None)
            return
        self._totals["alarms"] += 1
        found = f"{who} does not serve version {version}: logprobs are off by {mean:.2g} on average"
        self._notes[server] = f"{found}, above {threshold:.2g} ({why}); see docs/clusters.md"
        hint = "restart this actor, or raise weights.probe_error if the engine computes so coarsely on purpose"
        log.error("%s: %s, at most by %.2g, above %.2g (%s); %s", self._name, found, largest, threshold, why, hint)

    def close(self) -> None:
        if self._task:
            self._task.cancel()
            self._task = None
