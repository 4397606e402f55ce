"""Which counts of a run are faults, and the words for them."""

from __future__ import annotations

from typing import Any

EXPECTED = ("end of run", "stale")
"""Reasons to drop a group that are not faults."""
FAULTS = {
    "train/nonfinite_steps": "train steps without a finite loss or gradient",
    "served/alarms": "alarms: an engine computes other logprobs than the learner",
    "rewards/timeouts": "verifier time-outs (they earn 0)",
    "rewards/errors": "errors of verifiers",
    "rewards/resamples": "samples drawn again after their reward crashed",
}


def faults(row: dict[str, Any]) -> str:
    """Faults so far, from a row of metrics or a status; empty if none."""
    found = [f"{row[key]:.0f} {text}" for key, text in FAULTS.items() if row.get(key)]
    for key, count in row.items():
        kind, _, reason = key.rpartition("/")
        if kind == "refused":
            found.append(f"{count} groups refused ({reason})")
        elif kind == "ledger/dropped" and reason not in EXPECTED:
            found.append(f"{count} groups dropped ({reason})")
    return ", ".join(found)
