"""The actor's half of the probe: does the engine compute what the learner computes with the same weights?

    announcement with a probe (`learners.probe`) → weights applied → each server scores the prompts → mean |difference|
        at most `weights.probe_error`: a number in the heartbeats │ above it: an alarm, until a later probe is clean

An alarm is an error in the actor's log, a note in the user's terminal and a fault of the run, and nothing more: the
recorded behaviour logprobs are the server's own, so losses still correct for them.
"""

import asyncio
import logging
from typing import Any

import numpy as np

from areal_like.wire.messages import Manifest, Probe

log = logging.getLogger(__name__)
EXACT, ROUNDED = 1e-3, 0.1
"""Default thresholds. In float32 a right server is off by 1e-5 or less, in half precision by some hundredths."""
_MOST_CHARACTERS = 200


class ServedProbe:
    """Of one actor's engine. `most`: the threshold (None: by dtypes)."""

    def __init__(self, engine: Any, name: str, most: float | None):
        self._engine, self._name, self._most = engine, name, most
        self._task: asyncio.Task[None] | None = None
        self._errors: dict[str, tuple[float, float]] = {}  # of each server at its last probe: mean, largest
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
        try:
            scored = await self._engine.logprobs_of([np.array(row, np.int32) for row in probe.tokens])
        except Exception as error:  # the engine itself sees to it that it works
            log.warning("version %d was not probed: %s: %s", version, type(error).__name__, error)
            return
        expected = np.concatenate([np.array(row, np.float32) for row in probe.logprobs])
        exact = probe.dtype == "float32" == getattr(self._engine, "dtype", "")
        threshold = self._most or (EXACT if exact else ROUNDED)
        for each in scored:
            off = np.abs(np.concatenate(each.logprobs) - expected)
            if each.version == version and not np.isnan(off).all():  # otherwise it has newer weights by now
                self._judge(each.server, version, float(np.nanmean(off)), float(np.nanmax(off)), threshold)

    def _judge(self, server: str, version: int, mean: float, largest: float, threshold: float) -> None:
        self._errors[server] = mean, largest
        self._totals["probes"] += 1
        who = server or "the engine"
        if mean <= threshold:
            self._notes.pop(server, None)
            return
        self._totals["alarms"] += 1
        found = f"{who} does not serve version {version}: logprobs are off by {mean:.2g} on average"
        self._notes[server] = f"{found}, above {threshold:g} (weights.probe_error); see docs/gpu.md"
        hint = "restart this actor, or raise weights.probe_error if the engine computes so coarsely on purpose"
        log.error(
            "%s: %s, at most by %.2g, above weights.probe_error=%g; %s", self._name, found, largest, threshold, hint
        )

    def close(self) -> None:
        if self._task:
            self._task.cancel()
            self._task = None
